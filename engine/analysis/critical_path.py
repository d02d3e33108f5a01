"""A step that ran -> its critical path: the chain of ops, across ranks, that made it last as long as it did.

From the op that ended last back to the beginning: each time on to what it had waited for longest (Kelley & Walker 1959;
across processes Yang & Miller 1988, "Critical path analysis for the execution of parallel and distributed programs").
In a simulated step every moment of the path is an op's. In a measured one there can be time that no op of the plan
explains; it has the kind `overhead`, or `start` before the first op.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from engine.analysis.ran import Ran
from engine.graph.matching import NO_NODE

UNEXPLAINED = ("overhead", "start")


class Piece(NamedTuple):
    """A stretch of the path, in seconds. `node`: the op that took it, or that began after it where none took it.
    `waited_for`: the node whose end it had to wait for; -1: the beginning of the step. A message is its send."""

    node: int
    kind: str
    start: float
    end: float
    waited_for: int

    @property
    def duration(self) -> float:
        return self.end - self.start


def critical_path(ran: Ran) -> list[Piece]:
    """In order of time, without a hole from 0 to the makespan. A step without ops has none."""
    if not len(ran.end):
        return []
    path: list[Piece] = []
    node, until = int(ran.end.argmax()), ran.makespan
    while until > 0:
        taken, begun, cause = _back(ran, node)
        ended = float(ran.end[node])
        if ended < until:  # only at the very end: nothing of the plan was under way
            path.append(Piece(taken, "overhead", ended, until, node))
            until = ended
        begun = min(begun, until)
        if begun < until or not path:
            path.append(Piece(taken, ran.kind(taken), begun, until, cause))
        before = max(0.0, min(float(ran.end[cause]), begun)) if cause != NO_NODE else 0.0
        if before < begun:
            path.append(Piece(taken, UNEXPLAINED[cause == NO_NODE], before, begun, cause))
        if cause == NO_NODE:
            break
        node, until = cause, before
    return path[::-1]


def _back(ran: Ran, node: int) -> tuple[int, float, int]:
    """(the op that took the time, since when it did, what it had waited for)"""
    if ran.is_compute[node]:
        return node, float(ran.start[node]), int(ran.bound[node])
    if ran.is_collective[node]:
        last, ahead = int(ran.last_to_come[node]), int(ran.ahead[node])
        came = float(ran.arrived[last])
        if ahead != NO_NODE and not ran.measured and ran.end[ahead] > came:  # its lane was not free
            return node, float(ran.end[ahead]), ahead
        return node, came, int(ran.before[last])
    send = int(ran.graph.meets[node]) if ran.is_receive[node] else node
    if ran.measured and ran.is_receive[node] and ran.ready[node] > ran.start[send]:
        return send, float(ran.ready[node]), int(ran.before[node])  # it had been sent before anybody asked for it
    sooner = [each for each in (int(ran.before[send]), int(ran.ahead[send])) if each != NO_NODE]
    return send, float(ran.start[send]), max(sooner, key=ran.end.__getitem__, default=NO_NODE)


def seconds_by_kind(path: list[Piece]) -> dict[str, float]:
    """Largest first; a message counts as a send."""
    total: dict[str, float] = defaultdict(float)
    for piece in path:
        total[piece.kind] += piece.duration
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def seconds_by_rank(ran: Ran, path: list[Piece]) -> dict[int, float]:
    """Of the lowest rank of each role; what a message or a collective takes is no rank's own, and is left out."""
    total: dict[int, float] = defaultdict(float)
    for piece in path:
        if ran.is_compute[piece.node]:
            total[ran.rank(piece.node)] += piece.duration
    return dict(sorted(total.items()))
