"""A plan's ends find each other across any mesh, and a plan that no processes could run is refused in words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from engine import modes
from engine.asking.settings import MODE_MODELS
from engine.cost.machine import machine
from engine.graph.matching import PlanError, describe, match
from engine.graph.notation import parse_plan
from engine.graph.roles import uniform
from engine.graph.scheduler import DeadlockError
from engine.job import prepare
from engine.plan import Mesh, Op, Plan, Program
from engine.simulation import simulate
from engine.spec import MODELS, Spec

PIPELINE = """
mesh pp=2
role 0: ranks 0
forward s0 m0
send activation s0 m0 pp>1 bytes=8 async
forward s0 m1
send activation s0 m1 pp>1 bytes=8 async
recv gradient s0 m0 pp<1 bytes=8
role 1: ranks 1
recv activation s1 m0 pp<0 bytes=8
recv activation s1 m1 pp<0 bytes=8
send gradient s1 m0 pp>0 bytes=8 async
"""


def partners(plan: Plan) -> list[tuple[str, str]]:
    """Each receive with its send, as (rank, op) in words."""
    graph = match(plan)
    out = []
    for node in range(len(graph.meets)):
        if graph.op(node).kind == "recv":
            send = int(graph.meets[node])
            ends = [f"{graph.representative[graph.role(n)]}: {describe(graph.op(n))}" for n in (send, node)]
            out.append(tuple(ends))
    return out


def test_the_kth_receive_takes_the_kth_send_of_its_direction():
    assert partners(parse_plan(PIPELINE)) == [
        ("1: send gradient s1 m0, 8 bytes", "0: recv gradient s0 m0, 8 bytes"),
        ("0: send activation s0 m0, 8 bytes", "1: recv activation s1 m0, 8 bytes"),
        ("0: send activation s0 m1, 8 bytes", "1: recv activation s1 m1, 8 bytes"),
    ]


@pytest.mark.parametrize("mode", modes.MODES)
def test_the_plan_of_every_mode_matches(mode):
    model = MODE_MODELS.get(mode, MODELS)[0]
    plan = modes.plan(prepare(Spec(mode=mode, devices=1 if mode == "single" else 4, model=model)))
    graph = match(plan)
    communicates = np.array([op.kind == "recv" or (op.axis != "" and op.peer is None) for op in graph.templates])
    assert ((graph.meets >= 0) == communicates[graph.which]).all()


def test_one_rank_may_send_to_many_that_play_one_role_and_receive_from_them():
    """Ranks 1 to 3 share a program; rank 0's three messages go one to each."""
    plan = parse_plan("""
    mesh dp=4
    role 0: ranks 0
    send weights m1 dp>1 bytes=4 async
    send weights m1 dp>2 bytes=4 async
    send weights m1 dp>3 bytes=4 async
    recv gradient dp<3 bytes=2
    recv gradient dp<1 bytes=2
    recv gradient dp<2 bytes=2
    role 1: ranks 1-3
    recv weights m1 dp<0 bytes=4
    send gradient dp>0 bytes=2 async
    """)
    graph = match(plan)
    assert len(graph.plan.programs) == 4
    assert [graph.representative[graph.role(int(graph.meets[node]))] for node in (3, 4, 5)] == [3, 1, 2]
    assert graph.plan.program(3) == plan.program(3)


def test_a_collective_is_one_call_for_all_members_of_its_group():
    plan = parse_plan("""
    mesh dp=3
    role 0: ranks 0
    load
    broadcast weights dp bytes=4
    all_reduce gradient dp bytes=4
    role 1: ranks 1,2
    broadcast weights dp bytes=4
    all_reduce gradient dp bytes=4
    """)
    assert match(plan).meets.tolist() == [-1, 1, 2, 1, 2]


def test_axes_of_one_mesh_do_not_mix():
    """Stage 0 and stage 1 each reduce among their own three replicas; then all six meet pairwise along pp."""
    plan = parse_plan("""
    mesh pp=2 dp=3
    role 0: ranks 0-2
    all_reduce gradient dp bytes=12
    all_reduce gradient pp part bytes=4
    role 1: ranks 3-5
    all_reduce gradient dp bytes=8
    all_reduce gradient pp part bytes=4
    """)
    graph = match(plan)
    assert graph.plan is plan
    assert graph.meets.tolist() == [0, 1, 2, 1]


def test_many_groups_along_an_axis_may_be_played_by_one_role():
    plan = parse_plan(
        "mesh dp=4 tp=8\nrole 0: ranks 0-31\nall_gather weights tp bytes=4\nall_reduce gradient dp bytes=4"
    )
    assert match(plan).plan is plan
    assert match(plan).meets.tolist() == [0, 1]


