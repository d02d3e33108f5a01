"""A slow rank or link costs what it must: all of it on the critical path, nothing where there is slack."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine import simulate as predict
from engine.asking.rules import SpecError
from engine.asking.slow import Slow, slow_links, slow_ranks
from engine.graph.matching import match
from engine.graph.notation import parse_plan
from engine.job import prepare_real
from engine.plan import Plan, Program
from engine.simulation import simulate
from engine.spec import Spec
from tests.engine.test_relaxation import PLAIN, random_plan, relax, seconds_by_op

CHAIN = """
mesh pp=3
role 0: ranks 0
forward flops=4
send activation pp>1 bytes=1 async
role 1: ranks 1
recv activation pp<0 bytes=1
forward flops=2
recv activation m1 pp<2 bytes=1
forward flops=1
role 2: ranks 2
forward flops=3
send activation m1 pp>1 bytes=1 async
"""


@pytest.mark.parametrize(
    ("rank", "factor", "delay"),
    [(0, 1.5, 2.0), (1, 2.0, 3.0), (2, 2.0, 0.0), (2, 2.5, 1.5)],  # rank 2 has 3 s of slack: 4 + 1 + 2 - (3 + 1)
)
def test_a_delay_on_the_critical_path_adds_exactly_itself_and_slack_takes_it_up(rank, factor, delay):
    """By hand: rank 0 computes 4 s and sends for 1; rank 1 computes 2 s, has rank 2's message, and computes 1 s."""
    plan = parse_plan(CHAIN)
    assert simulate(plan, PLAIN).makespan == 8.0
    assert simulate(plan, PLAIN, Slow(ranks={rank: factor})).makespan == 8.0 + delay


@pytest.mark.parametrize(("link", "factor", "delay"), [((0, 1), 3.0, 2.0), ((1, 2), 4.0, 0.0), ((1, 2), 5.0, 1.0)])
def test_so_does_a_slow_link(link, factor, delay):
    assert simulate(parse_plan(CHAIN), PLAIN, Slow(links={link: factor})).makespan == 8.0 + delay


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_all_replicas_wait_for_the_slow_one(rank):
    """Whoever it is: 5 s more of backward for all, and 1 s more of its own optimizer."""
    plan = parse_plan("mesh dp=4\nrole 0: ranks 0-3\nbackward flops=5\nall_reduce dp bytes=4\noptimizer flops=1")
    late = simulate(plan, PLAIN, Slow(ranks={rank: 2.0}))
    assert simulate(plan, PLAIN).makespan == 5 + 6 + 1
    assert late.makespan == 10 + 6 + 2
    assert [s.end for s in late.timeline.spans() if s.kind == "backward"] == [10 if r == rank else 5 for r in range(4)]
    assert {(s.start, s.end) for s in late.timeline.spans() if s.kind == "all_reduce"} == {(10, 16)}
    assert [s.end for s in late.timeline.spans() if s.kind == "optimizer"] == [
        18 if r == rank else 17 for r in range(4)
    ]


def test_a_collective_goes_at_the_pace_of_the_slowest_link_in_its_group():
    text = "mesh dp=2 tp=2\nrole 0: ranks 0-3\nall_reduce tp bytes=8\nall_reduce dp bytes=4"
    plan = parse_plan(text)
    assert simulate(plan, PLAIN).makespan == 12
    assert simulate(plan, PLAIN, Slow(links={(2, 3): 3.0})).makespan == 24 + 4  # of tp
    assert simulate(plan, PLAIN, Slow(links={(1, 3): 3.0})).makespan == 8 + 12  # of dp
    assert simulate(plan, PLAIN, Slow(links={(0, 3): 3.0})).makespan == 12  # of no group
    three = parse_plan("mesh dp=3\nrole 0: ranks 0-2\nall_reduce dp bytes=3")
    assert simulate(three, PLAIN, Slow(links={(0, 2): 0.5})).makespan == 4  # the other links are as slow as they were
    assert simulate(three, PLAIN, Slow(links={(0, 2): 0.5, (0, 1): 2.0})).makespan == 8


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_with_a_slow_rank_take_as_long_as_rank_by_rank_relaxation_says(seed):
    """The relaxation gives every rank a program of its own, with its ops as much longer."""
    draw = random.Random(1000 + seed)
    plan = random_plan(draw)
    rank, factor = draw.randrange(plan.world_size), draw.choice((2, 3))
    own = [tuple(plan.program(r).ops) for r in range(plan.world_size)]
    own[rank] = tuple(replace(op, flops=op.flops * factor) if op.is_compute else op for op in own[rank])
    slowed = Plan(plan.mesh, tuple(Program(ops) for ops in own), tuple(range(plan.world_size)))
    result = simulate(plan, PLAIN, Slow(ranks={rank: float(factor)}))
    expected = relax(slowed, seconds_by_op(slowed))
    times = list(zip(result.timeline["start"].tolist(), result.timeline["end"].tolist(), strict=True))
    np.testing.assert_allclose(times, np.array(expected).reshape(-1, 2), rtol=1e-12, atol=1e-12)


