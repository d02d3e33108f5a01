"""A graph, its seconds and a factor -> what a rank does, in order: how long each op takes, and whom it waits for.

The graph has a node an op of a role (`engine.graph.matching`); here an op is a rank's: every rank keeps time for
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.graph.matching import Graph
from engine.plan import COLLECTIVES, Op

COMPUTE, SEND, RECEIVE, CALL = range(4)


class Beat(NamedTuple):
    """One op of one rank. An end somewhere else is (rank, place of the op in that rank's program)."""

    act: int
    key: tuple  # what it is, for who begins it
    lane: str
    length: int  # ns; of a receive, those of its send
    holds_up: bool  # whether what follows waits for it: not where it is asynchronous
    ends: tuple[tuple[int, int], ...]  # of a receive, its send; of a collective, every member's call
    waits: tuple[int, ...]  # places of asynchronous ops that must have ended before it begins


def key_of(
    kind: str, stage: int | None, microbatch: int | None, part: str, payload: str, axis: str, peer: int | None
) -> tuple:
    """A compute op is known by its first four; which tokens a load is of says nothing more."""
    return (kind, stage, microbatch, "" if kind == "load" else part, payload if axis else "", axis, peer)


def of_rank(graph: Graph, seconds: np.ndarray, factor: float, rank: int) -> list[Beat]:
    """The program of a rank. `seconds`: of every node of the graph."""
    role = graph.plan.roles[rank]
    first, places = graph.first[role], _Places(graph)
    lengths = (seconds * factor * 1e9).round().astype(np.int64).tolist()
    beats = []
    for node, op in enumerate(graph.plan.program(rank).ops, start=first):
        met, ends, act = int(graph.meets[node]), (), COMPUTE
        if op.kind == "send":
            act = SEND
        elif op.kind == "recv":
            act, ends = RECEIVE, ((graph.plan.peer_rank(rank, op), met - graph.first[graph.role(met)]),)
        elif op.kind in COLLECTIVES:
            act, ends = CALL, tuple((one, places(met, one)) for one in graph.plan.mesh.group(rank, op.axis))
        beats.append(
            Beat(
                act,
                _key(op),
                graph.plan.lane(rank, op),
                lengths[met if act == RECEIVE else node],
                not op.asynchronous,
                ends,
                tuple(need - first for need in graph.waits.get(node, ())),
            )
        )
    return beats


def _key(op: Op) -> tuple:
    return key_of(op.kind, op.stage, op.microbatch, op.part, op.payload, op.axis, op.peer)


class _Places:
    """Where a call is in the program of each of its members."""

    def __init__(self, graph: Graph):
        self.graph, self.known = graph, {}
        called = np.array([op.kind in COLLECTIVES for op in graph.templates], dtype=bool)[graph.which]
        for node in np.flatnonzero(called).tolist():
            role = graph.role(node)
            self.known[int(graph.meets[node]), role] = node - graph.first[role]

    def __call__(self, call: int, rank: int) -> int:
        return self.known[call, self.graph.plan.roles[rank]]


def longest(programs: Sequence[Sequence[Beat]]) -> int:
    return max(map(len, programs), default=0)
