"""An order that a person gives as CSV is checked, planned, simulated and run like a schedule by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import modes, schedules
from engine.__main__ import main
from engine.asking.rules import SpecError
from engine.job import prepare, prepare_real
from engine.plan import Op, Plan
from engine.predict import predict
from engine.schedules import csv_form, given, messages
from engine.schedules.messages import OrderError
from engine.spec import Spec
from tests.engine.proof import finished, holds

MLP = {"mode": "pipeline", "model": "mlp", "layers": 7, "hidden": 16, "global_batch": 48, "steps": 3, "device": "cpu"}
# Rank 0 has a stage before and a stage after that of rank 1; no schedule by name places them so.
SANDWICH = "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def csv_of(name: str, ranks: int, microbatches: int, stages: int, add=None) -> str:
    order = schedules.order(name, ranks, microbatches, stages)
    return csv_form.format_order(add(order, schedules.pipelines(name, ranks, stages)) if add else order)


def doing(plan: Plan) -> list[list[Op]]:
    """What every rank does. What it keeps meanwhile is another matter: torch has two classes of schedules."""
    return [[replace(op, saved=0) for op in plan.program(rank).ops] for rank in range(plan.world_size)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_a_schedule_written_to_a_file_is_planned_as_by_name(name):
    stages = schedules.TABLE[name].stages_per_rank or 2
    by_name = prepare(Spec(schedule=name, devices=2, microbatches=4, **MLP))
    by_file = prepare(Spec(schedule_file=csv_of(name, 2, 4, stages), devices=2, **MLP))
    assert (by_file.spec.microbatches, by_file.spec.stages_per_rank, by_file.spec.schedule) == (4, stages, None)
    assert doing(modes.plan(by_file)) == doing(modes.plan(by_name))
    assert prepare(by_file.spec) == by_file


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv", "dualpipev"])
def test_a_file_is_the_order_of_each_pipeline_of_a_mesh(name):
    """As of the schedule by name; with messages in the file too, gathers, passes and messages each in their order."""
    mesh = MLP | {"mode": "hybrid", "devices": 4, "pp": 2, "fsdp": 2}
    by_name = doing(modes.plan(prepare(Spec(schedule=name, microbatches=4, **mesh))))
    alone, given_all = (
        doing(modes.plan(prepare(Spec(schedule_file=csv_of(name, 2, 4, 2, add), **mesh))))
        for add in (None, messages.add_late)
    )
    assert alone == by_name
    for ours, theirs in zip(given_all, by_name, strict=True):
        for axis in ("", "pp", "fsdp"):
            assert [op for op in ours if op.axis == axis] == [op for op in theirs if op.axis == axis] != []


@pytest.mark.parametrize(
    ("settings", "code", "setting", "works"),
    [
        ({"fsdp": 4}, "needs_axis", "schedule_file", ()),
        ({"pp": 4}, "of_schedule_file", "pp", ()),  # 2, and then another degree is 2
        ({"pp": 2, "dp": 2, "global_batch": 6}, "batch_of_schedule_file", "global_batch", (4, 8)),
        ({"pp": 2, "dp": 2, "schedule": "1f1b"}, "exclusive", "schedule", ()),
    ],
)
def test_what_a_mesh_must_be_for_a_file(settings, code, setting, works):
    asked = MLP | {"mode": "hybrid", "devices": 4} | settings
    with pytest.raises(SpecError) as refused:
        prepare(Spec(schedule_file=SANDWICH, **asked))
    assert (refused.value.code, refused.value.setting, refused.value.suggest) == (code, setting, works)


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"fsdp": 2}, SANDWICH),
        ({"fsdp": 2}, csv_of("1f1b", 2, 4, 1, messages.add_early)),  # with messages, among which stages are gathered
        ({"dp": 2}, csv_of("zbv", 2, 4, 2, messages.add_early)),
        ({"tp": 2}, csv_of("dualpipev", 2, 4, 2)),
    ],
    ids=["sandwich", "1f1b", "zbv", "dualpipev"],
)
def test_an_order_from_a_file_is_run_in_a_mesh_as_planned(degrees, text, launcher, runs_dir):
    holds(
        finished(
            Spec(schedule_file=text, **(MLP | {"mode": "hybrid", "devices": 4, "pp": 2} | degrees)), launcher, runs_dir
        )
    )


@pytest.mark.real
@pytest.mark.parametrize(
    ("text", "stages_per_rank"),
    [
        (SANDWICH, None),
        (csv_of("dualpipev", 2, 4, 2), 2),  # forwards and backwards that run as one
        (csv_of("zbv", 2, 4, 2, messages.add_early), 2),  # with messages, as torch has them
        (csv_of("interleaved_1f1b", 2, 4, 2, messages.add_late), 2),  # with messages that would block on GPUs
    ],
)
def test_an_order_from_a_file_is_run_by_torch_and_does_what_was_planned(text, stages_per_rank, launcher, runs_dir):
    result = finished(Spec(schedule_file=text, devices=2, **MLP), launcher, runs_dir)
    holds(result)
    assert (result["spec"]["stages_per_rank"], result["spec"]["schedule"]) == (stages_per_rank, None)


def test_sends_that_wait_for_their_receive_block_an_order_that_buffered_ones_let_through(monkeypatch):
    """The two ranks of pytorch#172668: each sends first what the other takes second."""
    late = csv_of("interleaved_1f1b", 2, 4, 2, messages.add_late)
    stuck = given.blocked(late)
    assert stuck.startswith("these ranks wait for each other: 0 -> 1 -> 0\n")
    assert stuck.count(">") == 4  # two in the sentence, and an arrow in the row of each rank
    assert given.blocked(csv_of("interleaved_1f1b", 2, 4, 2, messages.add_early)) is None
    spec = Spec(schedule_file=late, devices=2, **MLP)
    assert predict(spec).summary()["blocked_on_gpus"] == stuck
    prepare_real(spec)
    monkeypatch.setattr("engine.job.count_gpus", lambda: 2)
    with pytest.raises(SpecError) as refused:
        prepare_real(spec.with_(device="auto"))
    assert refused.value.code == "blocked_on_gpus" and refused.value.picture in stuck