# Roles

MESH = "mesh pp=2 dp=64 tp=8\nrole 0: ranks 0-511\nforward flops=1\nall_reduce tp bytes=8\nsend pp>1 bytes=1 async\n"
MESH += "role 1: ranks 512-1023\nrecv pp<0 bytes=1\nforward flops=1\nall_reduce tp bytes=8\nall_reduce dp bytes=8"


def test_roles_are_split_only_as_far_as_a_slow_rank_reaches():
    """Rank 8 is the first tensor rank of replica 1. In either stage there are: it (or who hears from it), the 7 others
    of its tensor group, the 63 others that it meets along dp, and the rest."""
    plan = parse_plan(MESH)
    assert match(plan).num_ranks == [512, 512]
    assert match(plan, Slow(ranks={8: 2.0}).apart(1024)).num_ranks == [63, 441, 1, 7] * 2


def test_ranks_that_are_as_slow_may_share_a_role_and_ends_of_a_link_do_not():
    plan = parse_plan("mesh dp=6\nrole 0: ranks 0-5\nall_reduce dp bytes=6")
    assert match(plan, Slow(ranks={1: 2.0, 4: 2.0}).apart(6)).num_ranks == [4, 2]
    assert match(plan, Slow(ranks={1: 2.0, 4: 3.0}).apart(6)).num_ranks == [4, 1, 1]
    assert match(plan, Slow(links={(1, 4): 2.0}).apart(6)).num_ranks == [4, 1, 1]
    assert Slow().apart(6) is None


@pytest.mark.parametrize("setting", ["slow_rank", "slow_link"])
def test_one_of_16384_is_slow(setting):
    """Somewhere in the middle: the mesh falls into few roles, not into ranks."""
    spec = Spec(
        mode="hybrid", devices=16_384, tp=8, pp=16, dp=128, model="gpt", layers=30, hidden=64, heads=8, context=16,
        global_batch=2048, microbatches=16, machine="h100", dataset="synthetic",
    )  # fmt: skip
    plain = predict(spec)
    # Ranks 9,003 and 9,005 are in one tensor group of stage 8.
    late = predict(spec.with_(**{setting: {"slow_rank": "9003:2", "slow_link": "9003-9005:50"}[setting]}))
    assert late.step_time > plain.step_time
    assert len(plain.plan.programs) == 16
    assert len(late.plan.programs) <= 16 * 2 * 3
    assert sum(late.simulation.graph.num_ranks) == 16_384
    assert late.plan.roles.count(late.plan.roles[9003]) == 1


# Settings


def test_slow_ranks_and_links_are_read():
    assert slow_ranks("5:2,9:1.5") == {5: 2.0, 9: 1.5}
    assert slow_links("4-3:10, 0-1:0.5") == {(3, 4): 10.0, (0, 1): 0.5}
    assert slow_ranks(None) == slow_links(None) == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(
            ("slow_rank", v)
            for v in ("", "5", "5:", ":2", "x:2", "-1:2", "1:0", "1:-2", "1:nan", "1:1e7", "1:1e-7", "1:2,1:3")
        ),
        *(("slow_rank", v) for v in ("2:2", "99:2", ",".join(f"{i}:2" for i in range(9)))),
        *(("slow_link", v) for v in ("0:2", "0-1", "0-0:2", "0-1-2:2", "0-1:0", "0-1:1e7", "0-1:2,1-0:3", "1-2:2")),
    ],
)
def test_what_is_no_slow_rank_or_link_is_refused_in_words(setting, value):
    with pytest.raises(SpecError) as error:
        predict(Spec(mode="ddp", devices=2, **{setting: value}))
    assert (error.value.code, error.value.setting) == (f"bad_{setting}", setting)
    for good in error.value.suggest:
        predict(Spec(mode="ddp", devices=max(2, int(value.count(",")) + 1), global_batch=72, **{setting: good}))


@pytest.mark.parametrize(("setting", "value"), [("slow_rank", "0:2"), ("slow_link", "0-1:2")])
def test_a_real_run_has_neither(setting, value):
    with pytest.raises(SpecError) as error:
        prepare_real(Spec(mode="ddp", devices=2, **{setting: value}))
    assert error.value.code == "slow_is_simulated"
