"""A program's compute ops and a machine -> seconds for each: the slower of arithmetic and memory, plus a fixed cost."""

from __future__ import annotations

from collections import defaultdict

from engine.cost.machine import Machine
from engine.plan import Op

# A stage's forward takes 1 s, its backward 2 s: one half each for the gradients of input and weights.
UNIT_SECONDS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0, "recompute": 1.0}


def compute_seconds(ops: tuple[Op, ...], machine: Machine, ranks: int) -> list[float]:
    """Seconds of each op of one program on a device of its own, or on its threads' cores; communication ops get 0."""
    if machine.unit:
        return _unit_seconds(ops)
    flop_rate = machine.flop_rate * machine.threads(ranks)
    return [
        machine.op_overhead + max(op.flops / flop_rate, op.bytes / machine.memory_rate) if op.is_compute else 0.0
        for op in ops
    ]


def _unit_seconds(ops: tuple[Op, ...]) -> list[float]:
    """A pass through a stage takes 1 or 2 s however many ops it is cut into: each op takes its share of the FLOPs."""
    passes: dict[tuple, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if op.kind in UNIT_SECONDS:
            passes[op.kind, op.stage, op.microbatch].append(i)
    seconds = [0.0] * len(ops)
    for (kind, _, _), members in passes.items():
        total = sum(ops[i].flops for i in members)
        for i in members:
            # What is recomputed without any product is nothing beside a pass.
            share = ops[i].flops / total if total else 0.0 if kind == "recompute" else 1 / len(members)
            seconds[i] = UNIT_SECONDS[kind] * share
    return seconds
