"""Plans of pipelines with several stages a rank: placement, FLOPs, messages, activations held."""

from __future__ import annotations

import pytest

from engine import modes, schedules
from engine.graph.matching import match
from engine.graph.notation import NotationError, format_plan, parse_plan
from engine.job import prepare
from engine.predict import predict
from engine.spec import Spec

SEVERAL = {"model": "mlp", "layers": 7, "hidden": 16, "global_batch": 48}


def test_stages_in_a_v_lie_as_in_the_paper_and_the_last_rank_hands_on_to_itself():
    """Four ranks, eight stages: rank 0 has 0 and 7, rank 3 has 3 and 4 (Qi et al. 2023, section 6)."""
    plan = modes.plan(prepare(Spec(mode="pipeline", schedule="zbv", devices=4, **SEVERAL)))
    assert [program.holds for program in plan.programs] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [program.stages for program in plan.programs] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    talks = [{(op.kind, op.stage, op.peer) for op in program.ops if op.axis} for program in plan.programs]
    assert not {talk for talk in talks[3] if talk[2] != 2}
    assert ("send", 3, 2) in talks[3]  # a gradient from stage 3 down to 2
    assert ("send", 4, 2) in talks[3]  # an activation from stage 4 on to 5


def test_stages_in_a_loop_go_round_the_ranks():
    plan = modes.plan(prepare(Spec(mode="pipeline", schedule="interleaved_1f1b", devices=4, **SEVERAL)))
    assert [program.holds for program in plan.programs] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert ("send", 3, 0) in {(op.kind, op.stage, op.peer) for op in plan.programs[3].ops}


@pytest.mark.parametrize("schedule", [name for name in schedules.TABLE if name != "dualpipe"])
def test_each_schedule_computes_as_many_flops_as_one_device(schedule):
    """And its two halves of a backward cost what the whole does, in a first stage all in the weights' half."""
    whole = modes.plan(prepare(Spec(mode="single", devices=1, **SEVERAL))).programs[0]
    plan = modes.plan(prepare(Spec(mode="pipeline", schedule=schedule, devices=2, **SEVERAL)))

    def flops(programs, *kinds):
        return sum(op.flops for program in programs for op in program.ops if op.kind in kinds)

    assert flops(plan.programs, "forward") == flops([whole], "forward")
    halves = ("backward", "backward_input", "backward_weight")
    assert flops(plan.programs, *halves) == flops([whole], "backward")
    first = [op for op in plan.programs[0].ops if op.kind == "backward_input" and op.stage == 0]
    assert all(op.flops == op.bytes == 0 for op in first)


def test_the_two_copies_of_dualpipe_give_each_other_their_gradients():
    job = prepare(Spec(mode="pipeline", schedule="dualpipe", devices=4, **SEVERAL))
    plan = modes.plan(job)
    parameters = sum(layer.param_bytes for layer in job.layers)
    assert sum(program.memory["parameters"] for program in plan.programs) == 2 * parameters
    exchanged = 0
    for rank, program in enumerate(plan.programs):
        last = program.ops[-5:]
        assert [op.kind for op in last] == ["send", "send", "recv", "recv", "optimizer"]
        assert {op.peer for op in last[:4]} == {3 - rank}
        exchanged += sum(op.bytes for op in last[:2])
    assert exchanged == 2 * parameters
    match(plan)  # both ends of every message are there


@pytest.mark.parametrize("schedule", schedules.TABLE)
def test_what_each_schedule_holds_at_most_is_what_its_paper_says(schedule):
    """Stages of a microbatch that are held at once on rank 0, of P = 4 ranks and M = 8 microbatches: the table in
    docs/decisions/schedules.md."""
    most = {
        "gpipe": 8, "1f1b": 4, "looped_bfs": 16, "interleaved_1f1b": 4 + 6 + 1, "interleaved_zero_bubble": 8,
        "zb_h2": 7, "zb_2p": 8, "zbv": 8, "dualpipev": 9, "dualpipe": 5,
    }  # fmt: skip
    plan = modes.plan(prepare(Spec(mode="pipeline", schedule=schedule, devices=4, microbatches=8, **SEVERAL)))
    held = highest = 0
    for op in plan.programs[0].ops:
        held += (op.kind == "forward") - (op.kind in ("backward", "backward_weight"))
        highest = max(highest, held)
    assert (highest, held) == (most[schedule], 0)


@pytest.mark.parametrize(
    ("schedule", "idle"),
    [
        ("gpipe", 9), ("1f1b", 9), ("looped_bfs", 9), ("interleaved_1f1b", 9), ("interleaved_zero_bubble", 3),
        ("zb_h2", 3), ("zb_2p", 3), ("zbv", 3), ("dualpipev", 6), ("dualpipe", 2),
    ],
)  # fmt: skip
def test_a_step_takes_its_work_and_the_idle_time_of_its_schedule(schedule, idle):
    """P = 4, M = 16, each pass and each half of a backward 1 s: the table in docs/decisions/schedules.md, whose orders
    have no messages. With them, which take no time here, it is the same."""
    spec = Spec(mode="pipeline", schedule=schedule, devices=4, microbatches=16, machine="unit", **SEVERAL)
    stages = (
        1 if schedule in ("gpipe", "1f1b", "zb_h2", "zb_2p", "dualpipe") else 2
    )  # that each microbatch sees on a rank
    assert predict(spec).step_time == 16 * 3 * stages + idle


def test_a_plan_with_several_stages_a_rank_comes_back_from_its_text():
    for schedule in ("zbv", "interleaved_1f1b", "dualpipe"):
        plan = modes.plan(prepare(Spec(mode="pipeline", schedule=schedule, devices=4, **SEVERAL)))
        assert parse_plan(format_plan(plan)) == plan
    with pytest.raises(NotationError, match="one stage for each of the 1 layers"):
        parse_plan("mesh pp=1\nrole 0: ranks 0 holds 0 stages 0,1\n")
