"""A Timeline, simulated or measured -> where its time went: bubble, exposed communication, overlap.

All are computed step by step: a step lasts from the first start to the last end of any rank in it. Of several steps
the value is the median, which one slow step does not move. A timeline without spans, or whose steps take no time, has
no idle time and nothing exposed: 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.plan import COMPUTE
from engine.timeline import Timeline

BUBBLE_FORMULA = "bubble fraction = idle compute time / (ranks × makespan)"
BUBBLE_OVER_IDEAL_FORMULA = "bubble over ideal = idle compute time / busy compute time"
OVERLAP_FORMULA = "overlap = time in which a rank communicates and computes / time in which it communicates"
EXPOSED_FORMULA = "exposed communication = time in which a rank communicates and does not compute / (ranks × makespan)"


class Shares(NamedTuple):
    """What one step's time went to, in seconds; arrays have one entry a rank.

    `weights`: how many ranks each rank stands for; the seconds of one that another stands for are 0 and do not count.
    """

    step: int
    makespan: float
    computing: np.ndarray
    exposed: np.ndarray  # communicating, and not computing
    communicating: np.ndarray
    weights: np.ndarray

    @property
    def device_seconds(self) -> float:
        """ranks × makespan"""
        return float(self.weights.sum() * self.makespan)

    @property
    def busy(self) -> float:
        """Seconds of compute, of all ranks together."""
        return float(self.weights @ self.computing)

    @property
    def idle(self) -> float:
        return max(0.0, self.device_seconds - self.busy)


def bubble_fraction(timeline: Timeline | Sequence[Shares], *, since: int = 0) -> float:
    """Idle compute time / (ranks × makespan), from 0 to 1; the median of the steps from `since` on."""
    return _median([s.idle / s.device_seconds for s in _shares(timeline, since) if s.makespan])


def bubble_over_ideal(timeline: Timeline | Sequence[Shares], *, since: int = 0) -> float:
    """Idle / busy compute time, the other definition in use (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Busy time stands for the ideal, in which no rank ever waits. Steps without compute have none, and are left out.
    """
    steps = _shares(timeline, since)
    return _median([s.idle / s.busy for s in steps if s.busy])


def exposed_communication_fraction(timeline: Timeline | Sequence[Shares], *, since: int = 0) -> float:
    """Time in which a rank communicates and does not compute / (ranks × makespan); the median of the steps."""
    steps = _shares(timeline, since)
    return _median([float(s.weights @ (s.exposed / s.makespan) / s.weights.sum()) for s in steps if s.makespan])


def overlap_fraction(timeline: Timeline | Sequence[Shares], *, since: int = 0) -> float | None:
    """The part of the communication that is hidden under compute, from 0 to 1, over all ranks; the median of the steps.
    In a measured step a rank communicates also while it waits for others in a collective. None: nobody communicates."""
    steps = [s for s in _shares(timeline, since) if s.communicating.any()]
    hidden = [1 - float(s.weights @ s.exposed) / float(s.weights @ s.communicating) for s in steps]
    return _median(hidden) if hidden else None


def shares(timeline: Timeline, *, since: int = 0) -> list[Shares]:
    """The steps from `since` on, in order. Spans of a rank that overlap count once."""
    timeline = _checked(timeline, since)
    steps, step, first, last = _steps(timeline)
    row = step * timeline.world_size + timeline["rank"]
    compute = _is_compute(timeline)
    computing, busy, communicating = np.zeros((3, len(steps), timeline.world_size))
    for i, start, furthest in _rows(timeline, row, compute):
        computing.flat[i] = _covered(start, furthest)
    for i, start, furthest in _rows(timeline, row, slice(None)):
        busy.flat[i] = _covered(start, furthest)
    for i, start, furthest in _rows(timeline, row, ~compute):
        communicating.flat[i] = _covered(start, furthest)
    # All that is not compute is communication: what it adds to the time that compute covers is not hidden. A difference
    # of sums of many spans may be off by their rounding, below nothing or above all of it.
    exposed = np.clip(busy - computing, 0.0, communicating)
    makespans, weights = (last - first).tolist(), timeline.weights
    return [Shares(s, makespans[i], computing[i], exposed[i], communicating[i], weights) for i, s in enumerate(steps)]


def added(timeline: Timeline, picks: Sequence[np.ndarray]) -> np.ndarray:
    """Of a timeline of one step: seconds that the spans picked by each mask cover beyond those picked by the masks
    before it, a row a mask and a column a rank."""
    covered = np.zeros((1 + len(picks), timeline.world_size))
    picked = np.zeros(len(timeline), dtype=bool)
    for row, pick in zip(covered[1:], picks, strict=True):
        picked |= pick
        for rank, start, furthest in _rows(timeline, timeline["rank"], picked):
            row[rank] = _covered(start, furthest)
    return np.diff(covered, axis=0)


def _shares(given: Timeline | Sequence[Shares], since: int) -> Sequence[Shares]:
    """Of a timeline, or those that somebody has already."""
    return shares(given, since=since) if isinstance(given, Timeline) else given


def _rows(
    timeline: Timeline, row: np.ndarray, picked: np.ndarray | slice
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each row: its number, the starts of its picked spans in rising order, and the furthest end at each so far."""
    row, starts, ends = row[picked], timeline["start"][picked], timeline["end"][picked]
    if (np.diff(row) < 0).any():
        order = np.argsort(row, kind="stable")
        row, starts, ends = row[order], starts[order], ends[order]
    bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    for a, b in pairwise(bounds):
        if a < b:
            by_start = np.argsort(starts[a:b], kind="stable")
            yield int(row[a]), starts[a:b][by_start], np.maximum.accumulate(ends[a:b][by_start])


def _covered(start: np.ndarray, furthest: np.ndarray) -> float:
    """Length of the union of spans: of each what lies beyond those before; of one without length exactly nothing,
    and of all together no more than from the first start to the last end."""
    beyond = furthest - np.maximum(start, np.concatenate([start[:1], furthest[:-1]]))
    return float(min(beyond.sum(), furthest[-1] - start[0]))


def _checked(timeline: Timeline, since: int) -> Timeline:
    """The steps from `since` on, in turn. ValueError for a span that ends before it starts, or at no time."""
    timeline = timeline.in_turn()
    if (timeline["step"] < since).any():
        timeline = timeline.where(timeline["step"] >= since)
    good = np.isfinite(timeline["start"]) & np.isfinite(timeline["end"]) & (timeline["end"] >= timeline["start"])
    if not good.all():
        raise ValueError(f"a span starts at a finite time and ends no earlier: {next(timeline.where(~good).spans())}")
    return timeline


def _steps(timeline: Timeline) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """(the steps, which of them each span is in, when each of them starts, when it ends)"""
    start, end, step = timeline["start"], timeline["end"], timeline["step"]
    if len(step) and (step == step[0]).all():
        return [int(step[0])], np.zeros(len(step), dtype=np.int64), start.min(keepdims=True), end.max(keepdims=True)
    steps, step = np.unique(step, return_inverse=True)
    first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(first, step, start)
    np.maximum.at(last, step, end)
    return steps.tolist(), step, first, last


def _is_compute(timeline: Timeline) -> np.ndarray:
    return np.fromiter(map(frozenset(COMPUTE).__contains__, timeline["kind"]), dtype=bool, count=len(timeline))


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
