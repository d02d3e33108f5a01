"""A Plan -> the graph of what waits for what, found from program order and matching ends; or a PlanError.

Ranks of one role do the same, so the graph has one node an op of a *role*, not of a rank: a plan for 16,384 ranks
costs what its roles cost. The rules of waiting are those of torch.distributed:

- a compute op and a synchronous communication hold up everything after them in their program;
- an asynchronous one holds up only its own lane, the next compute op of its part, and the next optimizer op;
- the k-th send from a to b over an axis is the k-th receive of b from a (first in, first out);
- the k-th collective over an axis is the same call on every member of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import COLLECTIVES, MESSAGES, Op, Plan, lane_of


class PlanError(ValueError):
    """A plan that no set of processes could run: ends that do not meet, groups that disagree, or a deadlock."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in program order, role after role. `before[n]`: nodes that must end before n starts. `meets[n]`: for a
    receive, its send; for a collective, the node that stands for the whole group (the lowest); else -1."""

    ops: list[Op]
    role: list[int]
    lane: list[str]
    before: list[list[int]]
    meets: list[int]
    first: list[int]  # first node of each role
    representative: list[int]  # the lowest rank of each role


def uniform(plan: Plan) -> Plan:
    """The same plan with roles split until ranks of a role talk to the same roles: usually `plan` itself."""
    if len(plan.programs) == plan.world_size:
        return plan
    talks = [sorted({(op.axis, op.peer) for op in p.ops if op.axis}, key=str) for p in plan.programs]
    for role, pairs in enumerate(talks):
        ranks = [r for r, played in enumerate(plan.roles) if played == role]
        for axis, peer in pairs:
            seen = set()
            for rank in ranks:
                others = plan.mesh.group(rank, axis) if peer is None else (plan.mesh.peer(rank, axis, peer),)
                seen.add(tuple(sorted({plan.roles[o] for o in others})))
            if len(seen) > 1:
                programs = tuple(plan.program(rank) for rank in range(plan.world_size))
                return Plan(plan.mesh, programs, tuple(range(plan.world_size)), plan.layers)
    return plan


def match(plan: Plan) -> Graph:
    """The graph of a uniform plan (see `uniform`)."""
    representative = [plan.roles.index(role) for role in range(len(plan.programs))]
    ops, role_of, lanes, before, first = [], [], [], [], []
    for role, program in enumerate(plan.programs):
        first.append(len(ops))
        rank = representative[role]
        _wait_in_program(program.ops, lambda op, rank=rank: plan.coordinate(rank, op), len(ops), lanes, before)
        ops.extend(program.ops)
        role_of.extend([role] * len(program.ops))
    meets = [-1] * len(ops)
    _match_messages(plan, ops, role_of, representative, meets)
    _match_collectives(plan, ops, role_of, representative, meets)
    return Graph(ops, role_of, lanes, before, meets, first, representative)


def _wait_in_program(ops: tuple[Op, ...], coordinate, base: int, lanes: list[str], before: list[list[int]]) -> None:
    last_blocking = -1
    last_on_lane: dict[str, int] = {}
    outstanding: list[int] = []
    for i, op in enumerate(ops):
        node = base + i
        lane = lane_of(op, coordinate(op) if op.axis else 0)
        waits = {last_blocking, last_on_lane.get(lane, -1)}
        if op.is_compute and outstanding:
            done = [n for n in outstanding if op.kind == "optimizer" or (op.part and ops[n - base].part == op.part)]
            if done:
                waits.update(done)
                outstanding = [n for n in outstanding if n not in done]
        waits.discard(-1)
        lanes.append(lane)
        before.append(sorted(waits))
        last_on_lane[lane] = node
        if op.is_compute or not op.asynchronous:
            last_blocking = node
        else:
            outstanding.append(node)


def _match_messages(plan: Plan, ops: list[Op], role_of: list[int], representative: list[int], meets: list[int]) -> None:
    sends: dict[tuple, list[int]] = {}
    recvs: dict[tuple, list[int]] = {}
    for node, op in enumerate(ops):
        if op.kind in MESSAGES:
            rank = representative[role_of[node]]
            peer_role = plan.roles[plan.peer_rank(rank, op)]
            if op.kind == "send":
                sends.setdefault((op.axis, role_of[node], peer_role), []).append(node)
            else:
                recvs.setdefault((op.axis, peer_role, role_of[node]), []).append(node)
    for channel in sends.keys() | recvs.keys():
        out, into = sends.get(channel, []), recvs.get(channel, [])
        for a, b in zip(out, into, strict=False):
            if _content(ops[a]) != _content(ops[b]):
                raise PlanError(
                    f"rank {representative[channel[1]]} sends {describe(ops[a])} "
                    f"where rank {representative[channel[2]]} expects {describe(ops[b])}"
                )
            meets[b] = a
        if len(out) != len(into):
            lonely = (out + into)[0] if not (out and into) else (out if len(out) > len(into) else into)[min(len(out), len(into))]
            raise PlanError(f"{describe(ops[lonely])} on rank {representative[role_of[lonely]]} has no partner")


def _content(op: Op) -> tuple:
    return (op.payload, op.microbatch, op.part, op.bytes)


def _match_collectives(plan: Plan, ops: list[Op], role_of: list[int], representative: list[int], meets: list[int]) -> None:
    calls: dict[tuple[str, int], list[int]] = {}
    for node, op in enumerate(ops):
        if op.kind in COLLECTIVES:
            calls.setdefault((op.axis, role_of[node]), []).append(node)
    for (axis, role), nodes in calls.items():
        for other_rank in plan.mesh.group(representative[role], axis):
            other = plan.roles[other_rank]
            theirs = calls.get((axis, other), [])
            for k, (a, b) in enumerate(zip(nodes, theirs, strict=False)):
                one, two = ops[a], ops[b]
                if (one.kind, one.part, one.bytes) != (two.kind, two.part, two.bytes):
                    raise PlanError(
                        f"collective {k} over {axis}: rank {representative[role]} calls {describe(one)}, "
                        f"rank {other_rank} calls {describe(two)}"
                    )
                meets[a] = min(b, meets[a] if meets[a] >= 0 else a)
            if len(nodes) != len(theirs):
                raise PlanError(
                    f"over {axis}, rank {representative[role]} calls {len(nodes)} collectives and rank {other_rank} {len(theirs)}"
                )


def describe(op: Op) -> str:
    """A few words for an error or a hover: `send activation s0 m1, 4096 bytes`."""
    words = [op.kind, op.payload, op.part]
    words += [f"s{op.stage}"] if op.stage is not None else []
    words += [f"m{op.microbatch}"] if op.microbatch is not None else []
    return " ".join(w for w in words if w) + (f", {op.bytes} bytes" if op.axis else "")
