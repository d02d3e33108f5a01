"""Predicted times are those of closed forms, of arithmetic by hand, and of a second simulator that knows only ranks."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from engine import modes, schedules
from engine.cost.machine import Machine, machine
from engine.graph.matching import PlanError, match
from engine.graph.notation import parse_plan
from engine.graph.scheduler import schedule
from engine.job import prepare
from engine.plan import Mesh, Op, Plan, Program
from engine.simulation import Simulation, durations, simulate
from engine.spec import Spec

UNIT = machine("unit")
# A FLOP takes a second, and so does a byte on a link: an op's seconds can be read off its line.
PLAIN = Machine(name="plain", flop_rate=1.0, memory_rate=math.inf, op_overhead=0.0, link_latency=0.0, link_rate=1.0)


def pipeline(name: str, num_stages: int, num_microbatches: int, *, backward: int = 2) -> Plan:
    """Any schedule on any number of stages, with an op a pass: forward takes 1 FLOP, backward `backward`."""
    programs = []
    for stage, actions in enumerate(schedules.order(name, num_stages, num_microbatches)):
        ops = []
        for kind, _, m, _ in actions:
            step, flops, saved = (1, 1, 5) if kind == "forward" else (-1, backward, 0)
            place = {"stage": stage, "microbatch": m, "axis": "pp"}
            if 0 <= stage - step < num_stages:
                ops.append(Op(kind="recv", peer=stage - step, **place))
            ops.append(Op(kind=kind, stage=stage, microbatch=m, flops=flops, saved=saved))
            if 0 <= stage + step < num_stages:
                ops.append(Op(kind="send", peer=stage + step, asynchronous=True, **place))
        programs.append(Program(tuple(ops), memory={"parameters": 1000}))
    return Plan(Mesh(("pp",), (num_stages,)), tuple(programs), tuple(range(num_stages)))


def spans_of(result: Simulation, *kinds: str) -> list[tuple]:
    """(rank, kind, part, start, end) of the spans of some kinds, or of all."""
    return [
        (span.rank, span.kind, span.part, span.start, span.end)
        for span in result.timeline.spans()
        if not kinds or span.kind in kinds
    ]


# Pipelines


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_takes_as_long_as_its_closed_form_says(name, num_stages):
    """(M + P - 1) (F + B) with free links, for both (Narayanan et al. 2021, section 2.2).

    In flight on stage p: M in GPipe, min(M, P - p) in 1F1B.
    """
    for count in range(1, 17):
        result = simulate(pipeline(name, num_stages, count), UNIT)
        assert result.makespan == 3 * (count + num_stages - 1)
        held = [count if name == "gpipe" else min(count, num_stages - stage) for stage in range(num_stages)]
        assert result.peak_in_flight == held
        assert result.peak_memory == [1000 + 5 * most for most in held]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2), (4, 8), (6, 16), (8, 8)])
def test_so_does_the_pipeline_mode_however_layers_are_split(name, devices, microbatches):
    spec = Spec(mode="pipeline", devices=devices, model="gpt", layers=9, schedule=name, microbatches=microbatches)
    result = simulate(modes.plan(prepare(spec)), UNIT)
    assert result.makespan == 3 * (microbatches + devices - 1)


def test_eight_stages_and_32_microbatches_take_78_slots_when_backward_is_as_long_as_forward():
    """2 (M + P - 1) = 78, of which 2 (P - 1) = 14 are idle on every rank: 0.1795 of the time."""
    result = simulate(pipeline("1f1b", 8, 32, backward=1), PLAIN)
    assert result.makespan == 78
    busy = sum(end - start for _, _, _, start, end in spans_of(result, "forward", "backward"))
    assert 1 - busy / (8 * 78) == pytest.approx(0.1795, abs=5e-5)


def test_1f1b_on_two_stages_slot_by_slot():
    """By hand, forward 1 and backward 2: stage 0 waits from 2 to 4 for the first gradient."""
    result = simulate(pipeline("1f1b", 2, 2), UNIT)
    assert [span[1:2] + span[3:] for span in spans_of(result, "forward", "backward") if span[0] == 0] == [
        ("forward", 0.0, 1.0),
        ("forward", 1.0, 2.0),
        ("backward", 4.0, 6.0),
        ("backward", 7.0, 9.0),
    ]
    assert [span[1:2] + span[3:] for span in spans_of(result, "forward", "backward") if span[0] == 1] == [
        ("forward", 1.0, 2.0),
        ("backward", 2.0, 4.0),
        ("forward", 4.0, 5.0),
        ("backward", 5.0, 7.0),
    ]


@pytest.mark.parametrize("devices", [1, 2, 3, 6])
def test_layer_split_has_one_device_busy_at_a_time(devices):
    """With free links the step is as long as all compute together, and no two spans of compute overlap."""
    spec = Spec(mode="layer_split", devices=devices, model="gpt", dataset="synthetic")
    free = replace(machine("h100"), link_latency=0.0, link_chunk=0.0, link_rate=math.inf, call_overhead=0.0)
    plan = modes.plan(prepare(spec))
    # Loading the batch and the optimizer's step go on at once on all devices, and are no part of the chain.
    chain = [Program(tuple(op for op in p.ops if op.kind not in ("load", "optimizer"))) for p in plan.programs]
    result = simulate(replace(plan, programs=tuple(chain)), free)
    busy = sorted((start, end) for _, _, _, start, end in spans_of(result, "forward", "backward"))
    assert result.makespan == pytest.approx(sum(end - start for start, end in busy), rel=1e-12)
    assert all(one[1] <= two[0] + 1e-15 for one, two in itertools.pairwise(busy))


def test_no_pipeline_is_as_fast_as_its_layers_on_as_many_devices():
    """Negative control of the one above: with microbatches, devices do work at the same time."""
    result = simulate(pipeline("gpipe", 3, 6), UNIT)
    busy = sum(end - start for _, _, _, start, end in spans_of(result))
    assert busy == 3 * 6 * 3 > 2 * result.makespan


# Communication


def ring_all_reduce(num_ranks: int, num_items: int) -> list[int]:
    """Run the ring algorithm on real arrays; check that it sums; return the items that each rank sent."""
    draw = np.random.default_rng(0)
    data = draw.integers(100, size=(num_ranks, num_items))
    total, sent = data.sum(axis=0), [0] * num_ranks
    chunks = np.split(np.arange(num_items), num_ranks)
    for phase in ("reduce", "gather"):
        for turn in range(num_ranks - 1):
            moves = []
            for rank in range(num_ranks):
                chunk = chunks[(rank - turn + (phase == "gather")) % num_ranks]
                moves.append(((rank + 1) % num_ranks, chunk, data[rank, chunk].copy()))
                sent[rank] += len(chunk)
            for target, chunk, values in moves:
                data[target, chunk] = values + (data[target, chunk] if phase == "reduce" else 0)
    assert (data == total).all()
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_rank_sends_what_it_would_send_in_a_ring_all_reduce(ranks):
    """2 (n - 1) / n of the tensor, as a run of the algorithm itself counts."""
    items = 24 * 35
    plan = parse_plan(f"mesh dp={ranks}\nrole 0: ranks 0-{ranks - 1}\nall_reduce gradient dp bytes={4 * items}")
    result = simulate(plan, machine("h100"))
    assert [result.bytes_sent[0]] * ranks == [4 * sent for sent in ring_all_reduce(ranks, items)]
    assert result.bytes_sent[0] == pytest.approx(2 * (ranks - 1) / ranks * 4 * items)


def seconds_of(line: str, ranks: int, on: Machine) -> float:
    return simulate(parse_plan(f"mesh dp={ranks}\nrole 0: ranks 0-{ranks - 1}\n{line}"), on).makespan


FAST = replace(PLAIN, link_rate=50e9)


def test_100_mb_over_8_ranks_at_50_gb_a_second_take_3_50_ms():
    """2 x 7/8 x 100 MB / 50 GB/s."""
    assert seconds_of("all_reduce dp bytes=100000000", 8, FAST) == pytest.approx(3.5e-3, rel=1e-12)


def test_each_round_of_a_ring_costs_one_latency():
    """2 (8 - 1) rounds of 10 us come on top of 3.5 ms; twice the bytes take twice the time only without them."""
    late = replace(FAST, link_latency=10e-6)
    assert seconds_of("all_reduce dp bytes=100000000", 8, late) == pytest.approx(3.5e-3 + 14 * 10e-6, rel=1e-12)
    assert seconds_of("all_reduce dp bytes=200000000", 8, FAST) == pytest.approx(2 * 3.5e-3, rel=1e-12)
    assert seconds_of("all_reduce dp bytes=200000000", 8, late) < 2 * (3.5e-3 + 14 * 10e-6)


@pytest.mark.parametrize(
    ("kind", "rounds", "share"),
    [("all_reduce", 6, 6 / 4), ("reduce_scatter", 3, 3 / 4), ("all_gather", 3, 3), ("all_to_all", 3, 3 / 4)],
)
def test_collectives_cost_their_rounds_and_bytes(kind, rounds, share):
    """n = 4; bytes are what torch's call is given: for all_gather the shard, else the whole."""
    on = replace(FAST, link_latency=1e-5)
    assert seconds_of(f"{kind} dp bytes=4000000", 4, on) == pytest.approx(rounds * 1e-5 + share * 4e6 / 50e9)


