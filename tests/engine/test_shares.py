"""Shares of a step's time are those of closed forms and of intervals measured with a ruler; nothing is ever NaN."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from engine import modes
from engine.analysis.shares import (
    BUBBLE_FORMULA,
    BUBBLE_OVER_IDEAL_FORMULA,
    EXPOSED_FORMULA,
    bubble_fraction,
    bubble_over_ideal,
    exposed_communication_fraction,
    overlap_fraction,
    shares,
)
from engine.cost.machine import machine
from engine.job import prepare
from engine.predict import predict
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Span, Timeline


def timeline_of(*rows, world_size: int = 1) -> Timeline:
    """Rows are (rank, kind, step, start, end); compute has one lane, all else another."""
    computes = ("forward", "backward", "optimizer", "load")
    spans = [Span(rank, "compute" if kind in computes else "dp", kind, *times) for rank, kind, *times in rows]
    return Timeline.of(spans, "measured", world_size)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 2), (2, 16), (4, 4), (4, 8), (6, 32)])
def test_a_pipelines_bubble_is_what_its_paper_says(name, stages, microbatches):
    """(P - 1) / (M + P - 1) of the time (Huang et al. 2019), or (P - 1) / M of the ideal (Narayanan et al. 2021)."""
    spec = Spec(mode="pipeline", devices=stages, model="gpt", schedule=name, microbatches=microbatches)
    timeline = simulate(modes.plan(prepare(spec)), machine("unit")).timeline
    assert bubble_fraction(timeline) == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
    assert bubble_over_ideal(timeline) == pytest.approx((stages - 1) / microbatches, abs=1e-12)
    assert exposed_communication_fraction(timeline) == 0.0


def test_layer_split_leaves_all_but_one_device_idle():
    timeline = simulate(modes.plan(prepare(Spec(mode="layer_split", devices=4))), machine("unit")).timeline
    assert bubble_fraction(timeline) == pytest.approx(3 / 4)


def test_ddp_on_free_links_is_never_idle():
    timeline = simulate(modes.plan(prepare(Spec(mode="ddp", devices=4))), machine("unit")).timeline
    assert bubble_fraction(timeline) == pytest.approx(0, abs=1e-12)
    assert bubble_over_ideal(timeline) == pytest.approx(0, abs=1e-12)


# Two ranks, 10 s. Rank 0 computes 0-4 and 6-8, communicates 3-7: 4-6 is exposed. Rank 1 computes 0-5, communicates
# 4-6 and 5-10, which overlap: 5-10 is exposed.
BY_HAND = (
    (0, "forward", 0, 0.0, 4.0),
    (0, "backward", 0, 6.0, 8.0),
    (0, "all_reduce", 0, 3.0, 7.0),
    (1, "forward", 0, 0.0, 5.0),
    (1, "send", 0, 4.0, 6.0),
    (1, "recv", 0, 5.0, 10.0),
)


def test_shares_are_read_off_a_timeline():
    timeline = timeline_of(*BY_HAND, world_size=2)
    assert bubble_fraction(timeline) == pytest.approx((4 + 5) / (2 * 10))
    assert bubble_over_ideal(timeline) == pytest.approx((4 + 5) / (6 + 5))
    assert exposed_communication_fraction(timeline) == pytest.approx((2 + 5) / (2 * 10))
    assert overlap_fraction(timeline) == pytest.approx(1 - (2 + 5) / ((7 - 3) + (10 - 4)))
    (step,) = shares(timeline)
    assert (step.makespan, step.computing.tolist(), step.exposed.tolist()) == (10, [6, 5], [2, 5])


def test_the_order_of_spans_and_where_time_begins_make_no_difference():
    draw = random.Random(0)
    first = timeline_of(*BY_HAND, world_size=2)
    for _ in range(20):
        rows = [(*row[:3], row[3] + 100, row[4] + 100) for row in BY_HAND]
        draw.shuffle(rows)
        moved = timeline_of(*rows, world_size=2)
        assert bubble_fraction(moved) == pytest.approx(bubble_fraction(first))
        assert exposed_communication_fraction(moved) == pytest.approx(exposed_communication_fraction(first))


def test_a_span_within_another_counts_once():
    """0-10 covers 2-3 and 4-5, and a rule that looked only at the span before would see a hole from 5 on."""
    timeline = timeline_of(*((0, "forward", 0, a, b) for a, b in ((0, 10), (2, 3), (4, 5), (9, 12))))
    assert bubble_fraction(timeline) == 0.0


def test_random_spans_are_shared_out_as_on_a_ruler_marked_in_units():
    """Whole-numbered times: each unit of a step is looked at by itself."""
    draw = random.Random(1)
    for _ in range(60):
        rows = []
        for _ in range(draw.randint(1, 30)):
            step = draw.randrange(2)
            start = draw.randint(0, 20) + 100 * step
            kind = draw.choice(("forward", "optimizer", "all_reduce", "send"))
            rows.append((draw.randrange(3), kind, step, float(start), float(start + draw.randint(0, 6))))
        timeline = timeline_of(*rows, world_size=3)
        for step in shares(timeline):
            mine = [row for row in rows if row[2] == step.step]
            first, last = min(row[3] for row in mine), max(row[4] for row in mine)
            assert step.makespan == last - first
            for rank in range(3):
                computing = exposed = 0
                for unit in range(int(first), int(last)):
                    kinds = {row[1] for row in mine if row[0] == rank and row[3] <= unit < row[4]}
                    computing += bool(kinds & {"forward", "optimizer"})
                    exposed += bool(kinds) and not kinds & {"forward", "optimizer"}
                assert (step.computing[rank], step.exposed[rank]) == (computing, exposed)


def test_a_rank_without_spans_is_idle():
    timeline = timeline_of((0, "forward", 0, 0.0, 4.0), world_size=4)
    assert bubble_fraction(timeline) == 0.75


# Several steps: 2 of 8 s idle, then 6 of 8, then 4 of 8, each with a pause before it that belongs to no step.
STEPS = [(0, "forward", step, 20.0 * step, 20.0 * step + busy) for step, busy in enumerate((6, 2, 4))]
STEPS += [(0, "send", step, 20.0 * step + 1, 20.0 * step + 8) for step in range(3)]


def test_of_several_steps_the_median_counts_and_pauses_between_them_do_not():
    timeline = timeline_of(*STEPS)
    assert bubble_fraction(timeline) == 0.5
    assert [1 - step.computing.sum() / step.makespan for step in shares(timeline)] == [0.25, 0.75, 0.5]
    assert exposed_communication_fraction(timeline) == 0.5


def test_first_steps_can_be_left_out():
    timeline = timeline_of(*STEPS)
    assert bubble_fraction(timeline, since=1) == pytest.approx((0.75 + 0.5) / 2)
    assert bubble_over_ideal(timeline, since=2) == 1.0
    assert [step.step for step in shares(timeline, since=1)] == [1, 2]


@pytest.mark.parametrize(
    "timeline",
    [
        timeline_of(world_size=0),
        timeline_of(world_size=2),
        timeline_of((0, "forward", 0, 1.0, 1.0), world_size=2),
        timeline_of((0, "send", 0, 1.0, 1.0), (1, "load", 0, 1.0, 1.0), world_size=2),
    ],
    ids=["no ranks", "no spans", "no time", "nobody takes time"],
)
def test_where_no_time_passes_all_shares_are_0(timeline):
    assert bubble_fraction(timeline) == bubble_over_ideal(timeline) == exposed_communication_fraction(timeline) == 0.0
    assert bubble_fraction(timeline, since=5) == 0.0


def test_where_nobody_communicates_there_is_nothing_to_hide():
    assert overlap_fraction(timeline_of((0, "forward", 0, 0.0, 3.0))) is None
    # All of it under compute, none of it, and a step with and one without.
    hidden = ((0, "forward", 0, 0.0, 3.0), (0, "send", 0, 1.0, 2.0))
    assert overlap_fraction(timeline_of(*hidden)) == 1.0
    assert overlap_fraction(timeline_of((0, "send", 0, 0.0, 3.0))) == 0.0
    assert overlap_fraction(timeline_of(*hidden, (0, "forward", 1, 5.0, 6.0))) == 1.0


def test_rounding_takes_no_fraction_out_of_its_range():
    """Ranks in turns: nothing of what is sent is hidden, and somebody is always at work. Sums of spans at odd moments
    come to a little more or less than all of it."""
    draw, measures = random.Random(0), (overlap_fraction, exposed_communication_fraction, bubble_fraction)
    for _ in range(500):
        ends = sorted(draw.uniform(0, 7) for _ in range(draw.randint(4, 40)))
        kinds = draw.choice([("forward", "all_reduce"), ("all_reduce",)])
        rows = [(rank, kinds[i % len(kinds)], 0, *span) for rank in range(3) for i, span in enumerate(pairwise(ends))]
        timeline = timeline_of(*rows, world_size=3)
        found = [measure(timeline) for measure in measures]
        assert all(0 <= value <= 1 for value in found), found
        assert found[0] == pytest.approx(0, abs=1e-12)
        free = [(rank, kind, 0, *(span if kind == "forward" else span[:1] * 2)) for rank, kind, _, *span in rows]
        timeline = timeline_of(*free, world_size=3)  # what takes no time hides nothing and shows nothing
        assert (overlap_fraction(timeline), exposed_communication_fraction(timeline)) == (None, 0.0)


def test_a_step_of_communication_alone_has_no_ideal_to_compare_with():
    timeline = timeline_of((0, "send", 0, 0.0, 3.0))
    assert bubble_fraction(timeline) == exposed_communication_fraction(timeline) == 1.0
    assert bubble_over_ideal(timeline) == 0.0


@pytest.mark.parametrize("times", [(0.0, math.nan), (math.inf, math.inf), (3.0, 2.0), (-math.inf, 0.0)])
@pytest.mark.parametrize("measure", [bubble_fraction, exposed_communication_fraction, overlap_fraction])
def test_times_that_are_none_are_refused_rather_than_averaged(measure, times):
    with pytest.raises(ValueError, match="starts at a finite time and ends no earlier"):
        measure(timeline_of((0, "forward", 0, 0.0, 4.0), (0, "send", 0, *times)))


def test_exposed_communication_grows_as_links_get_slower_and_is_none_on_free_ones():
    plan = modes.plan(prepare(Spec(mode="ddp", devices=8)))
    base = replace(machine("h100"), call_overhead=0.0, link_chunk=0.0)
    fractions = [
        exposed_communication_fraction(simulate(plan, replace(base, link_latency=0.0, link_rate=rate)).timeline)
        for rate in (math.inf, 1e12, 1e10, 1e8)
    ]
    assert fractions[0] == 0.0
    assert fractions == sorted(fractions) and fractions[-1] > 0.9


def test_formulas_name_what_is_divided_by_what():
    assert BUBBLE_FORMULA == "bubble fraction = idle compute time / (ranks × makespan)"
    assert "idle compute time / busy compute time" in BUBBLE_OVER_IDEAL_FORMULA
    assert "(ranks × makespan)" in EXPOSED_FORMULA


@pytest.mark.parametrize(
    "spec",
    [
        Spec(mode="fsdp", devices=4, model="cnn", machine="h100"),  # the last shard is smaller than the three others
        Spec(mode="pipeline", devices=4, model="gpt", microbatches=8, machine="h100"),
        Spec(mode="ddp", devices=6, model="mlp", global_batch=66, machine="h100", slow_rank="5:3"),
        Spec(mode="hybrid", devices=12, model="gpt", pp=2, dp=6, machine="h100", slow_rank="7:2", global_batch=48),
    ],
    ids=["uneven shards", "stages", "a slow replica", "a slow rank of a mesh"],
)
def test_a_rank_that_stands_for_others_counts_as_often_as_they_would(spec):
    simulation = predict(spec).simulation
    short, whole = simulation.by_role, simulation.timeline
    assert len(short) < len(whole) or spec.mode == "pipeline"
    for measure in (bubble_fraction, bubble_over_ideal, exposed_communication_fraction, overlap_fraction):
        assert measure(short) == pytest.approx(measure(whole), rel=1e-12)
