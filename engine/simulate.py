"""A Plan and a Machine -> the Timeline that they predict, by list scheduling; a deadlock is found and shown.

Every lane runs its ops in program order, so the schedule is the longest path through the graph of `engine.matching`:
an op starts when all it waits for have ended. A collective starts when its last member is ready. A message leaves
when its send is ready (sends are buffered) and is received when it has arrived and its receive has been reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cost.collectives import collective_seconds, message_seconds, rounds_and_bytes
from engine.cost.compute import compute_seconds
from engine.cost.machine import Machine
from engine.matching import Graph, PlanError, describe, match, uniform
from engine.plan import COLLECTIVES, Plan
from engine.timeline import NONE, Span, Timeline


class DeadlockError(PlanError):
    """Ops that wait for each other in a circle. The message shows each rank's program with an arrow where it stands."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One predicted step. Lists have one entry a role of `plan`; `timeline` repeats each role on all its ranks."""

    plan: Plan
    timeline: Timeline
    makespan: float
    bytes_sent: list[float]
    peak_memory: list[int]
    peak_in_flight: list[int]

    def per_rank(self, values: list) -> list:
        return [values[role] for role in self.plan.roles]


def simulate(plan: Plan, machine: Machine) -> Simulation:
    plan = uniform(plan)
    graph = match(plan)
    start, end = schedule(graph, durations(plan, graph, machine))
    sent = [0.0] * len(plan.programs)
    for node, op in enumerate(graph.ops):
        if op.kind == "send":
            sent[graph.role[node]] += op.bytes
        elif op.kind in COLLECTIVES:
            sent[graph.role[node]] += rounds_and_bytes(op, plan.mesh.degree(op.axis))[1]
    return Simulation(
        plan,
        _timeline(plan, graph, start, end),
        max(end, default=0.0),
        sent,
        [_peak(program.ops, sum(program.memory.values()))[0] for program in plan.programs],
        [_peak(program.ops, 0)[1] for program in plan.programs],
    )


def durations(plan: Plan, graph: Graph, machine: Machine) -> list[float]:
    """Seconds of every node, were it never to wait."""
    seconds = []
    for program in plan.programs:
        seconds += compute_seconds(program.ops, machine, plan.world_size)
    for node, op in enumerate(graph.ops):
        if op.kind in COLLECTIVES:
            seconds[node] = collective_seconds(op, plan.mesh.degree(op.axis), machine)
        elif op.kind == "send":
            seconds[node] = message_seconds(op.bytes, machine)
    return seconds


def schedule(graph: Graph, seconds: list[float]) -> tuple[list[float], list[float]]:
    """Start and end of every node. Members of a collective share both."""
    n = len(graph.ops)
    leader = [graph.meets[i] if graph.ops[i].kind in COLLECTIVES and graph.meets[i] >= 0 else i for i in range(n)]
    waiting = [0] * n
    after: list[list[int]] = [[] for _ in range(n)]
    for node in range(n):
        target = leader[node]
        needs = graph.before[node]
        if graph.ops[node].kind == "recv":
            needs = [*needs, graph.meets[node]]
        for need in needs:
            after[leader[need]].append(target)
            waiting[target] += 1
    start, end = [0.0] * n, [0.0] * n
    ready = [node for node in range(n) if leader[node] == node and waiting[node] == 0]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        if graph.ops[node].kind == "recv":
            start[node], end[node] = start[graph.meets[node]], max(start[node], end[graph.meets[node]])
        else:
            end[node] = start[node] + seconds[node]
        for follower in after[node]:
            start[follower] = max(start[follower], end[node])
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if done < len(set(leader)):
        raise DeadlockError(_show_deadlock(graph, [waiting[leader[node]] > 0 for node in range(n)]))
    for node in range(n):
        start[node], end[node] = start[leader[node]], end[leader[node]]
    return start, end


def _show_deadlock(graph: Graph, stuck: list[bool]) -> str:
    lines = ["these ranks wait for each other:"]
    for role, first in enumerate(graph.first):
        last = graph.first[role + 1] if role + 1 < len(graph.first) else len(graph.ops)
        for node in range(first, last):
            if stuck[node]:
                shown = [f"  {describe(graph.ops[i])}" for i in range(max(first, node - 2), node)]
                following = [f"  {describe(graph.ops[i])}" for i in range(node + 1, min(last, node + 3))]
                lines += [f"rank {graph.representative[role]}:", *shown, f"> {describe(graph.ops[node])}", *following]
                break
    return "\n".join(lines)


def _peak(ops: tuple, standing: int) -> tuple[int, int]:
    """(most bytes at once, most microbatches in flight at once) of one program: a microbatch is in flight from its
    first forward op to the end of its last backward op."""
    backward = {(op.stage, op.microbatch): i for i, op in enumerate(ops) if op.kind.startswith("backward")}
    held, most, in_flight, most_in_flight = standing, standing, set(), 0
    saved: dict[tuple, int] = {}
    for i, op in enumerate(ops):
        chunk = (op.stage, op.microbatch)
        if op.kind == "forward":
            held += op.saved
            saved[(*chunk, op.part)] = op.saved
            in_flight.add(chunk)
        most, most_in_flight = max(most, held), max(most_in_flight, len(in_flight))
        if op.kind in ("backward", "backward_weight"):
            held -= saved.pop((*chunk, op.part), 0)
        if backward.get(chunk) == i:
            in_flight.discard(chunk)
    return most, most_in_flight


def _timeline(plan: Plan, graph: Graph, start: list[float], end: list[float]) -> Timeline:
    """The roles' spans, repeated on every rank that plays the role."""
    rows = []
    for node, op in enumerate(graph.ops):
        rank = graph.representative[graph.role[node]]
        peer = plan.peer_rank(rank, op)
        rows.append(
            Span(
                rank,
                graph.lane[node],
                op.kind,
                0,
                start[node],
                end[node],
                NONE if op.stage is None else op.stage,
                NONE if op.microbatch is None else op.microbatch,
                op.part,
                op.payload,
                op.axis,
                NONE if peer is None else peer,
                op.bytes,
            )
        )
    roles = Timeline.of(rows, "simulated", plan.world_size)
    if len(plan.programs) == plan.world_size:
        return roles
    bounds = [*graph.first, len(graph.ops)]
    index, ranks, shift = [], [], []
    for rank, role in enumerate(plan.roles):
        nodes = np.arange(bounds[role], bounds[role + 1])
        index.append(nodes)
        ranks.append(np.full(len(nodes), rank))
        shift.append(np.full(len(nodes), rank - graph.representative[role]))
    picked = np.concatenate(index)
    columns = {name: column[picked] for name, column in roles.columns.items()}
    offset = np.concatenate(shift)
    columns["rank"] = np.concatenate(ranks)
    # A peer differs from its rank only on the op's axis, and both move alike from the representative to this rank.
    columns["peer"] = np.where(columns["peer"] == NONE, NONE, columns["peer"] + offset)
    return Timeline(columns, "simulated", plan.world_size)