# uniform


def test_a_plan_whose_ranks_all_talk_alike_is_left_as_it_is():
    for mode in ("ddp", "data_parallel", "pipeline"):
        plan = modes.plan(prepare(Spec(mode=mode, devices=4)))
        assert uniform(plan) is plan


def test_a_role_is_split_where_its_groups_differ():
    """Groups along tp are {0, 1}, {2, 3}, {4, 5}; only the first has a rank of the other role in it."""
    text = "mesh dp=3 tp=2\nrole 0: ranks 0\nload\nall_reduce tp bytes=4\nrole 1: ranks 1-5\nall_reduce tp bytes=4"
    plan = uniform(parse_plan(text))
    assert plan.roles == (0, 1, 2, 2, 2, 2)
    assert [program.ops for program in plan.programs] == [plan.program(rank).ops for rank in (0, 1, 2)]
    assert uniform(plan) is plan


def test_splitting_goes_on_until_nothing_changes():
    """A cube of ranks that meet along each axis. One is different, and with it, round by round, the whole cube:
    first its three neighbours, then theirs, at last the corner opposite."""
    meet = "all_reduce pp\nall_reduce dp\nall_reduce tp\n"
    alike = parse_plan(f"mesh pp=2 dp=2 tp=2\nrole 0: ranks 0-7\n{meet}")
    assert uniform(alike) is alike
    odd = parse_plan(f"mesh pp=2 dp=2 tp=2\nrole 0: ranks 0-6\n{meet}role 1: ranks 7\nload\n{meet}")
    assert uniform(odd).roles == (0, 1, 2, 3, 4, 5, 6, 7)
    assert uniform(odd).program(7) == odd.programs[1]
    # Along one axis there is one neighbour, and it goes no further.
    line = parse_plan("mesh pp=4 dp=2\nrole 0: ranks 0-6\nall_reduce dp\nrole 1: ranks 7\nload\nall_reduce dp")
    assert uniform(line).roles == (0, 0, 0, 0, 0, 0, 1, 2)


def test_ranks_that_name_a_peer_are_told_apart_by_their_place():
    plan = parse_plan("mesh dp=3\nrole 0: ranks 0\nload\nrole 1: ranks 1,2\nsend dp>0 bytes=4 async")
    assert uniform(plan).roles == (0, 1, 2)


# What is refused


