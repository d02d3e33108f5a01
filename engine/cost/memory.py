"""What a role holds, and its most activations -> bytes by category; planned and measured ones -> their differences.

Each category is taken at its most in a step. They need not be at it together (gradients grow while activations go), so
their sum bounds what is held at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
METHOD = "torch.distributed._tools.mem_tracker.MemTracker, the least of a few more steps"
# What a plan calls by another name is a buffer: DDP's buckets, gathered layers, what messages are received into.
KEPT = ("inputs", "outputs")  # activations that stay until the step ends


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
