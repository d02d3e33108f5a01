"""A Plan -> the graph of what waits for what, found from program order and matching ends; or a PlanError.

Ranks of one role do the same, so the graph has one node an op of a *role*, not of a rank: a plan for 16,384 ranks
costs what its roles cost. The rules of waiting are those of torch.distributed:

- a compute op and a synchronous communication hold up everything after them in their program;
- an asynchronous one holds up only its own lane, the next compute op of its part (of a layer, also a piece of it), and
  the next optimizer op, or the load with which the next micro-step begins;
- a message is buffered: its send never waits for the receive;
- the k-th send from a to b over an axis is the k-th receive of b from a (first in, first out);
- the k-th collective over an axis is the same call on every member of the group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from engine.columns import Ops
from engine.plan import COMPUTE, KINDS, MESSAGES, Op, Plan, lane_of

NO_NODE = -1
WAIT_FOR_ALL = ("optimizer", "load")  # kinds of op that wait for everything asynchronous that was issued before


class PlanError(ValueError):
    """A plan that no set of processes could run: ends that do not meet, groups that disagree, or a deadlock."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes are the ops of the roles of `plan`, which is uniform, in program order, role after role.

    `templates` and `lanes` have one entry a template (`engine.columns`), `first` and `representative` one a role, and
    arrays one a node.
    """

    plan: Plan
    templates: list[Op]
    lanes: list[tuple[int, str]]  # (role, lane)
    which: np.ndarray  # the node's template
    microbatch: np.ndarray  # the node's microbatch, or -1
    meets: np.ndarray  # of a receive, its send; of a collective, the lowest node of the group's call; else -1
    waits: dict[int, list[int]]  # compute node -> asynchronous nodes that must have ended before it starts
    first: list[int]  # the role's first node; one more entry is the number of nodes
    representative: list[int]  # the role's lowest rank

    def role(self, node: int) -> int:
        return bisect_right(self.first, node) - 1

    def op(self, node: int) -> Op:
        role = self.role(node)
        return self.plan.programs[role].ops[node - self.first[role]]


def match(plan: Plan) -> Graph:
    """The graph of a plan. PlanError: an op means nothing on this mesh, or its other end is not there."""
    _check(plan)
    plan = uniform(plan)
    representative = np.unique(np.array(plan.roles, dtype=np.int64), return_index=True)[1].tolist()
    templates, lanes, which, microbatch, first = [], [], [], [], [0]
    waits: dict[int, list[int]] = {}
    calls: dict[tuple[int, str], np.ndarray] = {}  # nodes of each role on each of its communication lanes
    for role, program in enumerate(plan.programs):
        ops = Ops.of(program.ops)
        names = [lane_of(op, plan.coordinate(representative[role], op)) for op in ops.templates]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        lane = np.array([numbers[name] for name in names], dtype=np.int32)[ops.which]
        for name, number in numbers.items():
            nodes = np.flatnonzero(lane == number)
            if name != "compute" and len(nodes):
                calls[role, name] = first[-1] + nodes
        waits |= _waits(ops, lane, first[-1])
        which.append(ops.which + len(templates))
        microbatch.append(ops.microbatch)
        templates += ops.templates
        lanes += [(role, name) for name in names]
        first.append(first[-1] + len(ops))
    meets = np.full(first[-1], NO_NODE)
    columns = [np.concatenate(column or [meets]) for column in (which, microbatch)]
    graph = Graph(plan, templates, lanes, *columns, meets, waits, first, representative)
    _match_messages(graph, calls)
    _match_collectives(graph, calls)
    return graph


def _check(plan: Plan) -> None:
    """Every op means something on this mesh, and every role is played."""
    if plan.mesh.size != plan.world_size:
        raise PlanError(f"the mesh has {plan.mesh.size} ranks, but {plan.world_size} ranks play a role")
    if odd := sorted(set(plan.roles) ^ set(range(len(plan.programs)))):
        raise PlanError(f"every role needs a program and a rank that plays it; these lack one: {odd}")
    for role, program in enumerate(plan.programs):
        for name, value in program.memory.items():
            if wrong := _wrong_size(name, value):
                raise PlanError(f"rank {plan.roles.index(role)}, memory: {wrong}")
        for op in Ops.of(program.ops).templates:
            if wrong := _wrong(op, plan):
                raise PlanError(f"rank {plan.roles.index(role)}, {describe(op)}: {wrong}")


def _wrong(op: Op, plan: Plan) -> str:
    """What makes an op meaningless on any rank, in words; empty when nothing does."""
    if op.kind not in KINDS:
        return f"there is no kind of op called {op.kind}"
    for name in ("bytes", "flops", "saved"):
        if wrong := _wrong_size(name, getattr(op, name)):
            return wrong
    if not op.axis:
        return "" if op.kind in COMPUTE and op.peer is None else "it communicates, and names no axis"
    if not plan.mesh.has(op.axis):
        return f"the mesh has no axis {op.axis}"
    degree = plan.mesh.degree(op.axis)
    if op.peer is None:
        return f"a {op.kind} needs a peer" if op.kind in MESSAGES else ""
    return "" if 0 <= op.peer < degree else f"its peer {op.peer} is not one of the {degree} on the axis {op.axis}"


def _wrong_size(name: str, value: object) -> str:
    if isinstance(value, Integral) and 0 <= value < 2**63:
        return ""
    return f"{name} must be a whole number, 0 or more and less than 2**63; it is {value}"


def uniform(plan: Plan) -> Plan:
    """The same plan with roles split until all ranks of a role talk to the same roles; mostly `plan` itself.

    Ranks of one role that name a peer also share their coordinate on its axis. So whatever is true of one of them
    (lanes, times, the role of a peer) is true of all.
    """
    program = np.array(plan.roles, dtype=np.int64)
    talks = [sorted({(op.axis, op.peer) for op in Ops.of(p.ops).templates if op.axis}, key=str) for p in plan.programs]
    coordinates = {axis: _coordinates(plan, axis) for axis in {axis for pairs in talks for axis, _ in pairs}}
    role, count = program, len(plan.programs)
    while count < plan.world_size:
        split = _split(role, program, talks, coordinates)
        if split.max() + 1 == count:
            break
        role, count = split, int(split.max()) + 1
    if count == len(plan.programs):
        return plan
    first_rank = {played: rank for rank, played in reversed(list(enumerate(role.tolist())))}
    numbers = {played: i for i, played in enumerate(sorted(first_rank, key=first_rank.get))}
    programs = tuple(plan.program(first_rank[played]) for played in numbers)
    return Plan(plan.mesh, programs, tuple(numbers[played] for played in role.tolist()), plan.layers)


def _coordinates(plan: Plan, axis: str) -> tuple[np.ndarray, int, int]:
    """(coordinate of every rank on an axis, ranks from one coordinate to the next, degree)"""
    stride, degree = plan.mesh.stride(axis), plan.mesh.degree(axis)
    return np.arange(plan.world_size) // stride % degree, stride, degree


def _split(role: np.ndarray, program: np.ndarray, talks: list, coordinates: dict) -> np.ndarray:
    """Roles split once, by the roles that their ranks talk to."""
    groups = {axis: _group_kinds(role, *place) for axis, place in coordinates.items()}
    out, count = np.empty_like(role), 0
    for now in range(int(role.max()) + 1):
        ranks = np.flatnonzero(role == now)
        seen = [np.zeros(len(ranks), dtype=np.int64)]
        for axis, peer in talks[program[ranks[0]]]:
            if peer is None:
                seen.append(groups[axis][ranks])
            else:
                coordinate, stride, _ = coordinates[axis]
                seen += [coordinate[ranks], role[ranks + (peer - coordinate[ranks]) * stride]]
        kinds, kind = np.unique(np.stack(seen), axis=1, return_inverse=True)
        out[ranks] = count + kind.reshape(-1)
        count += kinds.shape[1]
    return out


def _group_kinds(role: np.ndarray, coordinate: np.ndarray, stride: int, degree: int) -> np.ndarray:
    """For every rank a number that is equal where the groups along an axis have the same roles in them."""
    lowest = np.arange(len(role)) - coordinate * stride
    by_group = np.lexsort((role, lowest))
    _, kind = np.unique(role[by_group].reshape(-1, degree), axis=0, return_inverse=True)
    out = np.empty_like(role)
    out[by_group] = np.repeat(kind.reshape(-1), degree)
    return out


def _waits(ops: Ops, lane: np.ndarray, base: int) -> dict[int, list[int]]:
    """For each compute op that waits for asynchronous ones, the last of them on each lane: lanes keep their order."""
    issued = np.array([op.asynchronous and not op.is_compute for op in ops.templates], dtype=bool)[ops.which]
    parts = {op.part for op in ops.templates if op.asynchronous and not op.is_compute and op.part}
    waiting = [op.kind in WAIT_FOR_ALL or (op.is_compute and _of_part(op, parts) in parts) for op in ops.templates]
    if not issued.any() or not any(waiting):
        return {}
    issued = np.flatnonzero(issued)
    by_lane = {number: issued[lane[issued] == number].tolist() for number in set(lane[issued].tolist())}
    by_part: dict[str, dict[int, list[int]]] = {part: {} for part in parts}
    named = np.array([op.part in parts for op in ops.templates], dtype=bool)[ops.which[issued]]
    for node in issued[named].tolist():
        by_part[ops.templates[ops.which[node]].part].setdefault(int(lane[node]), []).append(node)
    waits = {}
    for node in np.flatnonzero(np.array(waiting)[ops.which]).tolist():
        op = ops.templates[ops.which[node]]
        queues = by_lane if op.kind in WAIT_FOR_ALL else by_part[_of_part(op, parts)]
        last = [queue[bisect_left(queue, node) - 1] for queue in queues.values() if queue[0] < node]
        if last:
            waits[base + node] = [base + n for n in last]
    return waits


def _of_part(op: Op, parts: Collection[str]) -> str:
    """What it waits for by name: its part, or the layer of which that is a piece (`block1.mlp`)."""
    return op.part if op.part in parts else op.part.partition(".")[0]


def _match_messages(graph: Graph, calls: dict[tuple[int, str], np.ndarray]) -> None:
    content = _numbered((op.payload, op.part, op.bytes) for op in graph.templates)
    for (role, lane), nodes in calls.items():
        op, rank = graph.templates[graph.which[nodes[0]]], graph.representative[role]
        if op.kind not in MESSAGES:
            continue
        other_rank = graph.plan.peer_rank(rank, op)
        if other_rank == rank:
            raise PlanError(f"rank {rank}, {describe(op)}: it names itself as its peer")
        other = calls.get((graph.plan.roles[other_rank], lane), np.array([], dtype=np.int64))
        if op.kind == "send":
            at = _first_difference(graph, content, nodes, other)
            if at is not None:
                one, two = graph.op(nodes[at]), graph.op(other[at])
                raise PlanError(f"rank {rank} sends {describe(one)} where rank {other_rank} expects {describe(two)}")
            graph.meets[other[: len(nodes)]] = nodes[: len(other)]
        if len(nodes) > len(other):
            lonely = describe(graph.op(nodes[len(other)]))
            raise PlanError(f"rank {rank}, {lonely}: it has no partner on rank {other_rank}")


def _match_collectives(graph: Graph, calls: dict[tuple[int, str], np.ndarray]) -> None:
    # In an all-to-all each member gives what it has, and knows what it gets.
    sizes = (0 if op.kind == "all_to_all" else op.bytes for op in graph.templates)
    content = _numbered(
        (op.kind, op.payload, op.part, size, op.peer) for op, size in zip(graph.templates, sizes, strict=True)
    )
    done = set()
    for role, axis in calls:
        if not graph.plan.mesh.has(axis) or (role, axis) in done:
            continue
        members = _members(graph.plan, graph.representative[role], axis)
        done |= {(member, axis) for member in members}
        leader = calls.get((members[0], axis), np.array([], dtype=np.int64))
        for member in members:
            nodes = calls.get((member, axis), np.array([], dtype=np.int64))
            ranks = graph.representative[members[0]], graph.representative[member]
            at = _first_difference(graph, content, leader, nodes)
            if at is not None:
                one, two = describe(graph.op(leader[at])), describe(graph.op(nodes[at]))
                raise PlanError(
                    f"collective {at} over {axis}: rank {ranks[0]} calls {one}, rank {ranks[1]} calls {two}"
                )
            if len(leader) != len(nodes):
                counts = f"rank {ranks[0]} calls {len(leader)} collectives and rank {ranks[1]} {len(nodes)}"
                raise PlanError(f"over {axis}, {counts}")
            graph.meets[nodes] = leader


def _members(plan: Plan, rank: int, axis: str) -> list[int]:
    """The roles in a rank's group along an axis, in rising order."""
    coordinate, stride, degree = _coordinates(plan, axis)
    group = rank + (np.arange(degree) - coordinate[rank]) * stride
    return np.unique(np.array(plan.roles)[group]).tolist()


def _numbered(values) -> np.ndarray:
    """Equal numbers for equal values."""
    numbers: dict[tuple, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _first_difference(graph: Graph, content: np.ndarray, one: np.ndarray, two: np.ndarray) -> int | None:
    """Where two sequences of nodes, as far as both go, first carry something different."""
    both = min(len(one), len(two))
    one, two = one[:both], two[:both]
    same = (content[graph.which[one]] == content[graph.which[two]]) & (graph.microbatch[one] == graph.microbatch[two])
    return None if same.all() else int(np.argmin(same))


def describe(op: Op) -> str:
    """A few words for an error or a hover: `send activation s0 m1, 4096 bytes`."""
    words = [op.kind, op.payload, op.part]
    words += [f"s{op.stage}"] if op.stage is not None else []
    words += [f"m{op.microbatch}"] if op.microbatch is not None else []
    return " ".join(w for w in words if w) + (f", {op.bytes} bytes" if op.axis else "")
