"""Ops that share cores end when processor sharing says: closed forms, arithmetic by hand, and small steps of time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from engine import modes
from engine.cost.machine import machine
from engine.cost.sharing import Cores, last_of
from engine.graph.notation import parse_plan
from engine.job import prepare
from engine.simulation import simulate
from engine.spec import Spec
from tests.engine.test_simulate import PLAIN


def ends(cores: Cores, ops: list[tuple[float, float]]) -> dict[int, float]:
    """When each of some ops ends that begin at once: (seconds alone, cores asked for)."""
    for i, (seconds, asks) in enumerate(ops):
        cores.begin(i, seconds, asks, min(asks, 1))
    found = {}
    while (op := cores.end_next()) is not None:
        found[op] = cores.now
    return found


def by_small_steps(count: int, ops: list[tuple[float, float]], step: float = 1e-4) -> dict[int, float]:
    """The same, by giving each op its share of the cores again and again."""
    left, now, found = {i: seconds for i, (seconds, _) in enumerate(ops)}, 0.0, {}
    while left:
        asked = sum(ops[i][1] for i in left)
        share = min(1.0, count / asked) if asked else 1.0
        now += step
        for i in list(left):
            left[i] -= step * (share if ops[i][1] else 1.0)
            if left[i] <= 0:
                del left[i]
                found[i] = now
    return found


def test_two_equal_jobs_on_one_core_take_twice_as_long():
    assert ends(Cores(1), [(1.0, 1), (1.0, 1)]) == pytest.approx({0: 2.0, 1: 2.0})


def test_on_a_core_each_they_do_not():
    """Negative control of the one above."""
    assert ends(Cores(2), [(1.0, 1), (1.0, 1)]) == pytest.approx({0: 1.0, 1: 1.0})


def test_the_shorter_of_two_jobs_takes_twice_as_long_and_the_longer_as_long_as_both():
    """Jobs a < b on one core: 2a, and a + b."""
    assert ends(Cores(1), [(3.0, 1), (1.0, 1)]) == pytest.approx({1: 2.0, 0: 4.0})


@pytest.mark.parametrize("jobs", [[1.0, 2.0, 3.0, 4.0], [0.5] * 7, [1.0, 1.0, 5.0]])
def test_jobs_on_one_core_end_by_their_closed_form(jobs):
    """Sorted, the k-th of n ends at s1 + ... + sk-1 + (n - k + 1) sk."""
    jobs, n = sorted(jobs), len(jobs)
    wanted = {k: sum(jobs[:k]) + (n - k) * jobs[k] for k in range(n)}
    assert ends(Cores(1), [(job, 1) for job in jobs]) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(4))
def test_any_jobs_end_as_small_steps_of_time_say(seed):
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 5))
    ops = [(float(draw.uniform(0.1, 1)), float(draw.choice([0.0, 0.5, 1.0, 2.0]))) for _ in range(8)]
    assert ends(Cores(count), ops) == pytest.approx(by_small_steps(count, ops), abs=2e-3)


@pytest.mark.parametrize("seed", range(4))
def test_no_core_is_idle_while_an_op_waits_for_one_and_none_does_the_work_of_two(seed):
    """The last of n > count jobs of one core each: never before work / count, and then only while fewer are left."""
    draw = np.random.default_rng(seed)
    jobs = [float(job) for job in draw.uniform(0.1, 1, 9)]
    found = sorted(ends(Cores(2), [(job, 1.0) for job in jobs]).values())
    # Both cores are busy until the one before the last ends; then one is.
    assert 2 * found[-2] + (found[-1] - found[-2]) == pytest.approx(sum(jobs))


def test_cores_that_are_slower_together_slow_down_what_shares_them():
    """Two cores at 0.8 while both are busy: the first ends at 1 / 0.8, then the other has 1 left, alone."""
    assert ends(Cores(2, together=0.8), [(1.0, 1), (2.0, 1)]) == pytest.approx({0: 1.25, 1: 2.25})


@pytest.mark.parametrize(("ranks", "wanted"), [(2, 1.0), (3, 1 / 0.8), (4, 1 / 0.6), (8, 1 / 0.6)])
def test_ranks_that_outnumber_cores_compute_slower_even_one_by_one(ranks, wanted):
    """Two cores, at 0.6 where each has two processes; three are in the middle. Of a line of ranks each waits for the
    one before, so none ever waits for a core."""
    text = f"mesh pp={ranks}\n"
    for rank in range(ranks):
        text += f"role {rank}: ranks {rank}\n"
        text += f"recv pp<{rank - 1} bytes=0\n" if rank else ""
        text += "forward flops=1\n"
        text += f"send pp>{rank + 1} bytes=0\n" if rank + 1 < ranks else ""
    plan = parse_plan(text)
    assert simulate(plan, replace(PLAIN, cores=2, crowded=0.6)).makespan == pytest.approx(ranks * wanted)
    assert simulate(plan, replace(PLAIN, crowded=0.6)).makespan == pytest.approx(ranks)  # a device of its own for each


@pytest.mark.parametrize(("ranks", "wanted"), [(2, 1 / 0.8), (4, 2 / 0.6), (8, 4 / 0.6)])
def test_all_at_once_they_are_as_slow_as_was_measured_then(ranks, wanted):
    """Two cores at 0.8 while both are busy, and at 0.6 while each has two processes."""
    plan = parse_plan(f"mesh dp={ranks}\nrole 0: ranks 0-{ranks - 1}\nforward flops=1\n")
    assert simulate(plan, replace(PLAIN, cores=2, together=0.8, crowded=0.6)).makespan == pytest.approx(wanted)


# Ranks that are not done at the same moment


@pytest.mark.parametrize(
    ("num", "wanted"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (4, 1.0294), (8, 1.4236)]
)
def test_the_last_of_some_is_the_largest_of_as_many_normal_numbers(num, wanted):
    """Teichroew 1956, Tables of Expected Values of Order Statistics."""
    assert last_of(num) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("uneven", [0.0, 0.01])
def test_a_collective_begins_when_the_last_has_come(ranks, uneven):
    """After 4 s deviations of 0.2 s, and after 9 more of 0.3 s, since all begin these together."""
    text = f"mesh dp={ranks}\nrole 0: ranks 0-{ranks - 1}\n"
    text += "forward flops=4\nall_reduce over dp bytes=0\nforward flops=9\nall_reduce over dp bytes=0\n"
    result = simulate(parse_plan(text), replace(PLAIN, cores=ranks, uneven=uneven))
    late = 0.5 * last_of(ranks) if uneven else 0.0
    assert result.makespan == pytest.approx(13 + late)


def test_so_does_a_message_between_ranks_that_do_the_same_and_none_between_others():
    ring = prepare(Spec(mode="context", devices=2, model="gpt", dataset="synthetic", machine="a100"))
    line = prepare(Spec(mode="layer_split", devices=2, model="gpt", dataset="synthetic", machine="a100"))
    slower = []
    for job in (ring, line):
        shared = replace(machine("a100"), cores=2)
        even, uneven = (simulate(modes.plan(job), replace(shared, uneven=u)).timeline for u in (0.0, 1e-3))
        sends = even["kind"] == "send"
        slower.append((uneven["start"][sends] > even["start"][sends]).any())
    assert slower == [True, False]


def test_a_latency_takes_no_core():
    assert ends(Cores(1), [(1.0, 1), (1.0, 0), (1.5, 0)]) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.5})


# Whole plans


@pytest.mark.parametrize(("ranks", "wanted"), [(1, 8.0), (2, 4.0), (4, 4.0), (8, 4.0)])
def test_four_ranks_on_two_cores_are_no_faster_than_two(ranks, wanted):
    """8 s of work on one thread each: two ranks halve it, and four do not quarter it. (One rank has both cores.)"""
    threads = max(1, 2 // ranks)
    text = f"mesh dp={ranks}\nrole 0: ranks 0-{ranks - 1}\nforward flops={8 * threads // ranks}"
    assert simulate(parse_plan(text), replace(PLAIN, cores=2)).makespan == pytest.approx(wanted)


def test_ranks_of_one_role_ask_for_as_many_cores_as_ranks_of_several():
    one = "mesh dp=4\nrole 0: ranks 0-3\nforward flops=3\nbackward flops=2"
    several = "mesh dp=4\n" + "".join(f"role {r}: ranks {r}\nforward flops=3\nbackward flops=2\n" for r in range(4))
    times = [simulate(parse_plan(text), replace(PLAIN, cores=2)).makespan for text in (one, several)]
    assert times == pytest.approx([10.0, 10.0])


def test_uneven_ranks_by_hand():
    """Two ranks on one core, 1 and 3 s, then a sum that takes no time, then 1 s each: 2, 4, 4 + 2."""
    text = "mesh dp=2\n"
    for rank, flops in ((0, 1), (1, 3)):
        text += f"role {rank}: ranks {rank}\nforward flops={flops}\nall_reduce over dp bytes=0\nbackward flops=1\n"
    result = simulate(parse_plan(text), replace(PLAIN, cores=1))
    found = {(s.rank, s.kind): (s.start, s.end) for s in result.timeline.spans()}
    assert found[0, "forward"] == pytest.approx((0, 2)) and found[1, "forward"] == pytest.approx((0, 4))
    assert found[0, "all_reduce"] == pytest.approx((4, 4))
    assert found[0, "backward"] == pytest.approx((4, 6)) and result.makespan == pytest.approx(6)


@pytest.mark.parametrize(
    "mode", ["ddp", "zero1", "fsdp", "pipeline", "tensor", "context", "local_sgd", "data_parallel"]
)
@pytest.mark.parametrize("devices", [2, 4])
def test_where_there_are_cores_enough_it_makes_no_difference(mode, devices):
    """With a core for each rank, and links that need none, times are those of devices of their own."""
    plan = modes.plan(prepare(Spec(mode=mode, devices=devices, model="gpt", dataset="synthetic", machine="a100")))
    own = replace(machine("a100"), cores=0)
    shared = simulate(plan, replace(own, cores=devices)).timeline
    alone = simulate(plan, own).timeline
    assert shared["kind"].tolist() == alone["kind"].tolist()
    for column in ("start", "end"):
        assert shared[column] == pytest.approx(alone[column], rel=1e-9, abs=1e-15)


def test_and_with_fewer_it_does():
    """Negative control of the one above."""
    plan = modes.plan(prepare(Spec(mode="ddp", devices=4, model="gpt", dataset="synthetic", machine="a100")))
    own = replace(machine("a100"), cores=0)
    assert simulate(plan, replace(own, cores=2)).makespan > 1.5 * simulate(plan, own).makespan