def test_a_receive_that_stands_early_holds_up_its_rank():
    """P = 8, V = 2, M = 16 (pytorch#188833): the same order with its receives early takes 246, late 117."""
    spec = Spec(mode="pipeline", model="mlp", layers=15, devices=8, machine="unit")
    times = [
        predict(spec.with_(schedule_file=csv_of("interleaved_1f1b", 8, 16, 2, add))).step_time
        for add in (None, messages.add_late, messages.add_early)
    ]
    assert times == [117.0, 117.0, 246.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "wait for each other"),
        ("0F0,0B0\n1F0,oops\n", "row 2, column 2"),
        ("0F0,0F1\n1F0,1F1\n", "no backward"),
        ("0F0,0B0\n1F1,1B1\n", "2 pipelines"),
        # Messages that are written down: one without its other end, two in another order, a need that nobody sends.
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", "without its other end"),
        (
            "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
            "one message for another",
        ),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", "wait for each other, or for what never comes"),
    ],
)
def test_an_order_that_cannot_come_to_its_end_is_refused_before_anything_starts(text, reason):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(schedule_file=text, devices=2, **MLP))
    assert refused.value.code == "bad_schedule_file"
    assert reason in str(refused.value)
    assert refused.value.picture.count(">") >= 1 or "backward" in reason or "pipelines" in reason


def test_what_only_sharded_stages_do_changes_nothing():
    """Files of torch's have it, also for stages that are not sharded."""
    full = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n1F0,1B0,1REDUCE_GRAD\n"
    assert given.read(full) == given.read("0F0,0B0\n1F0,1B0\n")


def test_check_finds_nothing_wrong_with_any_schedule_by_name():
    for name, shape in schedules.TABLE.items():
        if name != "dualpipe":  # two pipelines
            for ranks, microbatches in ((1, 4), (2, 4), (4, 8)):
                text = csv_of(name, ranks, microbatches, shape.stages_per_rank or 2)
                assert given.read(text).num_microbatches == microbatches
                for add in (messages.add_early, messages.add_late):
                    given.check(add(given.read(text).order, given.read(text).pipelines))


def test_check_is_not_content_with_everything():
    """Its negative control: any one message taken out of an order is missed."""
    order = messages.add_early(schedules.order("zbv", 2, 4, 2), schedules.pipelines("zbv", 2, 2))
    for rank, actions in enumerate(order):
        for place, action in enumerate(actions):
            if "_" in action.kind and not action.kind.startswith("backward"):
                broken = [list(row) for row in order]
                del broken[rank][place]
                with pytest.raises(OrderError):
                    given.check(broken)


def test_on_the_command_line_it_is_a_file_which_says_how_many_devices(tmp_path, capsys):
    path = tmp_path / "order.csv"
    path.write_text(SANDWICH)
    words = ["simulate", "--mode", "pipeline", "--model", "mlp", "--machine", "unit", "--schedule-file"]
    assert main([*words, str(path)]) == 0
    assert "on 2 devices" in capsys.readouterr().out
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert main([*words, str(path)]) == 2
    first, *picture = capsys.readouterr().err.splitlines()
    assert first.startswith("error: The order in schedule-file cannot be run: these ranks wait for each other")
    assert [line.split()[:2] for line in picture] == [["rank", "0"], ["rank", "1"]]
    assert main([*words, str(tmp_path / "no.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
