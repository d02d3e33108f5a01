"""A lesson's steps and the spans on the clock -> the moments of each step: when it goes on, and when best seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from engine.lessons import Step
from engine.plan import COMPUTE
from engine.timeline import Span

APART = 0.004  # of the clock


class Moment(NamedTuple):
    """Seconds. `best`: when most ranks take part for the first time, as a collective moves once its last has joined."""

    start: float
    end: float
    best: float


class Told(NamedTuple):
    """A step and its moments, in order. `first`: the span that it begins with; without one, it happened earlier."""

    step: Step
    moments: tuple[Moment, ...]
    first: Span | None


def told(steps: Sequence[Step], spans: Sequence[Span], shortest: float, end: float) -> tuple[Told, ...]:
    """`shortest`: seconds that a moment takes at least, so that it is seen; `end` of the clock."""
    by_rank: dict[tuple[int, int], list[Span]] = defaultdict(list)
    # What starts together with the pass that needs it, comes before it.
    for span in sorted(spans, key=lambda s: (s.start, s.kind in COMPUTE, s.end)):
        by_rank[span.rank, span.step].append(span)
    found = []
    for step in steps:
        chosen = [ops[i] for ops in by_rank.values() for i in step.indices(ops)]
        first = min(chosen, key=lambda s: s.start, default=None)
        found.append(Told(step, _moments(chosen, shortest, end), first))
    return tuple(found)


def _moments(spans: Sequence[Span], shortest: float, end: float) -> tuple[Moment, ...]:
    """What overlaps, or lies closer together than can be seen, is one moment."""
    edges: dict[float, int] = defaultdict(int)  # by how many more ranks, from then on, take part
    by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append((span.start, span.end))
    for pieces in by_rank.values():
        for start, stop in _joined(pieces, APART * end):
            stop = min(end, max(stop, start + shortest))
            edges[min(start, stop - shortest)] += 1
            edges[stop] -= 1
    moments, going, start, best, most = [], 0, 0.0, 0.0, 0
    for time in sorted(edges):
        if not going:
            start, most = time, 0
        going += edges[time]
        if going > most:
            best, most = time, going
        if not going:
            moments.append(Moment(start, time, best))
    return tuple(moments)


def _joined(pieces: list[tuple[float, float]], apart: float) -> list[tuple[float, float]]:
    """Stretches of time in order, those no further than `apart` from each other as one."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(pieces):
        if found and start - found[-1][1] <= apart:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found
