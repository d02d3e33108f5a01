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

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from engine.graph.columns import Ops
from engine.graph.roles import group_of, uniform
from engine.plan import COMPUTE, KINDS, MESSAGES, Op, Plan, lane_of

NO_NODE = -1
WAIT_FOR_ALL = ("optimizer", "load")  # kinds of op that wait for everything asynchronous that was issued before


class PlanError(ValueError):
    """A plan that no set of processes could run: ends that do not meet, groups that disagree, or a deadlock."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes are the ops of the roles of `plan`, which is uniform, in program order, role after role.

    `templates` and `lanes` have one entry a template (`engine.graph.columns`), `first` and `representative` one a
    role, and arrays one a node. A lane is that of the role's lowest rank.
    """

    plan: Plan
    templates: list[Op]
    lanes: list[tuple[int, str]]  # (role, lane)
    which: np.ndarray  # the node's template
    microbatch: np.ndarray  # the node's microbatch, or -1
    meets: np.ndarray  # of a receive, its send; of a collective, the lowest node of the group's call; else -1
    # Compute node -> asynchronous nodes that must have ended before it starts; what an earlier node of its role has
    # waited for on the same lane has ended, and is left out.
    waits: dict[int, list[int]]
    first: list[int]  # the role's first node; one more entry is the number of nodes
    representative: list[int]  # the role's lowest rank
    num_ranks: list[int]  # how many ranks play the role

    def group(self, template: int) -> Sequence[int]:
        """The ranks that do a template's op together, from the lowest rank of its role: its group along the op's axis,
        or the two ends of a message; that rank alone where it does not communicate."""
        op, rank = self.templates[template], self.representative[self.lanes[template][0]]
        if not op.axis:
            return range(rank, rank + 1)
        if op.peer is None:
            return group_of(self.plan.mesh, rank, op.axis)
        other = self.plan.peer_rank(rank, op)
        return range(min(rank, other), max(rank, other) + 1, abs(other - rank) or 1)

    def role(self, node: int) -> int:
        return bisect_right(self.first, node) - 1

    def op(self, node: int) -> Op:
        role = self.role(node)
        return self.plan.programs[role].ops[node - self.first[role]]


def match(plan: Plan, apart: Sequence[int] | None = None) -> Graph:
    """The graph of a plan. PlanError: an op means nothing on this mesh, or its other end is not there.

    `apart`: a number for each rank; ranks with different ones get roles of their own (`engine.graph.roles`).
    """
    _check(plan)
    plan = uniform(plan, apart)
    role_of = np.array(plan.roles, dtype=np.int64)
    _, representative, num_ranks = np.unique(role_of, return_index=True, return_counts=True)
    representative = representative.tolist()
    templates, lanes, which, microbatch, first = [], [], [], [], [0]
    waits: dict[int, list[int]] = {}
    calls: dict[tuple[int, str], np.ndarray] = {}  # nodes of each role on each of its communication lanes
    for role, program in enumerate(plan.programs):
        ops, rank = Ops.of(program.ops), representative[role]
        names = _lanes(plan, rank, ops.templates)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        # Short numbers are sorted digit by digit, in one go.
        short = np.int16 if len(numbers) < 2**15 else np.int32
        lane = np.array([numbers[name] for name in names], dtype=short)[ops.which]
        by_lane = _places(lane, len(numbers))
        for name, number in numbers.items():
            nodes = by_lane[number]
            if name != "compute" and len(nodes):
                calls[role, name] = first[-1] + nodes
        waits |= _waits(ops, by_lane, first[-1])
        which.append(ops.which + len(templates))
        microbatch.append(ops.microbatch)
        templates += ops.templates
        lanes += [(role, name) for name in names]
        first.append(first[-1] + len(ops))
    meets = np.full(first[-1], NO_NODE)
    columns = [np.concatenate(column or [meets]) for column in (which, microbatch)]
    graph = Graph(plan, templates, lanes, *columns, meets, waits, first, representative, num_ranks.tolist())
    _match_messages(graph, calls)
    _match_collectives(graph, calls, role_of)
    return graph