def test_a_collective_of_one_rank_costs_nothing():
    assert seconds_of("all_reduce dp bytes=4000", 1, replace(FAST, link_latency=1.0)) == 0


def test_a_message_costs_a_latency_and_its_bytes():
    plan = parse_plan("mesh pp=2\nrole 0: ranks 0\nsend pp>1 bytes=8 async\nrole 1: ranks 1\nrecv pp<0 bytes=8")
    result = simulate(plan, replace(PLAIN, link_latency=0.5, link_rate=4.0))
    assert result.makespan == 2.5
    assert result.bytes_sent == [8, 0]


# Overlap. Seconds are FLOPs; an all-reduce over two ranks takes its bytes, 2 x 1/2 of them a byte a second.

DDP = """
mesh dp=2
role 0: ranks 0-1
backward s0 m0 fc2 flops=3
all_reduce gradient dp bucket0 bytes=4{}
backward s0 m0 fc1 flops=2
all_reduce gradient dp bucket1 bytes=2{}
optimizer flops=1
"""


def test_an_asynchronous_all_reduce_overlaps_backward_and_holds_up_the_optimizer_alone():
    result = simulate(parse_plan(DDP.replace("{}", " async")), PLAIN)
    assert [span[1:] for span in spans_of(result) if span[0] == 1] == [
        ("backward", "fc2", 0.0, 3.0),
        ("all_reduce", "bucket0", 3.0, 7.0),
        ("backward", "fc1", 3.0, 5.0),
        ("all_reduce", "bucket1", 7.0, 9.0),
        ("optimizer", "", 9.0, 10.0),
    ]


