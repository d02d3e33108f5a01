"""When each rank came to each collective -> who came last, and how long the others waited for it.

A collective ends everywhere at about the same time, so whoever comes last spends the least time in it: durations point
at the victims, the order of arrival at the culprit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.analysis.ran import Ran

MOST, MUCH = 0.5, 0.05  # of all such waiting that is for a straggler; of the step, how long that is for each other rank


class Calls(NamedTuple):
    """Columns, one entry a member of a call: which call, whose rank, and seconds since any beginning."""

    call: np.ndarray
    rank: np.ndarray
    came: np.ndarray
    ended: np.ndarray


class Late(NamedTuple):
    """Columns, one entry a call: the rank that came last, how long the others waited for it, each on average and the
    first that came, and how far apart the ends are. Of a call to which all came at once, `last` is -1."""

    call: np.ndarray
    last: np.ndarray
    waited: np.ndarray
    longest: np.ndarray
    ends_apart: np.ndarray


class Straggler(NamedTuple):
    """A rank that kept others waiting: in how many of its calls it came last, and how many seconds after the others, on
    average of these and in all calls together. What overlaps with compute does not idle for that long."""

    rank: int
    last: int
    calls: int
    seconds: float


class Inside(NamedTuple):
    """Seconds that a rank spent in calls: until the last member had come, and from then on."""

    rank: int
    waiting: float
    transfer: float


def calls_of(ran: Ran) -> Calls:
    nodes = np.flatnonzero(ran.is_collective)
    rank = np.array(ran.graph.representative, dtype=np.int64)[ran.role[nodes]]
    return Calls(ran.graph.meets[nodes], rank, ran.arrived[nodes], ran.end[nodes])


def late(calls: Calls) -> Late:
    """ValueError for a member that leaves before it comes."""
    if (calls.ended < calls.came).any():
        raise ValueError("a rank leaves a collective no earlier than it came to it")
    call, place = np.unique(calls.call, return_inverse=True)
    count = np.bincount(place, minlength=len(call))
    first, came, soonest, latest = (np.full(len(call), value) for value in (np.inf, -np.inf, np.inf, -np.inf))
    np.minimum.at(first, place, calls.came)
    np.maximum.at(came, place, calls.came)
    np.minimum.at(soonest, place, calls.ended)
    np.maximum.at(latest, place, calls.ended)
    order = np.lexsort((-calls.rank, calls.came, place))
    last = np.full(len(call), -1)
    last[place[order]] = calls.rank[order]  # of several, the last one written stays
    waited = np.bincount(place, weights=came[place] - calls.came, minlength=len(call)) / np.maximum(count - 1, 1)
    return Late(call, np.where(came > first, last, -1), waited, came - first, latest - soonest)


def waiting_share(calls: Calls) -> np.ndarray:
    """Of each entry, the part of its time in the collective in which it waited for the last to come, from 0 to 1."""
    came = dict(zip(*(column.tolist() for column in _latest(calls)), strict=True))
    last = np.array([came[call] for call in calls.call.tolist()])
    inside = calls.ended - calls.came
    return np.divide(np.minimum(last, calls.ended) - calls.came, inside, out=np.zeros(len(inside)), where=inside > 0)


def inside(calls: Calls) -> list[Inside]:
    """Of each rank, its time in calls, a kernel's duration, parted into waiting and transfer."""
    spent = calls.ended - calls.came
    waiting = waiting_share(calls) * spent
    ranks, place = np.unique(calls.rank, return_inverse=True)
    columns = (np.bincount(place, weights=each).tolist() for each in (waiting, spent - waiting))
    return [Inside(*row) for row in zip(ranks.tolist(), *columns, strict=True)]


def _latest(calls: Calls) -> tuple[np.ndarray, np.ndarray]:
    call, place = np.unique(calls.call, return_inverse=True)
    came = np.full(len(call), -np.inf)
    np.maximum.at(came, place, calls.came)
    return call, came


def stragglers(calls: Calls) -> list[Straggler]:
    """Every rank that came last to a call, the one that made others wait longest first."""
    found = late(calls)
    of_rank = dict.fromkeys(np.unique(calls.rank).tolist(), 0)
    for rank in calls.rank.tolist():
        of_rank[rank] += 1
    blamed = [rank for rank in of_rank if (found.last == rank).any()]
    out = [
        Straggler(rank, int((mine := found.last == rank).sum()), of_rank[rank], float(found.waited[mine].sum()))
        for rank in blamed
    ]
    return sorted(out, key=lambda one: (-one.seconds, one.rank))


def named(found: list[Straggler], seconds: float) -> list[Straggler]:
    """Whom others waited for longer than for all other ranks together, and for a good part of `seconds`, in which all
    this happened: one rank or none. Where now this rank is a little late and now that, none is."""
    total = sum(one.seconds for one in found)
    return [one for one in found if one.seconds > MOST * total and one.seconds > MUCH * seconds]