def _lanes(plan: Plan, rank: int, ops: Sequence[Op]) -> list[str]:
    """The lane of each op on a rank; many are on one link."""
    links: dict[tuple, str] = {}
    names = []
    for op in ops:
        if op.kind not in MESSAGES:
            names.append(lane_of(op, 0))
            continue
        link = (op.kind, op.axis, op.peer, op.ring)
        if link not in links:
            links[link] = plan.lane(rank, op)
        names.append(links[link])
    return names


def _places(values: np.ndarray, count: int) -> list[np.ndarray]:
    """For each of the numbers 0 to count - 1 the places where it stands, in order."""
    return np.split(np.argsort(values, kind="stable"), np.cumsum(np.bincount(values, minlength=count))[:-1])


def _check(plan: Plan) -> None:
    """Every op means something on this mesh, and every role is played."""
    if plan.mesh.size != plan.world_size:
        raise PlanError(f"the mesh has {plan.mesh.size} ranks, but {plan.world_size} ranks play a role")
    if odd := sorted(set(plan.roles) ^ set(range(len(plan.programs)))):
        raise PlanError(f"every role needs a program and a rank that plays it; these lack one: {odd}")
    seen: set[int] = set()  # roles share many of their ops
    for role, program in enumerate(plan.programs):
        for name, value in program.memory.items():
            if wrong := _wrong_size(name, value):
                raise PlanError(f"rank {plan.roles.index(role)}, memory: {wrong}")
        for op in Ops.of(program.ops).templates:
            if id(op) in seen:
                continue
            seen.add(id(op))
            if wrong := _wrong(op, plan):
                raise PlanError(f"rank {plan.roles.index(role)}, {describe(op)}: {wrong}")


def _wrong(op: Op, plan: Plan) -> str:
    """What makes an op meaningless on any rank, in words; empty when nothing does."""
    if op.kind not in KINDS:
        return f"there is no kind of op called {op.kind}"
    for name, value in (("bytes", op.bytes), ("flops", op.flops), ("saved", op.saved)):
        if wrong := _wrong_size(name, value):
            return wrong
    if not op.axis:
        return "" if op.kind in COMPUTE and op.peer is None else "it communicates, and names no axis"
    if not plan.mesh.has(op.axis):
        return f"the mesh has no axis {op.axis}"
    degree = plan.mesh.degree(op.axis)
    if op.peer is None:
        return f"a {op.kind} needs a peer" if op.kind in MESSAGES else ""
    if op.ring:
        return ""
    return "" if 0 <= op.peer < degree else f"its peer {op.peer} is not one of the {degree} on the axis {op.axis}"


def _wrong_size(name: str, value: object) -> str:
    if (type(value) is int or isinstance(value, Integral)) and 0 <= value < 2**63:
        return ""
    return f"{name} must be a whole number, 0 or more and less than 2**63; it is {value}"