def test_a_synchronous_one_holds_up_everything():
    assert simulate(parse_plan(DDP.replace("{}", "")), PLAIN).makespan == 3 + 4 + 2 + 2 + 1


def test_a_collective_starts_when_its_last_member_is_ready():
    text = "mesh dp=2\nrole 0: ranks 0\nforward flops=5\nall_reduce dp bytes=1\nforward flops=1\n"
    text += "role 1: ranks 1\nforward flops=2\nall_reduce dp bytes=1\nforward flops=4"
    assert spans_of(simulate(parse_plan(text), PLAIN)) == [
        (0, "forward", "", 0.0, 5.0),
        (0, "all_reduce", "", 5.0, 6.0),
        (0, "forward", "", 6.0, 7.0),
        (1, "forward", "", 0.0, 2.0),
        (1, "all_reduce", "", 5.0, 6.0),
        (1, "forward", "", 6.0, 10.0),
    ]


def test_a_compute_op_waits_for_an_asynchronous_collective_of_its_own_part():
    """As with gathered weights: fc1 needs its own, not those of fc2, which come after it on the same lane."""
    gathers = "all_gather weights dp fc1 bytes=3 async\nall_gather weights dp fc2 bytes=4 async\n"
    text = f"mesh dp=2\nrole 0: ranks 0-1\n{gathers}forward fc1 flops=2\nforward fc2 flops=1\nforward fc3 flops=1"
    result = simulate(parse_plan(text), PLAIN)
    assert [span[1:] for span in spans_of(result, "forward") if span[0] == 0] == [
        ("forward", "fc1", 3.0, 5.0),
        ("forward", "fc2", 7.0, 8.0),
        ("forward", "fc3", 8.0, 9.0),
    ]


