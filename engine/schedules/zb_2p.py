"""ZB-2p (Qi et al. 2023, arXiv:2401.10241, section 3): an order searched for, with twice the memory of 1F1B.

Ops are laid out in time, each rank doing next what can start first; of what starts at once the input's half of a
backward before a forward. A rank begins with 2(P-1-rank)+1 forwards, since one more would hold up its first
backward, on which all ranks above wait. Weights' halves fill every gap, and make room when activations of 2P
microbatches are held. With the paper's own times of an op (table 7 there) the idle time is what its table 4 prints:
the search is as good. PyTorch has no such schedule.

The order must not depend on a machine, so the times here are nominal: a weights' half takes two thirds of the other
ops, since what has no weights (attention's core, norms, activations) has no part in it; it holds two fifths of what its
forward kept, since the rest is let go after the input's half.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass, field

from engine.schedules import Action

SECONDS = {"forward": 3.0, "backward_input": 3.0, "backward_weight": 2.0}
MESSAGE = 0.06
HELD = 0.4  # after the input's half, of what a forward keeps
FORWARD, INPUT, WEIGHT = SECONDS
FIRST = {INPUT: 0, FORWARD: 1, WEIGHT: 2}


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    rows = search(num_ranks, num_microbatches, tuple(SECONDS.values()), MESSAGE)
    return [[Action(kind, rank, microbatch) for kind, microbatch, _ in row] for rank, row in enumerate(rows)]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    return None


@dataclass(slots=True)
class _Rank:
    """How far a rank is: when it is free, and when each op of a kind ends."""

    warm_up: int
    free: float = 0.0
    ends: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in SECONDS})
    row: list[tuple[str, int, float]] = field(default_factory=list)

    def done(self, kind: str) -> int:
        return len(self.ends[kind])

    @property
    def held(self) -> float:
        forwards, inputs, weights = (self.done(kind) for kind in SECONDS)
        return forwards - inputs + HELD * (inputs - weights)


@functools.lru_cache(maxsize=64)
def search(
    num_ranks: int, num_microbatches: int, seconds: tuple[float, float, float], message: float
) -> tuple[tuple[tuple[str, int, float], ...], ...]:
    """(kind, microbatch, start) of each op of each rank, where a forward and a backward's halves take so long."""
    takes = dict(zip(SECONDS, seconds, strict=True))
    ranks = [_Rank(2 * (num_ranks - 1 - rank) + 1) for rank in range(num_ranks)]
    current: list[tuple[float, int, int, str] | None] = [None] * num_ranks
    queue: list[tuple[float, int, int, str]] = []

    def ask(rank: int) -> None:
        """What a rank does next, as far as it can know yet."""
        current[rank] = _next(ranks, rank, num_microbatches, message)
        if current[rank] is not None:
            heapq.heappush(queue, current[rank])

    for rank in range(num_ranks):
        ask(rank)
    while queue:
        entry = heapq.heappop(queue)
        start, _, rank, kind = entry
        if entry != current[rank]:
            continue  # what it does next has changed since
        here = ranks[rank]
        here.row.append((kind, here.done(kind), start))
        here.free = start + takes[kind]
        here.ends[kind].append(here.free)
        for other in {rank - 1, rank, rank + 1} & set(range(num_ranks)):
            ask(other)
    return tuple(tuple(rank.row) for rank in ranks)


def _next(ranks: list[_Rank], rank: int, num_microbatches: int, message: float) -> tuple[float, int, int, str] | None:
    """(start, what goes before what, rank, kind) of what a rank can do first; None where it is done, or has to wait for
    what nobody has begun yet."""
    here, last = ranks[rank], len(ranks) - 1
    can = []
    if here.done(INPUT) < here.done(FORWARD):
        below = here.ends[FORWARD] if rank == last else ranks[rank + 1].ends[INPUT]
        if here.done(INPUT) < len(below):
            can.append((below[here.done(INPUT)] + (message if rank < last else 0.0), INPUT))
    room = here.held + 1 <= 2 * len(ranks) and (here.done(INPUT) > 0 or here.done(FORWARD) < here.warm_up)
    if room and here.done(FORWARD) < num_microbatches:
        above = ranks[rank - 1].ends[FORWARD] if rank else None
        if above is None:
            can.append((0.0, FORWARD))
        elif here.done(FORWARD) < len(above):
            can.append((above[here.done(FORWARD)] + message, FORWARD))
    starts = [(max(here.free, ready), FIRST[kind], rank, kind) for ready, kind in can]
    if here.done(WEIGHT) < here.done(INPUT) and not any(start <= here.free for start, *_ in starts):
        starts.append((here.free, FIRST[WEIGHT], rank, WEIGHT))
    return min(starts, default=None)