def _waits(ops: Ops, by_lane: Sequence[np.ndarray], base: int) -> dict[int, list[int]]:
    """For each compute op that waits for asynchronous ones, the last of them on each lane: lanes keep their order."""
    issues = np.array([op.asynchronous and op.kind not in COMPUTE for op in ops.templates], dtype=bool)
    if not issues.any():
        return {}
    parts = {op.part for op, issued in zip(ops.templates, issues.tolist(), strict=True) if issued} - {""}
    # For every template the name of what it waits for: "" is all, None nothing.
    awaits = [
        "" if op.kind in WAIT_FOR_ALL else part if op.is_compute and (part := _of_part(op, parts)) in parts else None
        for op in ops.templates
    ]
    names = {name: i for i, name in enumerate(dict.fromkeys([None, *awaits]))}
    if len(names) == 1:
        return {}
    # A name and a node are one number, so that one search finds what was last issued of what each waiter waits for.
    number = np.array([names[name] for name in awaits])[ops.which] * len(ops)
    of_part = np.array([names.get(op.part or None, 0) for op in ops.templates])[ops.which] * len(ops)
    waiting = np.flatnonzero(number)
    waiters, needs = [], []  # of each lane, who waits, and for whom
    for nodes in by_lane:
        issued = nodes[issues[ops.which[nodes]]]
        if not len(issued):
            continue
        queues = np.sort(np.concatenate([of_part[issued] + issued, names.get("", 0) * len(ops) + issued]))
        last = queues[np.searchsorted(queues, number[waiting] + waiting) - 1]
        some = (last >= number[waiting]) & (last < number[waiting] + waiting)
        waiter, need = waiting[some], (last - number[waiting])[some]
        known = np.append(NO_NODE, np.maximum.accumulate(need))[:-1]
        waiters.append(waiter[need > known])
        needs.append(need[need > known])
    node, need = np.concatenate(waiters), np.concatenate(needs)
    order, waits = np.argsort(node, kind="stable"), {}
    for one, other in zip((base + node[order]).tolist(), (base + need[order]).tolist(), strict=True):
        waits.setdefault(one, []).append(other)
    return waits


def _of_part(op: Op, parts: Collection[str]) -> str:
    """What it waits for by name: its part, or the layer of which that is a piece (`block1.mlp`)."""
    return op.part if op.part in parts else op.part.partition(".")[0]


def _match_messages(graph: Graph, calls: dict[tuple[int, str], np.ndarray]) -> None:
    content = _numbered((op.payload, op.part, op.bytes) for op in graph.templates)
    for (role, _), nodes in calls.items():
        op, rank = graph.templates[graph.which[nodes[0]]], graph.representative[role]
        if op.kind not in MESSAGES:
            continue
        other_rank = graph.plan.peer_rank(rank, op)
        if other_rank == rank:
            raise PlanError(f"rank {rank}, {describe(op)}: it names itself as its peer")
        other = calls.get(_other_end(graph, op, rank, other_rank), np.array([], dtype=np.int64))
        if op.kind == "send":
            at = _first_difference(graph, content, nodes, other)
            if at is not None:
                one, two = graph.op(nodes[at]), graph.op(other[at])
                raise PlanError(f"rank {rank} sends {describe(one)} where rank {other_rank} expects {describe(two)}")
            graph.meets[other[: len(nodes)]] = nodes[: len(other)]
        if len(nodes) > len(other):
            lonely = describe(graph.op(nodes[len(other)]))
            raise PlanError(f"rank {rank}, {lonely}: it has no partner on rank {other_rank}")


def _other_end(graph: Graph, op: Op, rank: int, other_rank: int) -> tuple[int, str]:
    """The role of the other end, and the link of an op as it is called there: by that role's lowest rank, which round a
    ring may stand at another place than the other end itself."""
    plan, mesh = graph.plan, graph.plan.mesh
    role = plan.roles[other_rank]
    further = mesh.coordinate(graph.representative[role], op.axis) - mesh.coordinate(other_rank, op.axis)
    rank = mesh.peer(rank, op.axis, (mesh.coordinate(rank, op.axis) + further) % mesh.degree(op.axis))
    return role, plan.lane(rank, op)


def _match_collectives(graph: Graph, calls: dict[tuple[int, str], np.ndarray], role_of: np.ndarray) -> None:
    # In an all-to-all each member gives what it has, and knows what it gets.
    sizes = (0 if op.kind == "all_to_all" else op.bytes for op in graph.templates)
    content = _numbered(
        (op.kind, op.payload, op.part, size, op.peer) for op, size in zip(graph.templates, sizes, strict=True)
    )
    done = set()
    for role, axis in calls:
        if not graph.plan.mesh.has(axis) or (role, axis) in done:
            continue
        group = group_of(graph.plan.mesh, graph.representative[role], axis)
        members = np.unique(role_of[np.array(group)]).tolist()
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
