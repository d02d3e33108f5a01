"""A plan -> the same, with gradients of two bytes reduced over replicas as fp32, where a spec says so.

Gradients are added up in fp32 over micro-batches, and then over ranks (Megatron-LM, arguments.py: "accumulate and
all-reduce gradients in fp32 for bfloat16 data type"; PyTorch's MixedPrecisionPolicy, reduce_dtype). What tensor ranks
and stages give each other stays as it is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.graph.columns import Ops
from engine.model.shapes import FP32
from engine.modes.fsdp.replicas import REPLICATED
from engine.plan import Op, Plan

if TYPE_CHECKING:
    from engine.job import Job


def in_fp32(job: Job, plan: Plan) -> Plan:
    if not job.spec.reduce_fp32 or job.item >= FP32:
        return plan
    programs = []
    for program in plan.programs:
        columns = Ops.of(program.ops)
        templates = tuple(_widened(op, FP32 // job.item) for op in columns.templates)
        programs.append(replace(program, ops=replace(columns, templates=templates)))
    return replace(plan, programs=tuple(programs))


def _widened(op: Op, times: int) -> Op:
    return replace(op, bytes=op.bytes * times) if _is_reduced(op) else op


def _is_reduced(op: Op) -> bool:
    if op.payload != "gradient" or op.axis is None:
        return False
    if op.kind == "reduce_scatter":  # along cp: gradients of keys and values, which are no weights'
        return op.axis == "fsdp"
    return op.kind == "all_reduce" and set(op.axis.split("_")) <= {*REPLICATED}
