"""What a role holds, and its most activations -> bytes by category; planned and measured ones -> their differences.

Each category is taken at its most in a step. They need not be at it together (gradients grow while activations go), so
their sum bounds what is held at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cost.hardware import Machine

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
METHOD = "torch.distributed._tools.mem_tracker.MemTracker, the least of a few more steps"
# What a plan calls by another name is a buffer: DDP's buckets, gathered layers, what messages are received into.
KEPT = ("inputs", "outputs")  # activations that stay until the step ends

# Bytes of a GPU that PyTorch's allocator cannot have. A CUDA context with its kernels: of 168.34 GiB that a process
# held on a B200 167.64 were PyTorch's (Bekman, Machine Learning Engineering, debug/pytorch). For each NCCL communicator
# its channels' buffers: 688 MiB among three or more A100s of a node, 544 between two (NVIDIA/nccl, issue 964); and for
# one in which each rank sends to each, 3.28 GB more on 8 H100s (issue 1685).
CONTEXT, COMMUNICATOR, BETWEEN_TWO, EXCHANGE = 717 << 20, 688 << 20, 544 << 20, 3_280_000_000


def room(machine: Machine, degrees: Mapping[str, int], exchanges: int = 0) -> int | None:
    """Bytes of a device that PyTorch can have, beside a communicator for each axis on which there are several ranks,
    and where there are several such axes one for all of them together (norms of gradients). `exchanges`: on so many of
    them each rank sends to each."""
    if machine.memory_size is None or not machine.sms:
        return machine.memory_size
    several = [degree for degree in degrees.values() if degree > 1]
    held = CONTEXT + sum(BETWEEN_TWO if degree == 2 else COMMUNICATOR for degree in several)
    held += COMMUNICATOR * (len(several) > 1) + EXCHANGE * exchanges
    return machine.memory_size - held


def by_category(standing: Mapping[str, int], activations: int) -> dict[str, int]:
    """`standing`: a program's `memory`. `activations`: the most that its ops keep at once."""
    held = dict.fromkeys(CATEGORIES, 0) | {"activations": activations}
    for name, size in standing.items():
        held["activations" if name in KEPT else name if name in held else "buffers"] += size
    return held


def errors(planned: Sequence[Mapping[str, int]], measured: Sequence[Mapping[str, int]]) -> dict[str, float | None]:
    """Of each category planned / measured - 1, on the rank where that is furthest from 0; None where it is infinite."""
    worst: dict[str, float | None] = {}
    for category in CATEGORIES:
        pairs = [(p[category], m[category]) for p, m in zip(planned, measured, strict=True)]
        infinite = any(plan and not real for plan, real in pairs)
        known = [plan / real - 1 for plan, real in pairs if real]
        worst[category] = None if infinite else max(known, key=abs, default=0.0)
    return worst
