"""A step that ran -> every stretch in which a rank computed nothing, cut up by cause: who waited for what, and why.

A gap lies before an op that computes, or at the end. What bound that op is known (`Ran.bound`), and so from the end of
the gap one goes back: while a message or a collective was under way, it was *communication*; before that, its rank
waited for whoever gave it last. Why that one was late is said by where in the step it happened:

- along a pipeline, `fill`: the rank has had no backward pass yet; `drain`: it has no forward pass left, or nothing at
  all; `imbalance`: between the two;
- `straggler`: in another group a rank was there, and another member had yet to come;
- `loading`: whoever was waited for was loading its batch;
- `communication`: the transfer itself, or its queue, that no compute hides;
- `end`: this rank is done and others are not; `start`: it had not begun;
- `overhead`: nothing that the plan waits for: Python and the framework between two ops. Where ranks are more than the
  cores that they share, it is a wait for a core: `contention`.

All are arrays, cut in rounds: 400,000 ops take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.analysis.ran import Ran
from engine.graph.matching import NO_NODE

CAUSES = (
    "fill",
    "imbalance",
    "drain",
    "straggler",
    "communication",
    "loading",
    "contention",
    "overhead",
    "start",
    "end",
)
PIPELINE = "pp"  # the axis along which stages lie


class Idle(NamedTuple):
    """Pieces of gaps, seconds; columns of equal length. `until`: the compute op that ends the gap, or -1 at the end of
    the step. `about`: the send, or the collective on this rank, that was waited for, or -1. `other`: of a wait for
    somebody, the node of that one which was late; else -1."""

    role: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cause: np.ndarray  # place in CAUSES
    until: np.ndarray
    about: np.ndarray
    other: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        return self.end - self.start

    def where(self, picked: np.ndarray) -> Idle:
        return Idle(*(column[picked] for column in self))


def idle(ran: Ran, *, crowded: bool = False) -> Idle:
    """`crowded`: ranks are more than the cores that they share. Pieces are in order of role and time; those of a role
    add up to the makespan less the time in which it computes."""
    none = Idle(*(np.array([], dtype=np.int64) for _ in Idle._fields))
    if not len(ran.end):
        return none
    role, begin, end, until = _gaps(ran)
    node = np.where(until == NO_NODE, _last_nodes(ran)[role], ran.bound[until])
    parts = list(_rounds(ran, role, begin, end, until, node, crowded))
    if not parts:
        return none
    found = _loading(ran, Idle(*(np.concatenate(column) for column in zip(*parts, strict=True))))
    # What is left of rounding is no wait.
    found = found.where(found.seconds > 1e-12 * ran.makespan)
    return found.where(np.lexsort((found.start, found.role)))


def seconds_by_cause(ran: Ran, found: Idle) -> np.ndarray:
    """Seconds, roles × CAUSES: what one rank of each role idles."""
    shape = (len(ran.graph.plan.programs), len(CAUSES))
    total = np.bincount(found.role * shape[1] + found.cause, weights=found.seconds, minlength=shape[0] * shape[1])
    return total.reshape(shape)


def _gaps(ran: Ran) -> tuple[np.ndarray, ...]:
    """(role, begin, end, the compute op that ends it or -1) of every gap, of length 0 too."""
    compute = np.flatnonzero(ran.is_compute)
    role, roles = ran.role[compute], len(ran.graph.plan.programs)
    begin = np.zeros(len(compute))
    for mine in np.split(np.arange(len(compute)), np.flatnonzero(np.diff(role)) + 1):
        begin[mine[1:]] = np.maximum.accumulate(ran.end[compute[mine]])[:-1]  # the furthest end so far
    done = np.zeros(roles)
    np.maximum.at(done, role, ran.end[compute])
    none = np.full(roles, NO_NODE)
    return (
        np.concatenate([role, np.arange(roles)]),
        np.concatenate([begin, done]),
        np.concatenate([np.maximum(ran.start[compute], begin), np.full(roles, max(ran.makespan, 0.0))]),
        np.concatenate([compute, none]),
    )


def _last_nodes(ran: Ran) -> np.ndarray:
    """Of each role, the node that ended last; -1 where it has none."""
    bounds = zip(ran.graph.first[:-1], ran.graph.first[1:], strict=True)
    return np.array([first + int(ran.end[first:last].argmax()) if first < last else NO_NODE for first, last in bounds])


def _rounds(ran: Ran, role, begin, now, until, node, crowded: bool) -> Iterator[tuple[np.ndarray, ...]]:
    """Each gap from its end backwards, a node a round. `now`: how far back it has been explained."""
    cause = {name: i for i, name in enumerate(CAUSES)}
    phase = _phases(ran, until, role)
    at_end = until == NO_NODE
    along = ran.of_templates(lambda op: op.axis == PIPELINE)
    pipelined = _is_pipelined(ran)[role]
    left = np.where(
        at_end, np.where(pipelined, cause["drain"], cause["end"]), cause["contention" if crowded else "overhead"]
    )

    def pieces(low, high, why, about, other):
        keep = high > low
        why, about, other = (np.broadcast_to(each, low.shape) for each in (why, about, other))
        return tuple(c[keep] for c in (role, low, high, why, until, about, other))

    def keep_on(going):
        return (column[going] for column in (role, begin, now, until, node, phase, left))

    while True:
        role, begin, now, until, node, phase, left = keep_on(now > begin)
        if not len(role):
            return
        # Nothing had held it up before: it had not begun.
        nothing = node == NO_NODE
        ended = np.where(nothing, begin, np.minimum(now, ran.end[node]))
        low = np.maximum(ended, begin)
        yield pieces(low, now, np.where(nothing & (until != NO_NODE), cause["start"], left), NO_NODE, NO_NODE)
        now, left = low, np.full(len(left), cause["contention" if crowded else "overhead"])
        compute = ran.is_compute[node] | nothing  # one's own op before the gap: all is explained
        now = np.where(compute, begin, now)
        role, begin, now, until, node, phase, left = keep_on(now > begin)
        if not len(role):
            return
        receive, collective = ran.is_receive[node], ran.is_collective[node]
        send = np.where(receive, ran.graph.meets[node], NO_NODE)
        ahead, last = ran.ahead[node], ran.last_to_come[node]
        queued = np.where(collective & (ahead != NO_NODE), ran.end[ahead], 0.0)
        own = np.where(receive, ran.ready[node], ran.arrived[node])  # when this rank came to it
        mine = np.clip(np.maximum(own, queued), begin, now)
        given = np.where(receive, ran.arrived[send], np.where(collective, ran.arrived[last], own))
        given = np.clip(given, mine, now)  # when whoever was last gave what it has
        about, other = np.where(receive, send, node), np.where(receive, send, last)
        yield pieces(given, now, cause["communication"], about, NO_NODE)
        late = np.where(along[node], phase, cause["straggler"])
        yield pieces(mine, given, late, about, other)
        now, node = mine, np.where(queued > own, ahead, ran.before[node])


def _is_pipelined(ran: Ran) -> np.ndarray:
    """Of each role."""
    along = ran.of_templates(lambda op: op.axis == PIPELINE and op.peer is not None)
    return np.bincount(ran.role[along], minlength=len(ran.graph.plan.programs)) > 0


def _phases(ran: Ran, until: np.ndarray, role: np.ndarray) -> np.ndarray:
    """Of each gap, what a wait for a message in it is: fill, imbalance or drain."""
    backward = ran.of_templates(lambda op: op.kind in ("backward", "backward_input", "backward_weight"))
    forward = ran.of_templates(lambda op: op.kind == "forward")
    first = np.array(ran.graph.first)
    done, to_do = (np.concatenate([[0], np.cumsum(each)]) for each in (backward, forward))
    at = np.where(until == NO_NODE, first[role + 1], until)
    filling = (done[at] == done[first[role]]) & (until != NO_NODE)
    draining = to_do[at] == to_do[first[role + 1]]
    choice = [CAUSES.index(name) for name in ("fill", "drain", "imbalance")]
    return np.where(filling, choice[0], np.where(draining, choice[1], choice[2]))


def _loading(ran: Ran, found: Idle) -> Idle:
    """Waits for somebody who was loading a batch meanwhile are cut at the beginning and the end of that."""
    loads = np.flatnonzero(ran.of_templates(lambda op: op.kind == "load"))
    waits = found.other != NO_NODE
    for load in loads.tolist():
        low, high, who = ran.start[load], ran.end[load], ran.role[load]
        hit = waits & (ran.role[found.other] == who) & (found.start < high) & (found.end > low)
        if not hit.any():
            continue
        whole = found.where(hit)
        bounds = [np.clip(edge, whole.start, whole.end) for edge in (low, high)]
        loading = whole._replace(
            start=bounds[0], end=bounds[1], cause=np.full(len(whole.role), CAUSES.index("loading"))
        )
        parts = [found.where(~hit), loading, whole._replace(end=bounds[0]), whole._replace(start=bounds[1])]
        found = Idle(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        found = found.where(found.end > found.start)
        waits = (found.other != NO_NODE) & (found.cause != CAUSES.index("loading"))
    return found
