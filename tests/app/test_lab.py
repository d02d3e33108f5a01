"""The lab without a browser: what is shown for which settings, links, errors in place, languages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

import engine
from engine import modes
from engine.asking.rules import RULES, SpecError
from engine.cli.doctor_table import calibrated
from engine.cost import calibration
from engine.cost.calibration import SHIPPED, VARIABLE, load, store, this_machine
from engine.job import prepare
from engine.scale_model.pictured import at_scale
from engine.spec import Spec
from tests.app.reading import keys, numbers, query, words
from viz.figures.words import show_bytes, show_seconds

Lab = Callable[..., AppTest]


# --- settings -------------------------------------------------------------------------------------------------------


def test_the_first_page_shows_the_prediction_of_the_default_settings(lab: Lab):
    app = lab()
    summary = engine.simulate(Spec()).summary()
    assert not app.exception
    assert numbers(app)["Predicted step"] == show_seconds(summary["step_time"])
    assert numbers(app)["Bytes sent"] == show_bytes(sum(summary["bytes_sent"]))
    assert numbers(app)["Peak memory"] == show_bytes(max(summary["peak_memory"]))
    assert query(app) == {}
    assert "python -m engine calibrate" in words(app)  # what is predicted with is another machine's


def test_where_ranks_seldom_meet_the_mean_step_is_told_beside_the_one_that_is_shown(lab: Lab):
    summary = engine.simulate(Spec(mode="local_sgd", devices=4)).summary()
    shown = numbers(lab("mode=local_sgd&devices=4"))
    assert (shown["Predicted step"], shown["Mean step"]) == (
        show_seconds(summary["step_time"]), show_seconds(summary["mean_step_time"]),
    )  # fmt: skip
    assert "Mean step" not in numbers(lab("mode=ddp&devices=4"))


def test_nothing_is_said_of_calibrations_where_another_machine_is_predicted(lab: Lab):
    assert "python -m engine calibrate" not in words(lab("machine=h100"))


@pytest.mark.parametrize("disturbed", [0.0, 0.6])
def test_a_calibration_that_others_disturbed_is_told(lab: Lab, monkeypatch, tmp_path, disturbed: float):
    here = this_machine()
    made = replace(load(SHIPPED), identity=here, made=time.time(), disturbed=disturbed * here.cores)
    store(made, tmp_path / "calibration.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "calibration.json"))
    told = f"other programs kept {disturbed * here.cores:.1f} of {here.cores} cores busy"
    assert (told in words(lab())) == (disturbed > 0)
    assert (told in calibrated(calibration.told())) == (disturbed > 0)


@pytest.mark.parametrize(
    "link, shown, hidden",
    [
        ("mode=single&devices=1", set(), {"devices", "bucket-mb", "microbatches", "schedule", "split"}),
        ("mode=data_parallel", {"devices"}, {"bucket-mb", "microbatches", "schedule", "split"}),
        ("mode=ddp", {"devices", "bucket-mb"}, {"microbatches", "schedule", "split"}),
        ("mode=zero1", {"devices", "bucket-mb"}, {"dp", "fsdp", "split"}),
        ("mode=fsdp", {"devices"}, {"dp", "fsdp", "bucket-mb", "microbatches", "schedule", "split"}),
        ("mode=hsdp&devices=4", {"devices", "dp", "fsdp"}, {"bucket-mb", "microbatches", "schedule", "split"}),
        ("mode=layer_split", {"devices", "split"}, {"bucket-mb", "microbatches", "schedule"}),
        ("mode=pipeline", {"devices", "split", "microbatches", "schedule"}, {"bucket-mb", "stages-per-rank"}),
        ("mode=pipeline&schedule=looped_bfs", {"stages-per-rank"}, {"bucket-mb"}),
        ("mode=tensor", {"devices"}, {"bucket-mb", "microbatches", "schedule", "split"}),
        ("mode=ddp&compress=fp16", {"compress"}, {"compress-rank", "sync-every-microstep"}),
        ("mode=ddp&compress=powersgd", {"compress", "compress-rank"}, set()),
        ("mode=ddp&accumulate=2", {"accumulate", "sync-every-microstep"}, {"compress-rank"}),
        ("mode=hybrid&devices=4", {"dp", "fsdp", "tp", "pp"}, {"microbatches", "schedule", "attention", "ep", "cp"}),
        ("mode=hybrid&devices=4&model=gpt", {"dp", "fsdp", "tp", "pp", "cp"}, {"ep"}),
        ("mode=hybrid&devices=4&model=moe", {"dp", "fsdp", "cp", "tp", "pp", "ep"}, {"sync-every"}),
        ("mode=hybrid&devices=4&pp=2&fsdp=2", {"microbatches", "schedule", "split"}, {"attention", "balance"}),
        ("mode=hybrid&devices=4&model=gpt&cp=2&fsdp=2", {"attention", "balance"}, {"microbatches", "schedule"}),
        ("model=mlp", {"layers", "hidden"}, {"heads", "context"}),
        ("model=gpt", {"layers", "hidden", "heads", "context"}, {"experts", "top-k"}),
        ("mode=expert&model=moe", {"devices", "bucket-mb", "experts", "top-k", "context"}, {"ep", "split"}),
    ],
)
def test_only_settings_that_apply_are_shown(lab: Lab, link: str, shown: set[str], hidden: set[str]):
    app = lab(link)
    assert not app.error
    assert keys(app) >= shown | {"mode", "model", "dataset", "global-batch", "steps", "lr", "machine", "device"}
    assert not keys(app) & hidden


def test_a_scale_model_is_never_shown_without_its_factor(lab: Lab):
    link = "mode=pipeline&devices=4&model=llama3_8b&microbatches=8"
    assert "dilation" not in keys(lab(link)) and "Scale model" not in words(lab(link))
    app = lab(f"{link}&paced=h100")
    assert not app.error and not app.exception
    assert {"paced", "dilation"} <= keys(app) and "machine" not in keys(app)
    predicted = engine.simulate(Spec.from_params(query(app)))
    assert f"Scale model {predicted.scale_model['ratio']} of NVIDIA H100" in words(app)
    assert numbers(app)["Predicted step"] == show_seconds(predicted.step_time)
    assert not app.button(key="run").disabled  # the model itself could not be run here
    assert predicted.job.spec == at_scale(prepare(Spec.from_params(query(app)))).spec  # so a run is known by its link


@pytest.mark.parametrize("mode", modes.MODES)
def test_each_mode_tells_its_lesson_in_order(lab: Lab, mode: str):
    app, lesson = lab(f"mode={mode}{'&devices=1' if mode == 'single' else ''}"), modes.lesson(mode)
    assert not app.error
    said = words(app)
    steps = [f"**{step.title}.** {step.text}" for step in lesson.steps]
    places = [said.index(sentence) for sentence in (lesson.title, *steps, lesson.use, lesson.limits)]
    assert places == sorted(places)
    assert lesson.idea in said


def test_changing_a_setting_changes_the_prediction_and_the_link(lab: Lab):
    app = lab("machine=unit&mode=pipeline&microbatches=4")
    app.number_input(key="set-devices").set_value(4).run()
    # GPipe and 1F1B: (M + P - 1) slots of one forward (1 s) and one backward (2 s).
    assert numbers(app)["Predicted step"] == "21 s"
    assert query(app) == {"machine": "unit", "mode": "pipeline", "microbatches": "4", "devices": "4"}


def test_a_link_reproduces_the_settings(lab: Lab):
    app = lab("mode=pipeline&devices=3&microbatches=16&schedule=gpipe&split=2,1,1&lr=0.1&record=false")
    assert app.radio(key="set-mode").value == "pipeline"
    assert app.number_input(key="set-devices").value == 3
    assert app.number_input(key="set-microbatches").value == 16
    assert app.selectbox(key="set-schedule").value == "gpipe"
    assert app.text_input(key="set-split").value == "2,1,1"
    assert app.number_input(key="set-lr").value == 0.1
    assert app.toggle(key="set-record").value is False


def test_stages_per_device_can_be_set_where_the_schedule_leaves_them_open(lab: Lab):
    app = lab("mode=pipeline&model=mlp&layers=7&schedule=interleaved_1f1b&machine=unit")
    assert app.number_input(key="set-stages-per-rank").value == 2
    app.number_input(key="set-stages-per-rank").set_value(4).run()
    assert not app.error
    assert query(app)["stages-per-rank"] == "4"
    # Another schedule has its own number: this one is put aside, and comes back.
    app.selectbox(key="set-schedule").set_value("zbv").run()
    assert not app.error and "stages-per-rank" not in keys(app) | query(app).keys()
    app.selectbox(key="set-schedule").set_value("looped_bfs").run()
    assert query(app)["stages-per-rank"] == "4"


def test_a_schedule_that_pytorch_lacks_is_predicted_and_the_button_says_why_it_cannot_run(lab: Lab):
    app = lab("mode=pipeline&schedule=zb_h2&machine=unit&microbatches=8")
    assert numbers(app)["Predicted step"] == "25 s"  # M(F+I+W) + (P-1)F, all 1 s
    assert app.button(key="run").disabled
    assert "PyTorch has no schedule zb_h2" in app.button(key="run").help


def test_an_order_as_csv_takes_the_place_of_a_schedule_and_is_explained_where_it_is_wrong(lab: Lab):
    app = lab("mode=pipeline&schedule=gpipe&machine=unit")
    app.text_area(key="set-schedule-file").set_value("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1").run()
    assert not app.error and "set-schedule" not in keys(app)
    assert app.number_input(key="set-microbatches").value == 2
    assert numbers(app)["Predicted step"] == "9 s"  # 2 x 3 s of work, 3 s to fill and drain
    app.text_area(key="set-schedule-file").set_value("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0").run()
    assert "these ranks wait for each other" in app.error[0].value
    assert "> 1F1" in app.code[0].value
    app.text_area(key="set-schedule-file").set_value("").run()
    assert app.selectbox(key="set-schedule").value == "gpipe"


def test_a_setting_that_returns_to_its_default_leaves_the_link(lab: Lab):
    app = lab("devices=4")
    app.number_input(key="set-devices").set_value(2).run()
    assert query(app) == {}


def test_what_another_mode_does_not_know_comes_back_with_the_mode_that_does(lab: Lab):
    app = lab("mode=pipeline&devices=4&schedule=gpipe")
    app.radio(key="set-mode").set_value("single").run()
    assert not app.error
    assert query(app) == {"mode": "single", "devices": "1"}
    app.radio(key="set-mode").set_value("pipeline").run()
    assert query(app) == {"mode": "pipeline", "devices": "4", "schedule": "gpipe"}


def test_a_mesh_of_two_axes_begins_with_devices_for_both_and_gives_back_those_that_were_chosen(lab: Lab):
    """On two devices a hybrid would be FSDP, and look like it."""
    app = lab("devices=3&global-batch=48")
    for mode, devices in {"hsdp": "4", "single": "1", "hybrid": "4", "fsdp": "3"}.items():
        app.radio(key="set-mode").set_value(mode).run()
        assert not app.error
        assert query(app) == {"mode": mode, "devices": devices, "global-batch": "48"}
    app.number_input(key="set-devices").set_value(8).run()
    for mode in ("hsdp", "ddp"):  # as many as there are, where that is enough
        app.radio(key="set-mode").set_value(mode).run()
        assert query(app)["devices"] == "8"
    assert query(lab("mode=hsdp")) == {"mode": "hsdp"}  # a link means what it says, two devices


def test_a_mode_that_does_not_take_the_model_brings_one_that_it_takes(lab: Lab):
    app = lab("model=mlp&hidden=64")
    for mode, model in {"context": "gpt", "expert": "moe", "sequence": "gpt", "ddp": "mlp"}.items():
        app.radio(key="set-mode").set_value(mode).run()
        assert not app.error
        assert (app.selectbox(key="set-model").value, query(app).get("mode", "ddp")) == (model, mode)
    assert query(app) == {"model": "mlp", "hidden": "64"}
    app.radio(key="set-mode").set_value("expert").run()
    assert query(app) == {"mode": "expert", "hidden": "64"}
    # A model that is chosen there is meant.
    app.radio(key="set-mode").set_value("context").run()
    app.selectbox(key="set-model").set_value("cnn").run()
    assert len(app.error) == 1
    app.radio(key="set-mode").set_value("fsdp").run()
    assert not app.error
    assert app.selectbox(key="set-model").value == "cnn"


def test_the_payload_of_the_picture_is_plain_json(lab: Lab):
    """What the browser gets has the devices in it, and nothing but JSON."""
    app = lab("devices=4")
    picture = next(e for e in app.get("bidi_component") if e.key == "picture")
    assert len(json.loads(picture.proto.json)["boxes"]) == 4


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_wrong_setting_is_explained_in_place_and_keeps_the_last_picture(lab: Lab):
    app = lab("devices=4")
    before = numbers(app)
    app.number_input(key="set-devices").set_value(3).run()
    with pytest.raises(SpecError) as wrong:
        engine.simulate(Spec(devices=3))
    assert app.sidebar.error[0].value.replace("\\", "") == str(wrong.value)
    assert numbers(app) == before
    assert app.warning
    assert app.number_input(key="set-devices").value == 3
    assert query(app) == {"devices": "3"}
    assert app.button(key="run").disabled


@pytest.mark.parametrize(
    ("link", "instead"),
    [
        ("mode=fsdp&devices=3&model=mlp", "mode=fsdp&devices=3&model=mlp&global-batch=63"),
        ("mode=pipeline&devices=4&model=mlp&microbatches=5", "mode=pipeline&devices=4&model=mlp&microbatches=2"),
        ("mode=ddp&devices=4&nonsense=1", "mode=ddp&devices=4"),
        # 128 replicas need a batch of 128, and 16 stages then one of 2,048.
        (
            "mode=hybrid&devices=2048&pp=16&dp=128&model=llama3_8b&layers=14&machine=h100",
            "mode=hybrid&devices=2048&pp=16&dp=128&model=llama3_8b&layers=14&machine=h100&global-batch=2048",
        ),
    ],
)
def test_of_a_link_that_does_not_work_the_nearest_that_does_is_shown(lab: Lab, link: str, instead: str):
    """With the first value that the error itself suggests; nothing else is changed."""
    app = lab(link)
    assert app.error and app.warning and app.button(key="run").disabled
    assert numbers(app) == numbers(lab(instead))


def test_beside_settings_that_do_not_work_a_choice_has_a_name(lab: Lab):
    app = lab("devices=3")
    app.radio("set-mode").set_value("sequence").run()
    assert app.error and app.selectbox("set-model").value == "gpt"
    assert app.selectbox("set-dataset").placeholder == "Text"
    app = lab("devices=8")
    app.radio("set-mode").set_value("pipeline").run()
    assert app.selectbox("set-schedule").placeholder == "none"


def test_a_suggested_value_is_one_click_away(lab: Lab):
    app = lab("mode=pipeline&microbatches=5")
    labels = [button.label.replace("\\", "") for button in app.sidebar.button]
    assert labels == ["microbatches = 2", "microbatches = 4", "microbatches = 8"]
    app.sidebar.button[1].click().run()
    assert not app.error and not app.warning
    assert query(app)["microbatches"] == "4"


@pytest.mark.parametrize(
    "link",
    [
        "devices=abc",
        "devices=",
        "devices=0",
        "devices=1000000000",
        "devices=99999999999999999999999999",
        "mode=foo",
        "model=<script>alert(1)</script>",
        "lr=nan",
        "lr=1e308",
        "split=1,x",
        "mode=ddp&microbatches=4",
        "mode=single",
        "nonsense=1",
        "machine=m",
        "record=maybe",
        "steps=3&epochs=1",
        "data-dir=/nowhere",
        "fault=x",
        "lang=xx",
    ],
)
def test_a_nonsense_link_gives_a_message_and_a_way_out_of_it(lab: Lab, link: str):
    app = lab(link)
    assert not app.exception
    assert len(app.sidebar.error) == 1
    assert len(app.metric) == 5
    assert query(app) == dict(part.split("=") for part in link.split("&"))
    told = app.sidebar.error[0].value
    app.sidebar.button[0].click().run()
    assert not app.exception
    assert told not in [error.value for error in app.sidebar.error]


@pytest.mark.parametrize("run_id", ["../../etc", "nowhere", "gallery", "", "a/b"])
def test_a_link_to_no_run_gives_a_message_and_a_way_back(lab: Lab, run_id: str):
    app = lab(f"run={run_id}")
    rule = "no_run" if run_id in ("nowhere", "gallery") else "bad_run_id"
    assert not app.exception
    assert app.main.error[0].value.replace("\\", "") == RULES[rule].format(value=run_id)
    app.button(key="clear").click().run()
    assert not app.error
    assert query(app) == {}


# --- languages ------------------------------------------------------------------------------------------------------


def test_the_language_switch_changes_every_word_and_is_part_of_the_link(lab: Lab):
    app = lab()
    app.segmented_control(key="language").set_value("zh").run()
    assert query(app) == {"lang": "zh"}
    assert "分布式数据并行（DDP）" in words(app)
    assert app.button(key="run").label == "真实运行"
    assert app.number_input(key="set-devices").label == "设备数"


def test_an_error_is_told_in_the_chosen_language(lab: Lab):
    app = lab("devices=3&lang=zh")
    assert app.sidebar.error[0].value == "global-batch 必须能被设备数（3）整除；现在是 64。可以试试：63，66。".replace(
        "，6", ", 6"
    )


@pytest.mark.parametrize(("language", "told"), [("en", "does not fit"), ("zh", "放不下")])
def test_a_model_that_does_not_fit_is_an_answer_with_what_would_and_no_error(lab, language, told):
    app = lab(f"mode=ddp&model=llama3_8b&devices=8&machine=h100&global-batch=8&lang={language}")
    (box,) = [info.value for info in app.info if told in info.value]
    assert "83.6 GB" in box
    assert not app.error
    assert not app.exception
    offered = [button for button in app.button if (button.key or "").startswith("fit-")]
    assert offered and any("mode fsdp" in button.label for button in offered)
    for i in range(len(offered)):
        taken = lab(f"mode=ddp&model=llama3_8b&devices=8&machine=h100&global-batch=8&bucket-mb=50&lang={language}")
        taken.button(key=f"fit-{i}").click().run()
        assert not taken.error and not taken.exception
        assert not [info.value for info in taken.info if told in info.value]