def pair(first: str, second: str) -> Plan:
    """Two stages that do these ops, `;` between them."""
    text = f"mesh pp=2\nrole 0: ranks 0\n{first}\nrole 1: ranks 1\n{second}"
    return parse_plan(text.replace(";", "\n"))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            "send activation m0 pp>1 bytes=8",
            "recv activation m0 pp<0 bytes=9",
            "rank 0 sends send activation m0, 8 bytes where rank 1 expects recv activation m0, 9 bytes",
        ),
        ("send activation m0 pp>1 bytes=8", "recv activation m1 pp<0 bytes=8", "expects recv activation m1"),
        ("send activation m0 pp>1 bytes=8", "recv gradient m0 pp<0 bytes=8", "expects recv gradient"),
        ("send m0 a pp>1", "recv m0 b pp<0", "expects recv b m0"),
        ("send m0 pp>1;send m1 pp>1", "recv m1 pp<0;recv m0 pp<0", "rank 0 sends send m0, 0 bytes"),
        ("send m0 pp>1;send m1 pp>1", "recv m0 pp<0", "rank 0, send m1, 0 bytes: it has no partner on rank 1"),
        ("send m0 pp>1", "recv m0 pp<0;recv m1 pp<0", "rank 1, recv m1, 0 bytes: it has no partner on rank 0"),
        ("load", "recv m0 pp<0", "rank 1, recv m0, 0 bytes: it has no partner on rank 0"),
        ("send m0 pp>1", "load", "no partner on rank 1"),
        ("send m0 pp>1", "send m0 pp>0", "no partner"),
        ("send m0 pp>0", "load", "rank 0, send m0, 0 bytes: it names itself as its peer"),
        (
            "all_reduce pp bytes=8",
            "all_reduce pp bytes=12",
            "collective 0 over pp: rank 0 calls all_reduce, 8 bytes, rank 1 calls all_reduce, 12 bytes",
        ),
        ("all_reduce pp;all_reduce pp a", "all_reduce pp;all_reduce pp b", "collective 1 over pp: rank 0"),
        (
            "all_reduce pp;broadcast pp",
            "broadcast pp;all_reduce pp",
            "calls all_reduce, 0 bytes, rank 1 calls broadcast",
        ),
        ("all_reduce pp m0", "all_reduce pp m1", "collective 0 over pp"),
        ("all_reduce pp gradient", "all_reduce pp weights", "collective 0 over pp"),
        ("broadcast pp>0", "broadcast pp>1", "collective 0 over pp"),
        ("all_reduce pp;all_reduce pp", "all_reduce pp", "rank 0 calls 2 collectives and rank 1 1"),
        ("load", "all_reduce pp", "rank 0 calls 0 collectives and rank 1 1"),
        ("all_reduce pp", "load", "rank 0 calls 1 collectives and rank 1 0"),
        # Beyond the axis; the arithmetic of ranks would find somebody else's rank there, or none.
        ("send m0 pp>2", "load", "rank 0, send m0, 0 bytes: its peer 2 is not one of the 2 on the axis pp"),
        ("recv m0 pp<7", "load", "its peer 7 is not one of the 2"),
        ("send m0 pp", "load", "a send needs a peer"),
        ("recv", "load", "it communicates, and names no axis"),
        ("all_reduce bytes=3", "load", "it communicates, and names no axis"),
        ("all_reduce dp bytes=3", "load", "the mesh has no axis dp"),
        ("send dp>1 bytes=3", "load", "the mesh has no axis dp"),
    ],
)
def test_a_plan_that_no_processes_could_run_is_refused(first, second, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        match(pair(first, second))


def test_a_rank_without_a_partner_is_found_among_those_that_have_one():
    """Ranks 1 to 3 all send to rank 0, which waits for two of them."""
    text = "mesh dp=4\nrole 0: ranks 0\nrecv dp<1\nrecv dp<2\nrole 1: ranks 1-3\nsend dp>0"
    with pytest.raises(PlanError, match="rank 3, send, 0 bytes: it has no partner on rank 0"):
        match(parse_plan(text))


def test_a_replica_that_disagrees_is_found_in_whichever_group_it_is():
    plan = parse_plan("""
    mesh pp=2 dp=3
    role 0: ranks 0-4
    all_reduce dp bytes=8
    role 1: ranks 5
    all_reduce dp bytes=9
    """)
    with pytest.raises(PlanError, match=r"rank 3 calls all_reduce, 8 bytes, rank 5 calls all_reduce, 9 bytes"):
        match(plan)


BAD_SIZES = [-1, float("nan"), float("inf"), 1.5, 2**63, None, "8"]


@pytest.mark.parametrize("size", BAD_SIZES)
@pytest.mark.parametrize("name", ["bytes", "flops", "saved"])
def test_sizes_are_whole_numbers_that_a_column_can_hold(name, size):
    plan = Plan(Mesh(), (Program((Op(kind="load"), Op(kind="forward", **{name: size}))),), (0,))
    with pytest.raises(PlanError, match=f"rank 0, forward: {name} must be a whole number"):
        match(plan)


@pytest.mark.parametrize("size", BAD_SIZES)
def test_so_are_those_of_memory(size):
    with pytest.raises(PlanError, match="rank 0, memory: parameters must be a whole number"):
        match(Plan(Mesh(), (Program((), (), {"parameters": size}),), (0,)))


def test_sizes_may_be_numpys_whole_numbers():
    match(Plan(Mesh(), (Program((Op(kind="load", bytes=np.int64(3)),)),), (0,)))


def test_a_kind_of_op_that_does_not_exist_is_refused():
    with pytest.raises(PlanError, match="no kind of op called think"):
        match(Plan(Mesh(), (Program((Op(kind="think"),)),), (0,)))


@pytest.mark.parametrize(
    ("mesh", "programs", "roles", "words"),
    [
        (Mesh(("dp",), (3,)), 1, (0, 0), "the mesh has 3 ranks, but 2 ranks play a role"),
        (Mesh(("dp",), (2,)), 2, (0, 0), r"these lack one: \[1\]"),
        (Mesh(("dp",), (2,)), 1, (0, 1), r"these lack one: \[1\]"),
        (Mesh(("dp",), (2,)), 1, (0, -1), r"these lack one: \[-1\]"),
    ],
)
def test_roles_programs_and_ranks_go_together(mesh, programs, roles, words):
    with pytest.raises(PlanError, match=words):
        match(Plan(mesh, (Program(()),) * programs, roles))


def test_a_plan_in_which_nothing_happens_matches():
    assert len(match(Plan(Mesh(), (Program(()),), (0,))).meets) == 0
    assert len(match(Plan(Mesh(("dp",), (0,)), (), ())).meets) == 0


# Deadlocks


def deadlock(text: str) -> str:
    with pytest.raises(DeadlockError) as found:
        simulate(parse_plan(text), machine("unit"))
    return str(found.value)


def test_a_ring_in_which_all_receive_first_is_shown_rank_by_rank():
    text = "mesh cp=3\nrole 0: ranks 0-2\nrecv cp<-1 bytes=4\nsend cp>+1 bytes=4 async\n"
    assert deadlock(text).splitlines()[:2] == [
        "these ranks wait for each other: 0 -> 2 -> 1 -> 0",
        "rank 0 waits for rank 2:",
    ]


def test_two_ranks_that_both_receive_first_are_shown_with_an_arrow():
    text = "mesh pp=2\nrole 0: ranks 0\nload\nrecv gradient m0 pp<1 bytes=4\nsend activation m0 pp>1 bytes=8 async\n"
    text += "role 1: ranks 1\nrecv activation m0 pp<0 bytes=8\nforward m0\nsend gradient m0 pp>0 bytes=4 async"
    assert deadlock(text).splitlines() == [
        "these ranks wait for each other: 0 -> 1 -> 0",
        "rank 0 waits for rank 1:",
        "  load",
        "> recv gradient m0, 4 bytes",
        "  send activation m0, 8 bytes",
        "rank 1 waits for rank 0:",
        "> recv activation m0, 8 bytes",
        "  forward m0",
        "  send gradient m0, 4 bytes",
    ]


def test_two_ranks_that_both_send_first_are_not_a_deadlock():
    """Negative control: sends are buffered, even those that are waited for."""
    text = "mesh pp=2\nrole 0: ranks 0\nsend pp>1 bytes=8\nrecv pp<1 bytes=8\n"
    text += "role 1: ranks 1\nsend pp>0 bytes=8\nrecv pp<0 bytes=8"
    assert simulate(parse_plan(text), machine("unit")).makespan == 0


def test_ranks_that_only_wait_for_the_circle_are_not_blamed():
    """Stage 2 waits for stage 1, which is in a circle with stage 0."""
    text = "mesh pp=3\nrole 0: ranks 0\nrecv m0 pp<1\nsend m0 pp>1\n"
    text += "role 1: ranks 1\nrecv m0 pp<0\nsend m0 pp>0\nsend m0 pp>2\nrole 2: ranks 2\nrecv m0 pp<1"
    shown = deadlock(text)
    assert "0 -> 1 -> 0" in shown and "rank 2" not in shown


def test_collectives_over_two_axes_in_opposite_orders_are_a_deadlock():
    """Ranks 0 and 3 reduce over dp first, ranks 1 and 2 over pp first: each pair has one of either kind."""
    first, second = "all_reduce dp\nall_reduce pp\n", "all_reduce pp\nall_reduce dp\n"
    text = f"mesh pp=2 dp=2\nrole 0: ranks 0\n{first}role 1: ranks 1\n{second}role 2: ranks 2\n{second}"
    shown = deadlock(text + f"role 3: ranks 3\n{first}")
    assert shown.splitlines()[0] == "these ranks wait for each other: 0 -> 1 -> 3 -> 2 -> 0"
    assert shown.count("> all_reduce") == 4


def test_one_rank_waiting_for_a_collective_and_one_for_a_message_are_a_deadlock():
    text = "mesh pp=2\nrole 0: ranks 0\nall_reduce pp\nsend pp>1\nrole 1: ranks 1\nrecv pp<0\nall_reduce pp"
    assert "0 -> 1 -> 0" in deadlock(text)
    # Not waited for, the all-reduce lets the send through.
    simulate(parse_plan(text.replace("all_reduce pp", "all_reduce pp async")), machine("unit"))


def test_an_optimizer_that_waits_for_its_own_collective_is_shown_there():
    text = "mesh dp=2\nrole 0: ranks 0\nall_reduce dp async\noptimizer\nsend dp>1\n"
    shown = deadlock(text + "role 1: ranks 1\nrecv dp<0\nall_reduce dp async\noptimizer")
    assert "rank 0 waits for rank 1:\n  all_reduce, 0 bytes\n> optimizer\n  send, 0 bytes" in shown


def test_a_circle_of_many_ranks_is_shown_in_part():
    ranks = 20
    text = f"mesh dp={ranks}\n" + "".join(
        f"role {r}: ranks {r}\nrecv dp<{(r - 1) % ranks}\nsend dp>{(r + 1) % ranks}\n" for r in range(ranks)
    )
    shown = deadlock(text).splitlines()
    assert sum(line.startswith(">") for line in shown) == 8
    assert shown[-1] == "and 12 more ranks in this circle"
