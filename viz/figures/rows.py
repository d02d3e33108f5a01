"""Timelines -> rows of bars: for every rank a lane that computes and below it, as thin as they can be, those that talk.

y counts pixels downwards from 0, times are seconds from the timeline's first start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.timeline import Span, Timeline

GAP = 14  # between two ranks
COMPUTE = 26  # height of a lane that computes, in the timeline in front
TALK = (0, 9, 7, 5)  # and of each lane that talks, where there are so many
BEHIND = 0.62  # heights of the other one, in a view that shows both
MAX_TALK = 3  # lanes of communication that a rank has; what overlaps more is drawn over
CROWDED = ((4, 1.0), (8, 0.85), (16, 0.6))  # up to so many ranks, how high everything is


class Bar(NamedTuple):
    """One span in its lane. `behind`: of the timeline that is drawn beneath, `row`: index of its rank's row; `count`:
    how many ops it stands for, where there are more than can be drawn."""

    span: Span
    row: int
    y0: float
    y1: float
    behind: bool
    count: int = 1

    @property
    def computes(self) -> bool:
        return self.span.lane == "compute"


class Row(NamedTuple):
    rank: int
    y0: float
    y1: float


class Rows(NamedTuple):
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]
    height: float


def from_start(timeline: Timeline | None, ranks: Iterable[int]) -> list[Span]:
    """The spans of some ranks, on a clock that starts with the timeline."""
    if timeline is None or not len(timeline):
        return []
    first, ranks = float(timeline["start"].min()), set(ranks)
    return [s._replace(start=s.start - first, end=s.end - first) for s in timeline.spans() if s.rank in ranks]


def rows(ranks: Sequence[int], front: Sequence[Span], behind: Sequence[Span] = ()) -> Rows:
    scale = next(scale for most, scale in CROWDED if len(ranks) <= most)
    lanes = [(front, False, scale)] + ([(behind, True, scale * BEHIND)] if behind else [])
    packed = [(spans, beneath, size, _packed(spans)) for spans, beneath, size in lanes]
    out, bars, y = [], [], 0.0
    for i, rank in enumerate(ranks):
        top = y = y + GAP * scale * 0.5
        for spans, beneath, size, place in packed:
            talk = max(place.values(), default=-1) + 1
            compute, thin = round(COMPUTE * size, 1), round(TALK[talk] * size, 1)
            for number, span in enumerate(spans):
                if span.rank != rank:
                    continue
                if span.lane == "compute":
                    bars.append(Bar(span, i, y, y + compute, beneath))
                else:
                    low = y + compute + 2 + place[number] * (thin + 1)
                    bars.append(Bar(span, i, low, low + thin, beneath))
            y = round(y + compute + (2 + talk * (thin + 1) if talk else 0) + 1, 1)
        out.append(Row(rank, top, y))
        y += GAP * scale * 0.5
    return Rows(tuple(out), tuple(sorted(bars, key=lambda bar: (bar.span.start, bar.row))), y)


def _packed(spans: Sequence[Span]) -> dict[int, int]:
    """For every span that communicates (by its place in `spans`) a lane, so that as few lanes as possible overlap."""
    place: dict[int, int] = {}
    by_rank: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        if span.lane != "compute":
            by_rank.setdefault(span.rank, []).append(number)
    for numbers in by_rank.values():
        busy: list[tuple[float, int]] = []  # (until when, lane)
        free, used = [], 0
        for number in sorted(numbers, key=lambda n: (spans[n].start, spans[n].end)):
            span = spans[number]
            while busy and busy[0][0] <= span.start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free and used == MAX_TALK:
                place[number] = MAX_TALK - 1
                continue
            if free:
                lane = heapq.heappop(free)
            else:
                lane, used = used, used + 1
            heapq.heappush(busy, (span.end, lane))
            place[number] = lane
    return place
