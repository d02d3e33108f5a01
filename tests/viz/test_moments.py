"""The moments of a lesson's steps: found in plans and in timelines, of every mode."""

from __future__ import annotations

import pytest

from engine import modes
from engine.asking.settings import MODE_MODELS
from engine.lessons import BACKWARD, FORWARD, PASSES, Step
from engine.plan import Op
from tests.viz.examples import all_reduce, compute, message, predicted
from viz.figures.moments import told
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.locales import LANGUAGES, text
from viz.locales.engine import lesson

CLASSIC = {
    "data": ["data split", "model replication", "data assignment", "independent computation", "gradient aggregation",
             "update"],
    "model": ["model split", "assignment to devices", "communication", "computation of each piece",
              "parameter synchronisation"],
    "pipeline": ["stage split", "data transfer", "pipelined execution", "merging of results"],
}  # fmt: skip
SETTINGS = {"single": {"devices": 1}, "hybrid": {"devices": 16, "pp": 2, "dp": 2, "fsdp": 2, "tp": 2}}
MODELS = {mode: models[0] for mode, models in MODE_MODELS.items()}  # of modes that do not take every model


def picture(mode: str, language: str = "en", **settings):
    settings = {"devices": 4, "model": MODELS.get(mode, "cnn")} | SETTINGS.get(mode, {}) | settings
    plan, layers, timeline = predicted(mode, **settings)
    return plan, picture_info(plan, layers, timeline, steps=lesson(language, mode).steps)


@pytest.mark.parametrize(
    "mode, technique", [("data_parallel", "data"), ("ddp", "data"), ("layer_split", "model"), ("pipeline", "pipeline")]
)
def test_the_classic_techniques_have_exactly_the_classic_steps(mode: str, technique: str):
    assert [step.title.lower() for step in modes.lesson(mode).steps] == CLASSIC[technique]


@pytest.mark.parametrize("mode", modes.MODES)
def test_every_step_points_at_ops_of_its_plan_and_every_op_is_told(mode: str):
    """A receive is told with its send."""
    plan, info = picture(mode)
    ranks = [list(program.ops) for program in plan.programs]
    found = {step.title: [step.indices(ops) for ops in ranks] for step in modes.lesson(mode).steps}
    assert [title for title, at in found.items() if not any(at)] == [
        step.title for step in modes.lesson(mode).steps if not step.kinds
    ]
    for rank, ops in enumerate(ranks):
        seen = {i for at in found.values() for i in at[rank]}
        assert [op for i, op in enumerate(ops) if i not in seen and op.kind != "recv"] == []
    for one in info.lesson:
        assert bool(one.moments) == bool(one.step.kinds), one.step.title


@pytest.mark.parametrize("attention", ["ring", "all_gather", "ulysses"])
def test_whichever_way_keys_and_values_go_every_op_of_context_parallelism_is_told(attention: str):
    plan, info = picture("context", attention=attention)
    assert all(one.moments for one in info.lesson[1:])
    for ops in (list(program.ops) for program in plan.programs):
        seen = {i for step in modes.lesson("context").steps for i in step.indices(ops)}
        assert {op.kind for i, op in enumerate(ops) if i not in seen} <= {"recv"}


@pytest.mark.parametrize("mode", ["ddp", "layer_split", "pipeline", "fsdp", "hsdp", "zero1", "tensor", "expert"])
def test_steps_begin_in_the_order_in_which_they_are_told(mode: str):
    _, info = picture(mode)
    begins = [one.moments[0].start for one in info.lesson if one.moments]
    assert begins == sorted(begins)


def test_the_lesson_of_data_parallel_says_that_pytorch_sends_the_data_before_the_weights():
    _, info = picture("data_parallel")
    begins = {one.step.title: one.moments[0].start for one in info.lesson}
    assert begins["Data split"] < begins["Data assignment"] < begins["Model replication"]
    assert begins["Independent computation"] < begins["Gradient aggregation"] < begins["Update"]


def test_gathers_of_forward_are_told_from_those_of_backward():
    """fully_shard on 2 ranks, one layer: gathered before forward, and again before backward, recomputed or not."""
    ops = [Op(kind=kind, part="a", payload=payload) for kind, payload in (
        ("all_gather", "weights"), ("forward", ""), ("all_gather", "weights"), ("recompute", ""), ("backward", ""),
        ("reduce_scatter", "gradient"))]  # fmt: skip
    first = Step("F", "", kinds=("all_gather", *FORWARD), before="forward")
    again = Step("B", "", kinds=("all_gather", *BACKWARD), payload="weights", before="backward")
    assert (first.indices(ops), again.indices(ops)) == ([0, 1], [2, 3, 4])
    assert Step("G", "", kinds=("all_gather", "reduce_scatter"), payload="gradient").indices(ops) == [5]
    assert Step("A", "", kinds=("all_gather",), axis="tp").indices(ops) == []
    assert Step("P", "", kinds=FORWARD, part="a").indices(ops) == [1]
    assert Step("P", "", kinds=FORWARD, part="b").indices(ops) == []


def test_a_pipeline_is_seen_best_when_all_its_stages_work():
    """1F1B, 4 stages, 8 microbatches, F = 1 s: from 3 s on the last stage works beside the first."""
    _, info = picture("pipeline", machine_name="unit", microbatches=8)
    transfer, execution, merging = (one.moments for one in info.lesson[1:])
    assert [(m.start, m.end, m.best) for m in execution] == [(0, 33, 3)]
    # Where messages take no time each is seen for a while: the first when stage 0 has done its first forward, at 1 s.
    assert (transfer[0].start, transfer[1].start) == (0, 1)
    assert transfer[1].end > 1
    assert merging[-1].end == 33


def test_a_collective_is_seen_best_when_its_last_member_has_joined():
    step = Step("Gradient aggregation", "", kinds=("all_reduce",), payload="gradient")
    (found,) = told([step], [all_reduce(0, 1, 9), all_reduce(1, 4, 9)], 0.1, 10)
    assert found.moments == ((1, 9, 4),)
    assert found.first.rank == 0


def test_what_follows_closely_is_one_moment_and_what_is_apart_is_not():
    spans = [compute("forward", 0, 0, 2), compute("backward", 0, 2.001, 4), compute("backward", 0, 6, 6)]
    (found,) = told([Step("C", "", kinds=PASSES)], spans, 0.5, 10)
    assert [(m.start, m.end) for m in found.moments] == [(0, 4), (6, 6.5)]


def test_a_step_that_the_timeline_lacks_has_no_moments():
    (found,) = told([Step("T", "", kinds=("send",))], [message("recv", 1, 0, 0, 2)], 0.5, 10)
    assert (found.moments, found.first) == ((), None)


@pytest.mark.parametrize(
    "wrong", [{"kinds": ("send", "typo")}, {"payload": "weight"}, {"axis": "x"}, {"before": "load"}]
)
def test_a_step_cannot_point_at_what_no_op_is(wrong: dict):
    with pytest.raises(ValueError, match="T: no op has"):
        Step("T", "", **wrong)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_player_is_given_the_steps_in_the_viewers_language(language: str):
    _, info = picture("ddp", language)
    steps = moving_picture(info, text(language))["lesson"]
    assert [step["title"] for step in steps] == [step.title for step in lesson(language, "ddp").steps]
    assert [step["earlier"] for step in steps] == [2, 1, 0, 0, 0, 0]
    assert [len(step["moments"]) > 0 for step in steps] == [False, False, True, True, True, True]
