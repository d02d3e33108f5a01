"""A program's compute ops and a machine -> seconds for each: the slower of arithmetic and memory, plus a fixed cost."""

from __future__ import annotations

from collections import defaultdict

from engine.cost.machine import Machine
from engine.plan import Op

# On a machine that counts units: seconds of a forward, and the part of a backward that each of these takes.
FORWARD_UNITS = {"forward": 1.0, "recompute": 1.0}
BACKWARD_UNITS = {"backward": 1.0, "backward_input": 0.5, "backward_weight": 0.5}


def compute_seconds(ops: tuple[Op, ...], machine: Machine, ranks: int) -> list[float]:
    """Seconds of each op of one program on a device of its own, or on its threads' cores; communication ops get 0."""
    if machine.unit:
        return _unit_seconds(ops, machine.unit_backward)
    flop_rate = machine.flop_rate * machine.threads(ranks)
    return [
        machine.op_overhead + max(op.flops / flop_rate, op.bytes / machine.memory_rate) if op.is_compute else 0.0
        for op in ops
    ]


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