def test_a_receive_has_the_times_of_the_transfer_and_not_of_the_wait():
    """The message is there at 2; the receiver comes for it at 5 and goes on at once."""
    text = "mesh pp=2\nrole 0: ranks 0\nsend pp>1 bytes=2 async\nforward flops=1\n"
    result = simulate(parse_plan(text + "role 1: ranks 1\nforward flops=5\nrecv pp<0 bytes=2\nforward flops=1"), PLAIN)
    assert spans_of(result) == [
        (0, "send", "", 0.0, 2.0),
        (0, "forward", "", 0.0, 1.0),
        (1, "forward", "", 0.0, 5.0),
        (1, "recv", "", 0.0, 2.0),
        (1, "forward", "", 5.0, 6.0),
    ]


def test_a_link_carries_one_message_at_a_time_in_each_direction():
    text = "mesh pp=2\nrole 0: ranks 0\nsend pp>1 bytes=2 async\nsend pp>1 bytes=2 async\nrecv pp<1 bytes=3\n"
    text += "role 1: ranks 1\nsend pp>0 bytes=3 async\nrecv pp<0 bytes=2\nrecv pp<0 bytes=2"
    result = simulate(parse_plan(text), PLAIN)
    assert [span[3:] for span in spans_of(result, "send")] == [(0.0, 2.0), (2.0, 4.0), (0.0, 3.0)]


# Roles and ranks


def test_a_rank_that_sends_to_many_has_the_right_peers_and_lanes():
    """Ranks 1 to 3 share a program. Their peer is rank 0, on three different links."""
    text = "mesh dp=4\nrole 0: ranks 0\nrecv dp<1 bytes=1\nrecv dp<2 bytes=1\nrecv dp<3 bytes=1\n"
    result = simulate(parse_plan(text + "role 1: ranks 1-3\nsend dp>0 bytes=1 async"), PLAIN)
    ends = [(span.rank, span.peer, span.lane) for span in result.timeline.spans() if span.kind == "send"]
    assert ends == [(1, 0, "dp:1>0"), (2, 0, "dp:2>0"), (3, 0, "dp:3>0")]
    assert result.makespan == 1  # three links at once


def test_lists_by_role_are_told_by_rank():
    spec = Spec(mode="data_parallel", devices=4)
    result = simulate(modes.plan(prepare(spec)), machine("local"))
    assert len(result.peak_memory) == 2
    memory = result.per_rank(result.peak_memory)
    assert len(memory) == 4 and memory[1:] == [memory[1]] * 3


def test_a_thousand_ranks_of_one_role_cost_what_one_costs():
    """16,384 ranks in well under the time that a Python step for each pair of them would take."""
    text = "mesh dp=16384\nrole 0: ranks 0-16383\nbackward flops=2\nall_reduce dp bytes=16384\noptimizer flops=1"
    began = time.perf_counter()
    result = simulate(parse_plan(text), PLAIN)
    assert time.perf_counter() - began < 10
    assert len(result.timeline) == 3 * 16_384
    assert result.makespan == pytest.approx(2 + 2 * 16_383 + 1)
    assert np.array_equal(np.unique(result.timeline["rank"]), np.arange(16_384))


def test_peak_memory_is_all_that_stays_and_all_activations_of_a_batch():
    """Parameters, gradients, AdamW's two moments, DDP's buckets: each as large as the parameters."""
    result = simulate(modes.plan(prepare(Spec(mode="ddp", devices=4, optimizer="adamw"))), machine("h100"))
    parameters = 4 * 431_080
    # Bytes of one sample: the image and its class, then layer by layer; a rank has 16 of 64.
    kept = 4 * 28 * 28 + 8 + 80_640 + 22_400 + 2_000 + 40
    counters = 4 * 8  # AdamW counts its steps for each of 8 parameter tensors
    assert result.memory == [
        {
            "parameters": parameters,
            "gradients": parameters,
            "optimizer": 2 * parameters + counters,
            "activations": 16 * kept,
            "buffers": parameters,
        }
    ]
    assert result.peak_memory == [parameters * (1 + 1 + 2 + 1) + counters + 16 * kept]


