"""One step, simulated or measured -> its graph with the times of every node, and what bound each of them.

What a node waited for is read off the graph of `engine.graph.matching`: of all that it had to wait for, the one that
ended last bound it. Everything else in this package (critical path, causes of idle gaps, stragglers) goes along these
bonds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.graph.matching import NO_NODE, Graph, PlanError, match
from engine.plan import COLLECTIVES, Op, Plan
from engine.simulation import Simulation
from engine.timeline import Timeline


class NotJoined(ValueError):
    """A measured step has other ops than its plan, so what waited for what is not known."""


@dataclass(frozen=True)
class Ran:
    """A step that begins at 0. Arrays have one entry a node of `graph`, and times are seconds.

    In a simulated step the members of a collective share its start and end, and a receive has those of its send. In a
    measured one a collective starts on each rank when that rank comes to it, and ends there when it is through.
    """

    graph: Graph
    start: np.ndarray
    end: np.ndarray
    makespan: float
    measured: bool = False

    @cached_property
    def role(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.graph.first) - 1), np.diff(self.graph.first))

    @cached_property
    def ranks(self) -> np.ndarray:
        """How many ranks play each role."""
        return np.array(self.graph.num_ranks, dtype=np.int64)

    def of_templates(self, is_so) -> np.ndarray:
        """Whether each node's op is so."""
        return np.array([is_so(op) for op in self.graph.templates], dtype=bool)[self.graph.which]

    @cached_property
    def is_compute(self) -> np.ndarray:
        return self.of_templates(lambda op: op.is_compute)

    @cached_property
    def is_collective(self) -> np.ndarray:
        return self.of_templates(lambda op: op.kind in COLLECTIVES)

    @cached_property
    def is_receive(self) -> np.ndarray:
        return self.of_templates(lambda op: op.kind == "recv")

    @cached_property
    def _held_up(self) -> tuple[np.ndarray, np.ndarray]:
        """(ready, bound): when each rank came to its node, and the earlier node of its program that held it up last."""
        ready, bound = np.zeros(len(self.end)), np.full(len(self.end), NO_NODE)
        holds = self.of_templates(lambda op: op.is_compute or not op.asynchronous)
        until = np.where(holds, self.end, -np.inf)
        for first, last in zip(self.graph.first[:-1], self.graph.first[1:], strict=True):
            latest = np.maximum.accumulate(until[first:last])
            before = np.concatenate([[-np.inf], latest[:-1]])[: last - first]
            who = np.where(until[first:last] > before, np.arange(first, last), NO_NODE)
            ready[first:last] = np.maximum(before, 0.0)
            bound[first + 1 : last] = np.maximum.accumulate(who)[:-1]
        return ready, bound

    @property
    def ready(self) -> np.ndarray:
        """When its rank came to a node: all that holds up the program before it had ended."""
        return self._held_up[0]

    @property
    def before(self) -> np.ndarray:
        """The node of the same program whose end made its rank come to this one; -1: none."""
        return self._held_up[1]

    @cached_property
    def bound(self) -> np.ndarray:
        """Like `before`, and for a compute op also the asynchronous ones that it waits for: which of all ended last."""
        bound = self.before.copy()
        for node, needs in self.graph.waits.items():
            last = max(needs, key=self.end.__getitem__)
            if bound[node] == NO_NODE or self.end[last] > self.end[bound[node]]:
                bound[node] = last
        return bound

    @cached_property
    def arrived(self) -> np.ndarray:
        """When a rank gave a communication out of its hands."""
        return self.start if self.measured else self.ready

    @cached_property
    def ahead(self) -> np.ndarray:
        """The node before this one in its lane (a mesh axis, or a direction of a link); -1: none."""
        lanes = self.graph.lanes
        numbers = {lane: i for i, lane in enumerate(dict.fromkeys(lanes))}
        short = np.int16 if len(numbers) < 2**15 else np.int64  # short numbers are sorted digit by digit
        lane = np.array([numbers[each] for each in lanes], dtype=short)[self.graph.which]
        order = np.argsort(lane, kind="stable")
        ahead = np.full(len(lane), NO_NODE)
        same = lane[order][1:] == lane[order][:-1]
        ahead[order[1:][same]] = order[:-1][same]
        return ahead

    @cached_property
    def last_to_come(self) -> np.ndarray:
        """Of a collective, the member's node that came last; else -1. Of several that came at once, the lowest."""
        last = np.full(len(self.end), NO_NODE)
        nodes = np.flatnonzero(self.is_collective)
        calls = self.graph.meets[nodes]
        order = np.lexsort((-nodes, self.arrived[nodes], calls))  # the last of each call is the last to come
        ends = np.append(np.flatnonzero(np.diff(calls[order])), len(order) - 1) if len(order) else order
        of_call = dict(zip(calls[order][ends].tolist(), nodes[order][ends].tolist(), strict=True))
        last[nodes] = [of_call[call] for call in calls.tolist()]
        return last

    def op(self, node: int) -> Op:
        return self.graph.op(node)

    def kind(self, node: int) -> str:
        return self.graph.templates[self.graph.which[node]].kind

    def rank(self, node: int) -> int:
        """The lowest rank that does it."""
        return self.graph.representative[int(self.role[node])]


def simulated(simulation: Simulation) -> Ran:
    return Ran(simulation.graph, simulation.start, simulation.end, simulation.makespan)


def measured(step: Timeline, plan: Plan) -> Ran:
    """`step` is one step alone, from 0 on (`Timeline.step`), of a run that went as `plan`. NotJoined: it did not."""
    ranks = range(plan.world_size)
    # Every rank for itself: real ones do the same at different times.
    spread = Plan(plan.mesh, tuple(plan.program(rank) for rank in ranks), tuple(ranks), plan.layers)
    try:
        graph = match(spread)
    except PlanError as error:
        raise NotJoined(str(error)) from None
    start, end = np.zeros((2, graph.first[-1]))
    seen = _by_lane(step["rank"].tolist(), step["lane"].tolist())
    planned = _by_lane(*zip(*(graph.lanes[which] for which in graph.which.tolist()), strict=True))
    if {lane: len(nodes) for lane, nodes in planned.items()} != {lane: len(rows) for lane, rows in seen.items()}:
        raise NotJoined("the step has other ops than its plan")
    for lane, nodes in planned.items():
        start[nodes], end[nodes] = step["start"][seen[lane]], step["end"][seen[lane]]
    kinds = np.array([op.kind for op in graph.templates], dtype=object)[graph.which]
    joined = np.concatenate([np.array(nodes) for nodes in planned.values()])
    if (kinds[joined] != step["kind"][np.concatenate([seen[lane] for lane in planned])]).any():
        raise NotJoined("the step has its ops in another order than its plan")
    return Ran(graph, start, end, step.makespan, measured=True)


def _by_lane(ranks, lanes) -> dict[tuple[int, str], list[int]]:
    """(rank, lane) -> the places of its entries, in their order."""
    places: dict[tuple[int, str], list[int]] = {}
    for i, key in enumerate(zip(ranks, lanes, strict=True)):
        places.setdefault(key, []).append(i)
    return places
