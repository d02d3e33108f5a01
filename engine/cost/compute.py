"""A program's compute ops and a machine -> seconds for each: its kernels on a GPU; elsewhere the slower of arithmetic
and memory, plus a fixed cost."""

from __future__ import annotations

from collections import defaultdict

from engine.cost.machine import Machine
from engine.cost.matmul import kernels_seconds
from engine.plan import Op

# On a machine that counts units: seconds of a forward, and the part of a backward that each of these takes.
FORWARD_UNITS = {"forward": 1.0, "recompute": 1.0}
BACKWARD_UNITS = {"backward": 1.0, "backward_input": 0.5, "backward_weight": 0.5}


def compute_seconds(ops: tuple[Op, ...], machine: Machine, ranks: int) -> list[float]:
    """Seconds of each op of one program on a device of its own, or on its threads' cores; communication ops get 0."""
    if machine.unit:
        return _unit_seconds(ops, machine.unit_backward)
    known: dict[int, float] = {}  # of the kernels that many ops share, by which they are
    return [_seconds(op, machine, ranks, known) if op.is_compute else 0.0 for op in ops]


def _seconds(op: Op, machine: Machine, ranks: int, known: dict[int, float]) -> float:
    if op.kind == "load":  # while the step before is computed, the next batch is read; what is left is its copy
        return machine.op_overhead + op.bytes / min(machine.memory_rate, machine.load_rate)
    if op.kernels and machine.sms:
        at = id(op.kernels)
        if at not in known:
            known[at] = kernels_seconds(op.kernels, machine)
        return known[at]
    flop_rate = machine.flop_rate * machine.threads(ranks)
    moved = op.bytes * (machine.stepwise_optimizer if op.kind == "optimizer" and not op.part else 1.0)
    return machine.op_overhead + max(op.flops / flop_rate, moved / machine.memory_rate)


def _unit_seconds(ops: tuple[Op, ...], backward: float) -> list[float]:
    """A pass through a stage takes the same time however many ops it is cut into: each takes its share of the FLOPs."""
    units = FORWARD_UNITS | {kind: part * backward for kind, part in BACKWARD_UNITS.items()}
    passes: dict[tuple, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if op.kind in units:
            passes[op.kind, op.stage, op.microbatch].append(i)
    seconds = [0.0] * len(ops)
    for (kind, _, _), members in passes.items():
        total = sum(ops[i].flops for i in members)
        for i in members:
            # What is recomputed without any product is nothing beside a pass.
            share = ops[i].flops / total if total else 0.0 if kind == "recompute" else 1 / len(members)
            seconds[i] = units[kind] * share
    return seconds