def test_microbatches_may_have_any_number():
    """In-flight counts go by what is equal, not by how large it is."""
    ops = [Op(kind=kind, stage=0, microbatch=m, saved=3) for kind in ("forward", "backward") for m in (10**15, 7)]
    result = simulate(Plan(Mesh(), (Program(tuple(ops)),), (0,)), UNIT)
    assert (result.peak_in_flight, result.peak_memory) == ([2], [6])


def test_a_zero_bubble_backward_frees_its_activations_with_the_weights_half():
    kinds = ("forward", "backward_input", "forward", "backward_input", "backward_weight", "backward_weight")
    ops = [Op(kind=kind, stage=0, microbatch=i, saved=3) for kind, i in zip(kinds, (0, 0, 1, 1, 0, 1), strict=True)]
    result = simulate(Plan(Mesh(), (Program(tuple(ops)),), (0,)), UNIT)
    assert (result.peak_in_flight, result.peak_memory) == ([2], [6])
    assert result.makespan == 6


def test_activations_are_freed_once_though_a_backward_comes_in_two_ops():
    text = "mesh\nrole 0: ranks 0\nforward m0 saved=3\nforward m1 saved=5\nbackward m0\nbackward m0\nforward m2 saved=5"
    assert simulate(parse_plan(text), UNIT).peak_memory == [5 + 5]


def test_nothing_takes_no_time():
    result = simulate(Plan(Mesh(), (Program(()),), (0,)), UNIT)
    assert (result.makespan, len(result.timeline), result.peak_in_flight) == (0.0, 0, [0])


# Times that are none


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_an_op_takes_0_or_more_seconds_and_finitely_many(bad):
    graph = match(pipeline("gpipe", 2, 2))
    seconds = durations(graph, UNIT)
    seconds[3] = bad
    with pytest.raises(PlanError, match="0 or more seconds"):
        schedule(graph, seconds)


def test_a_span_ends_when_the_next_one_starts_where_nothing_waits():
    """Times are sums in the same order, so there is no gap of a rounding error for a figure to show."""
    ops = tuple(Op(kind="forward", stage=0, microbatch=0, part=str(i), flops=1) for i in range(1000))
    timeline = simulate(Plan(Mesh(), (Program(ops),), (0,)), replace(PLAIN, flop_rate=3e9)).timeline
    assert (timeline["end"][:-1] == timeline["start"][1:]).all()


# Ranks that share cores


@pytest.mark.parametrize(
    ("ranks", "cores", "seconds"),
    [(1, 2, 1.5), (2, 2, 3.0), (4, 2, 6.0), (8, 2, 12.0)],  # one rank has both cores, eight share them
)
def test_ranks_share_the_cores(ranks, cores, seconds):
    text = f"mesh dp={ranks}\nrole 0: ranks 0-{ranks - 1}\nforward flops=1\nbackward flops=2"
    assert simulate(parse_plan(text), replace(PLAIN, cores=cores)).makespan == pytest.approx(seconds)


def test_ranks_that_wait_for_each_other_need_one_core():
    """Four ranks in a row, one at a time: two cores are enough, and so is one."""
    text = "mesh pp=4\nrole 0: ranks 0\nforward flops=1\nsend pp>1 bytes=0 async\n"
    text += "role 1: ranks 1\nrecv pp<0 bytes=0\nforward flops=1\nsend pp>2 bytes=0 async\n"
    text += "role 2: ranks 2\nrecv pp<1 bytes=0\nforward flops=1\nsend pp>3 bytes=0 async\n"
    text += "role 3: ranks 3\nrecv pp<2 bytes=0\nforward flops=1"
    assert simulate(parse_plan(text), replace(PLAIN, cores=1)).makespan == pytest.approx(4)
