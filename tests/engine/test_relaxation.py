"""Random plans, whatever their roles, take as long as a second simulator says, which knows only ranks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from engine.cost.machine import Machine
from engine.graph.notation import parse_plan
from engine.plan import COLLECTIVES, MESSAGES, Mesh, Op, Plan, Program
from engine.simulation import simulate

# A FLOP takes a second, and so does a byte on a link.
PLAIN = Machine(name="plain", flop_rate=1.0, memory_rate=math.inf, op_overhead=0.0, link_latency=0.0, link_rate=1.0)


def relax(plan: Plan, seconds: dict[str, float]) -> list[tuple[float, float]]:
    """Times by the rules in `engine.graph.matching`, rank by rank, raised until none is broken. `seconds` by op."""
    ops = [(rank, i, op) for rank in range(plan.world_size) for i, op in enumerate(plan.program(rank).ops)]
    index = {(rank, i): n for n, (rank, i, _) in enumerate(ops)}
    calls: dict[tuple, list[list[int]]] = {}
    for n, (rank, _, op) in enumerate(ops):
        if op.kind in MESSAGES:
            ends = (rank, plan.peer_rank(rank, op))
            key = (op.axis, *(ends if op.kind == "send" else ends[::-1]))
            calls.setdefault(key, [[], []])[op.kind == "recv"].append(n)
        elif op.kind in COLLECTIVES:
            key = (op.axis, plan.mesh.group(rank, op.axis))
            members = calls.setdefault(key, [[] for _ in key[1]])
            members[key[1].index(rank)].append(n)
    together = {n: set(nodes) for lists in calls.values() for nodes in zip(*lists, strict=True) for n in nodes}
    start, end, free = ([0.0] * len(ops) for _ in range(3))  # `free`: when the rank may go on
    changed = True
    while changed:
        changed = False
        ready = []
        for rank, i, op in ops:
            before = [(index[rank, j], plan.program(rank).ops[j]) for j in range(i)]
            blocking = [m for m, other in before if other.is_compute or not other.asynchronous]
            lane = [m for m, other in before if plan.lane(rank, other) == plan.lane(rank, op)]
            late = [
                m
                for m, other in before
                if other.asynchronous
                and op.is_compute
                and (op.kind == "optimizer" or (op.part and other.part == op.part))
            ]
            ready.append(max([0.0, *(free[m] for m in blocking), *(end[m] for m in lane + late)]))
        for n, (_, _, op) in enumerate(ops):
            if op.kind == "recv":
                send = next(m for m in together[n] if ops[m][2].kind == "send")
                times = (start[send], end[send], max(ready[n], end[send]))
            else:
                begin = max(ready[m] for m in together[n]) if op.kind in COLLECTIVES else ready[n]
                times = (begin, begin + seconds[repr(op)], begin + seconds[repr(op)])
            if times != (start[n], end[n], free[n]):
                start[n], end[n], free[n] = times
                changed = True
    return list(zip(start, end, strict=True))


def random_plan(draw: random.Random) -> Plan:
    """Stages and replicas that do things in one global order, so that they cannot wait for each other in a circle.
    Round a ring each sends first."""
    stages, replicas = draw.randint(1, 4), draw.randint(1, 3)
    own = draw.random() < 0.3  # a program of its own for every rank, else one a stage
    programs: list[list[Op]] = [[] for _ in range(stages * replicas if own else stages)]

    def add(stage: int, op: Op) -> None:
        for ops in programs[stage * replicas : (stage + 1) * replicas] if own else [programs[stage]]:
            ops.append(op)

    for number in range(draw.randint(1, 25)):
        part, late = draw.choice(("", "a", "b")), draw.random() < 0.6
        size, what = draw.randint(0, 9), draw.random()
        if what < 0.4:
            kind = draw.choice(("forward", "backward", "optimizer"))
            programs[draw.randrange(len(programs))].append(Op(kind=kind, part=part, flops=size))
        elif what < 0.5 and (
            axis := draw.choice([axis for axis, n in (("pp", stages), ("dp", replicas)) if n > 1] or [""])
        ):
            message = {"axis": axis, "ring": True, "microbatch": number, "bytes": size, "part": part}
            hop, waits = draw.randint(1, 3), draw.random() < 0.3
            for stage in range(stages) if axis == "pp" else [draw.randrange(stages)]:
                if hop % {"pp": stages, "dp": replicas}[axis]:
                    add(stage, Op(kind="send", peer=hop, asynchronous=late, **message))
                    add(stage, Op(kind="recv", peer=-hop, asynchronous=waits, **message))
        elif what < 0.7 and stages > 1:
            a, b = draw.sample(range(stages), 2)
            message = {"axis": "pp", "microbatch": number, "bytes": size, "part": part}
            add(a, Op(kind="send", peer=b, asynchronous=late, **message))
            add(b, Op(kind="recv", peer=a, asynchronous=draw.random() < 0.3, **message))
        else:
            op = Op(kind="all_reduce", axis=draw.choice(("pp", "dp")), asynchronous=late, bytes=size, part=part)
            for stage in range(stages) if op.axis == "pp" else [draw.randrange(stages)]:
                add(stage, op)
    roles = range(len(programs)) if own else np.repeat(range(stages), replicas).tolist()
    return Plan(Mesh(("pp", "dp"), (stages, replicas)), tuple(Program(tuple(p)) for p in programs), tuple(roles))


def seconds_by_op(plan: Plan) -> dict[str, float]:
    """Seconds by the machine PLAIN, from arithmetic of its own; of ops as ranks do them (`Plan.program`)."""
    out = {}
    for op in (op for rank in range(plan.world_size) for op in plan.program(rank).ops):
        n = plan.mesh.degree(op.axis)
        ring = 2 * (n - 1) / n * op.bytes if op.kind in COLLECTIVES else op.bytes
        out[repr(op)] = float(op.flops) if op.is_compute else ring if op.kind != "recv" else 0.0
    return out


@pytest.mark.parametrize("seed", range(150))
def test_random_plans_take_as_long_as_rank_by_rank_relaxation_says(seed):
    plan = random_plan(random.Random(seed))
    result = simulate(plan, PLAIN)
    expected = relax(plan, seconds_by_op(plan))
    times = list(zip(result.timeline["start"].tolist(), result.timeline["end"].tolist(), strict=True))
    np.testing.assert_allclose(times, np.array(expected).reshape(-1, 2), rtol=1e-12, atol=1e-12)
    rows = [(span.rank, span.kind, span.part, span.bytes, span.lane, span.peer) for span in result.timeline.spans()]
    assert rows == [
        (rank, op.kind, op.part, op.bytes, plan.lane(rank, op), -1 if op.peer is None else plan.peer_rank(rank, op))
        for rank in range(plan.world_size)
        for op in plan.program(rank).ops
    ]


def test_the_relaxation_would_notice_an_op_that_takes_longer():
    """Negative control, on a plan in which everything follows one op."""
    plan = parse_plan(
        "mesh pp=2\nrole 0: ranks 0\nforward flops=2\nsend pp>1 bytes=1\nrole 1: ranks 1\nrecv pp<0 bytes=1"
    )
    seconds = seconds_by_op(plan)
    assert relax(plan, seconds) == [(0, 2), (2, 3), (2, 3)]
    longer = {key: value + ("forward" in key) for key, value in seconds.items()}
    assert relax(plan, longer) == [(0, 3), (3, 4), (3, 4)]
