"""Ranks round a ring share a program: it is what each would be planned to do alone, and takes as long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import modes
from engine.asking import slow
from engine.cost.placement import apart
from engine.graph.matching import match
from engine.graph.notation import format_plan, parse_plan
from engine.graph.roles import uniform
from engine.job import Job, prepare
from engine.modes.context.deal import span
from engine.plan import Op, Plan
from engine.scale_model.pictured import machine_of
from engine.simulation import Simulation, matched, simulate
from engine.spec import Spec
from tests.engine.test_relaxation import PLAIN

GPT = {"model": "gpt", "layers": 2, "hidden": 96, "heads": 24, "context": 96, "global_batch": 8, "machine": "h100"}
RING = "mesh cp=4\nrole 0: ranks 0-3\nload\nsend cp>+1 a bytes=2 async\nrecv cp<-1 a bytes=2\nforward a flops=3\n"


def job_of(**settings) -> Job:
    return prepare(Spec(**(GPT | settings)))


def by_rank(plan: Plan) -> Plan:
    """With a program of its own for each rank, in which nothing is counted from there."""
    ranks = range(plan.world_size)
    return Plan(plan.mesh, tuple(map(plan.program, ranks)), tuple(ranks), plan.layers)


# --- what a rank of a ring does -------------------------------------------------------------------------------------


def test_a_peer_is_counted_from_where_its_rank_stands():
    plan = parse_plan(RING)
    for rank, (following, before) in enumerate([(1, 3), (2, 0), (3, 1), (0, 2)]):
        _, send, recv, _ = plan.program(rank).ops
        assert (send, recv) == (
            Op(kind="send", part="a", axis="cp", peer=following, bytes=2, asynchronous=True),
            Op(kind="recv", part="a", axis="cp", peer=before, bytes=2),
        )
        _, send, recv, _ = plan.programs[0].ops
        assert (plan.peer_rank(rank, send), plan.peer_rank(rank, recv)) == (following, before)
        assert (plan.lane(rank, send), plan.lane(rank, recv)) == (f"cp:{rank}>{following}", f"cp:{before}>{rank}")


def test_ranks_load_the_tokens_of_their_place():
    plan = parse_plan(RING.replace("\n", '\ntokens "0:1 7:8" b c d\n', 1))
    assert [plan.program(rank).ops[0].part for rank in range(4)] == ["0:1 7:8", "b", "c", "d"]
    assert parse_plan(format_plan(plan)) == plan
    spans = [(one.rank, one.part) for one in simulate(plan, PLAIN).timeline.spans() if one.kind == "load"]
    assert spans == [(0, "0:1 7:8"), (1, "b"), (2, "c"), (3, "d")]


WAYS = [("ring", "head_tail"), ("ring", "none"), ("all_gather", "head_tail"), ("all_gather", "none"), ("ulysses", None)]
MESHES = [
    {"mode": "context", "devices": 4},
    {"mode": "context", "devices": 3, "accumulate": 2, "bucket_mb": 0.01},
    {"mode": "hybrid", "devices": 6, "cp": 3, "dp": 2},
    {"mode": "hybrid", "devices": 16, "cp": 4, "fsdp": 2, "tp": 2, "sequence_parallel": True},
    {"mode": "hybrid", "devices": 16, "cp": 4, "pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"mode": "hybrid", "devices": 8, "cp": 2, "ep": 2, "dp": 2, "model": "moe", "global_batch": 16},
]


@pytest.mark.parametrize(("attention", "balance"), WAYS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(map(str, mesh.values())))
def test_shared_programs_are_those_that_are_made_rank_by_rank(mesh, attention, balance, monkeypatch):
    """Where every place on cp is planned by itself, as if no other were like it, each rank does the same."""
    job = job_of(**mesh, attention=attention, balance=balance)
    ranks = job.degree("cp")
    shared = modes.plan(job)
    for module in ("context.plan.alike", "hybrid.plan.alike", "context.cuts.alike"):
        monkeypatch.setattr(f"engine.modes.{module}", lambda _: tuple(range(ranks)))
    alone = modes.plan(job)
    uneven = balance == "none"
    assert len(alone.programs) == len(shared.programs) * (1 if uneven else ranks)
    for rank in range(job.processes):
        assert shared.program(rank) == alone.program(rank)
        assert shared.program(rank).ops == alone.program(rank).ops
        place = shared.mesh.coordinate(rank, "cp")
        load = next((op for op in shared.program(rank).ops if op.kind == "load"), None)
        assert load is None or load.part == span(place, ranks, 96, job.spec.balance)


# --- roles ----------------------------------------------------------------------------------------------------------


def test_a_ring_is_one_role_until_one_of_it_is_unlike_the_others():
    """Then each is told apart by how far it is from that one, going round one way."""
    plan = parse_plan(RING)
    assert uniform(plan) is plan
    assert match(plan).num_ranks == [4]
    assert match(plan, [0, 0, 1, 0]).num_ranks == [1, 1, 1, 1]
    assert match(plan, [0, 1, 0, 1]).num_ranks == [2, 2]
    odd = parse_plan(
        RING.replace("ranks 0-3", "ranks 0,1,3") + RING.partition("\n")[2].replace("0: ranks 0-3", "1: ranks 2")
    )
    assert sorted(uniform(odd).roles) == [0, 1, 2, 3]


def test_rings_of_16384_are_refined_as_one_and_a_slow_rank_splits_only_its_own():
    text = RING.replace("mesh cp=4", "mesh dp=1024 cp=16").replace("ranks 0-3", "ranks 0-16383")
    plan = parse_plan(text)
    assert match(plan).num_ranks == [16_384]
    numbers = [0] * 16_384
    numbers[100] = 1
    assert sorted(match(plan, numbers).num_ranks) == [1] * 16 + [16_384 - 16]


def test_neighbours_on_other_nodes_are_told_apart():
    """Nodes of 8: round a ring of two nodes all are as far from an edge as one on the other node; round one node, or
    where each rank is on a node of its own, all are alike; so are groups that lie on nodes alike, and no others."""
    h100 = machine_of(job_of(mode="ddp", devices=8))

    def roles(mesh: str, ops: str, ranks: int) -> list[int]:
        return matched(parse_plan(f"mesh {mesh}\nrole 0: ranks 0-{ranks - 1}\n{ops}"), h100).num_ranks

    ring, gather = "send cp>+1 async\nrecv cp<-1", "all_gather dp"
    assert roles("cp=8", ring, 8) == [8]
    assert roles("cp=16", ring, 16) == [2] * 8
    assert roles("cp=8 tp=8", ring, 64) == [64]
    assert roles("cp=8 tp=4", ring, 32) == [16, 16]
    assert roles("dp=4 tp=4", gather, 16) == [16]
    assert roles("dp=3 tp=4", gather, 12) == [12]
    assert roles("pp=2 dp=3 tp=4", gather, 24) == [12, 12]  # two of a node, then one; one, then two
    assert apart(parse_plan(f"mesh cp=16\nrole 0: ranks 0-15\n{ring}"), PLAIN) == []


# --- times ----------------------------------------------------------------------------------------------------------


def same(one: Simulation, other: Simulation) -> None:
    columns = ("rank", "lane", "kind", "stage", "microbatch", "part", "payload", "group", "peer", "bytes")
    for name in columns:
        assert (one.timeline[name] == other.timeline[name]).all()
    for name in ("start", "end"):
        np.testing.assert_allclose(one.timeline[name], other.timeline[name], rtol=1e-12, atol=1e-12 * other.makespan)
    assert one.per_rank(one.peak_memory) == other.per_rank(other.peak_memory)
    assert one.per_rank(one.bytes_sent) == other.per_rank(other.bytes_sent)


UNLIKE = [{}, {"slow_rank": "3:2"}, {"slow_link": "1-2:10"}, {"slow_link": "0-3:30", "slow_rank": "2:1.5"}]
LAID_OUT = [
    {"mode": "context", "devices": 4},
    {"mode": "context", "devices": 12},
    {"mode": "hybrid", "devices": 24, "cp": 3, "pp": 2, "dp": 2, "tp": 2},
    {"mode": "hybrid", "devices": 24, "cp": 3, "fsdp": 2, "tp": 4},
    {"mode": "hybrid", "devices": 16, "cp": 8, "pp": 2, "schedule": "zbv", "layers": 4},
    {"mode": "hybrid", "devices": 16, "cp": 4, "fsdp": 4, "balance": "none"},
]


@pytest.mark.parametrize("unlike", UNLIKE, ids=str)
@pytest.mark.parametrize("mesh", LAID_OUT, ids=lambda mesh: "-".join(map(str, mesh.values())))
def test_one_of_a_role_takes_as_long_as_every_rank_by_itself(mesh, unlike):
    job = job_of(**mesh, **unlike)
    plan, machine, slower = modes.plan(job), machine_of(job), slow.of_spec(job.spec)
    reduced, whole = simulate(plan, machine, slower), simulate(by_rank(plan), machine, slower)
    assert len(whole.plan.programs) == job.processes
    same(reduced, whole)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_and_so_where_ranks_share_cores(devices):
    job = job_of(mode="context", devices=devices, machine="local")
    plan, machine = modes.plan(job), machine_of(job)
    reduced, whole = simulate(plan, machine), simulate(by_rank(plan), machine)
    assert len(reduced.plan.programs) == 1
    assert len(whole.plan.programs) == devices
    same(reduced, whole)


def test_a_ring_in_which_one_message_is_longer_is_no_ring_of_equals():
    """Negative control of `same`."""
    plan = parse_plan(RING)
    first = plan.programs[0]
    longer = replace(first, ops=tuple(replace(op, flops=2 * op.flops) for op in first.ops))
    other = Plan(plan.mesh, (first, longer), (0, 0, 0, 1))
    with pytest.raises(AssertionError):
        same(simulate(plan, PLAIN), simulate(other, PLAIN))
