"""The lab without a browser, with runs: started, stopped, going on, finished, failed, and those of other settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine import archive, checkpoints, launch
from engine.job import prepare
from engine.spec import Spec
from engine.timeline import Timeline
from tests.app.reading import charts, query, words

Lab = Callable[..., AppTest]


@pytest.fixture
def started(record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs that the page has started; instead of training, each stays "running"."""
    folders: list[Path] = []

    def start(spec: Spec, runs_dir: Path, launcher: object) -> launch.Handle:
        folders.append(record(spec, state="running"))
        return launch.Handle(folders[-1])

    monkeypatch.setattr(launch, "start", start)
    return folders


def test_a_click_starts_one_run_and_the_link_names_it(lab: Lab, started: list[Path]):
    app = lab("steps=7")
    app.button(key="run").click().run()
    assert [folder.name for folder in started] == [query(app)["run"]]
    assert archive.read_spec(started[0]).steps == 7
    assert not app.exception


def test_a_run_from_before_most_settings_and_results_opens_with_its_picture(lab: Lab, record: Callable[..., Path]):
    folder = record(Spec())
    settings, result = ((archive.read_json(folder / f"{name}.json") or {}) for name in ("spec", "result"))
    first = ("mode", "devices", "model", "global_batch", "steps", "optimizer", "seed", "machine", "device", "record")
    archive.write_json(folder / "spec.json", {name: settings[name] for name in first if name in settings})
    first = {"run_id", "status", "mode", "devices", "step_time", "predicted_step_time", "samples_per_second", "losses",
             "validation_accuracy", "parity", "conformance", "error", "spec"}  # fmt: skip
    archive.write_json(folder / "result.json", {name: result[name] for name in first})
    app = lab(f"run={folder.name}")
    assert not app.exception and not app.error
    assert "had other settings" not in words(app)
    assert app.segmented_control(key="view").value == "measured"
    assert "badge[prediction" in words(app)  # it ran here


def test_a_second_quick_click_starts_nothing(lab: Lab, started: list[Path]):
    app = lab()
    button = app.button(key="run")
    button.click().run()
    button.click().run()  # the page that the visitor still sees has the button
    assert len(started) == 1


def test_a_setting_changed_during_a_run_leaves_the_run_alone(lab: Lab, started: list[Path]):
    app = lab()
    app.button(key="run").click().run()
    app.number_input(key="set-devices").set_value(4).run()
    assert query(app) == {"devices": "4", "run": started[0].name}
    assert not app.button(key="stop").disabled
    assert not (started[0] / "stop").exists()


def test_another_visitor_sees_that_a_run_is_going_on_and_finds_it(lab: Lab, record: Callable[..., Path]):
    record(Spec())
    assert "Another run is going on" not in words(lab())
    going_on = record(Spec(devices=4), state="running")
    app = lab()
    assert "Another run is going on" in words(app)
    app.button(key="show-run").click().run()
    assert query(app) == {"devices": "4", "run": going_on.name}
    assert app.button(key="stop").label == "Stop"


def test_stop_asks_the_run_to_end(lab: Lab, started: list[Path]):
    app = lab()
    app.button(key="run").click().run()
    app.button(key="stop").click().run()
    assert (started[0] / "stop").exists()
    assert app.button(key="stop").disabled


def test_what_cannot_run_here_says_why_before_it_is_tried(lab: Lab):
    app = lab("devices=128&global-batch=128")
    assert app.button(key="run").disabled
    assert "at most 64 processes" in app.button(key="run").help


def test_a_link_to_a_run_brings_its_settings_and_what_it_proved(lab: Lab, record: Callable[..., Path]):
    spec = Spec(mode="pipeline", devices=4, microbatches=4, machine="unit")
    app = lab(f"run={record(spec).name}")
    said = words(app)
    assert app.number_input(key="set-microbatches").value == 4
    assert "Loss differs by 2e-07" in said and "First 3 steps" in said and "Gradients 3e-06" in said
    assert "tolerance: loss 1e-04" in said.lower()
    assert "70 of 70 ops" in said
    assert "42 s" in said  # measured: twice the predicted 3 s x (4 + 4 - 1)
    assert "validation accuracy 87.5 %" in said
    assert app.button(key="run").label == "Run for real"


def step_box(app: AppTest):
    return next((box for box in app.selectbox if (box.key or "").startswith("step-")), None)


def test_the_step_shown_first_is_a_steady_one_of_median_length(lab: Lab, record: Callable[..., Path]):
    app = lab(f"run={record(Spec()).name}")
    assert step_box(app).value == 4
    assert list(step_box(app).options) == ["Step 0", "Step 1", "Step 2", "Step 3", "Step 4 (typical)"]


def test_what_a_fast_rank_did_before_the_step_began_is_said_not_to_be_drawn(lab: Lab, record: Callable[..., Path]):
    """Step 3 lasts from 30 to 33 (in predicted steps), 4 from 40 on: rank 1 is made to begin it at 32, rank 0 at 33."""
    folder = record(Spec(devices=2, model="mlp"))
    app = lab(f"run={folder.name}")
    assert "Not drawn" not in words(app)
    timeline = Timeline.load(folder / "timeline.parquet")
    ten = timeline["start"][timeline["step"] == 1].min() - timeline["start"][timeline["step"] == 0].min()
    shift = np.where(timeline["step"] == 4, np.where(timeline["rank"] == 1, 0.8, 0.7) * ten, 0.0)
    earlier = {name: timeline[name] - shift for name in ("start", "end")}
    replace(timeline, columns=timeline.columns | earlier).save(folder / "timeline.parquet")
    assert words(lab(f"run={folder.name}")).count("Not drawn: what rank 1 computed of this step") == 1


def test_where_the_time_went_is_told_of_the_step_that_is_shown(lab: Lab, record: Callable[..., Path]):
    folder = record(Spec(mode="pipeline", devices=3, model="mlp", layers=3, machine="unit"))
    app = lab(f"run={folder.name}")
    assert "Where the time goes" in words(app) and "Critical path: " in words(app)
    assert "rank 2 waits" in words(app) and "from rank 1: pipeline fill" in words(app)
    app.toggle(key="critical").set_value(True).run()
    picture = next(
        json.loads(p.proto.json) for p in app.get("bidi_component") if "lockstep_player" in p.proto.component_name
    )
    assert "critical path" in [trace.get("name") for trace in picture["figure"]["data"]]
    assert "关键路径：" in words(lab(f"run={folder.name}&lang=zh"))


def test_the_prediction_error_is_shown_for_this_machine_alone(lab: Lab, record: Callable[..., Path]):
    assert "prediction \u221250\u00a0%" in words(lab(f"run={record(Spec()).name}"))
    assert "prediction \u221250\u00a0%" not in words(lab(f"run={record(Spec(machine='h100')).name}"))


def test_a_step_far_longer_than_predicted_names_the_cores_that_others_had(lab: Lab, record: Callable[..., Path]):
    """Where it is a tenth of the cores or more; of a step that took what was predicted the card says nothing."""
    step = {"kind": "step", "predicted": 1.0, "measured": 2.0, "error": -0.5}
    found = {"machine": "local", "step": step, "ops": [], "reason": None, "cores": 2, "calibration": "calibrated"}
    said = "Other programs kept 1.3 of 2 cores busy: the ranks had what was left"
    folder = record(Spec(), accuracy=found | {"other_cores": 1.3})
    assert said in words(lab(f"run={folder.name}"))
    result = archive.read_json(folder / "result.json") or {}
    archive.write_json(folder / "result.json", result | {"predicted_step_time": result["step_time"]})
    assert said not in words(lab(f"run={folder.name}"))


def test_broken_parity_is_red_and_says_why(lab: Lab, record: Callable[..., Path]):
    bad = {
        "ok": False,
        "loss_max_abs_diff": 0.25,
        "grad_max_rel_diff": None,
        "param_max_abs_diff": 0.5,
        "tolerance": {"loss_max_abs_diff": 1e-4, "grad_max_rel_diff": 1e-3, "param_max_abs_diff": 1e-4},
        "reason": "loss_max_abs_diff is 0.25, more than 1e-04",
        "steps": 3,
    }
    run = record(Spec(), parity=bad).name
    said = words(lab(f"run={run}"))
    assert ":red-badge[:material/close: differs]" in said
    assert "**Loss differs by 2.5e-01; allowed: 1e-04.**" in said
    assert ":red[Gradients differ by ∞; allowed: 1e-03. Parameters differ by 5e-01; allowed: 1e-04.]" in said
    assert "loss_max_abs_diff is 0.25, more than 1e-04" in said
    assert "梯度相差 ∞；允许 1e-03" in words(lab(f"run={run}&lang=zh"))
    assert ":green-badge[:material/check: equal]" not in said


def test_the_first_difference_from_the_plan_is_told_in_words(lab: Lab, record: Callable[..., Path]):
    difference = {
        "rank": 1,
        "step": 2,
        "lane": "dp",
        "index": 0,
        "planned": "all_reduce gradient bucket0 8 bytes",
        "measured": None,
    }
    report = {"ok": False, "planned": 70, "measured": 69, "matched": 69, "first_difference": difference}
    said = words(lab(f"run={record(Spec(), conformance=report).name}"))
    assert "rank 1, step 2, lane dp, position 0: planned all_reduce gradient bucket0 8 bytes, measured nothing" in said


def test_a_failed_run_names_rank_step_op_message_and_log(lab: Lab, record: Callable[..., Path]):
    error = {"rank": 1, "step": 3, "op": "backward", "message": "RuntimeError: boom"}
    folder = record(Spec(), state="failed", error=error)
    (folder / "rank1.log").write_text("USDT: noise\nbefore\nTraceback: boom\n")
    app = lab(f"run={folder.name}")
    said = app.main.error[0].value.replace("\\", "")
    assert all(part in said for part in ("The run failed", "rank 1", "step 3", "backward", "RuntimeError: boom"))
    assert app.code[0].value == "before\nTraceback: boom"


def test_a_run_with_other_settings_is_told_apart_and_brought_back(lab: Lab, record: Callable[..., Path]):
    folder = record(Spec(devices=4))
    app = lab(f"run={folder.name}&devices=2&mode=layer_split")
    assert "had other settings" in words(app)
    assert step_box(app) is None  # no measured picture under another plan
    app.button(key="its-settings").click().run()
    assert query(app) == {"devices": "4", "run": folder.name}
    assert step_box(app) is not None


def test_settings_changed_back_to_the_defaults_beside_a_run_stay_so(lab: Lab, record: Callable[..., Path]):
    app = lab(f"run={record(Spec(devices=4)).name}")
    app.number_input(key="set-devices").set_value(2).run()
    app.run()
    assert app.number_input(key="set-devices").value == 2
    assert "had other settings" in words(app)


def test_new_run_goes_back_to_the_prediction(lab: Lab, record: Callable[..., Path]):
    app = lab(f"run={record(Spec(devices=4)).name}")
    app.button(key="clear").click().run()
    assert query(app) == {"devices": "4"}
    assert len(app.metric) == 5


def test_a_run_that_has_saved_is_gone_on_with_from_its_last_checkpoint(lab: Lab, record: Callable[..., Path]):
    spec = Spec(devices=4, steps=6, save_every=3)
    folder = record(spec)
    for step in (3, 6):
        saved = checkpoints.folder_of(folder, step)
        saved.mkdir(parents=True)
        checkpoints.describe(saved, prepare(spec), step, {})
    app = lab(f"run={folder.name}")
    app.button(key="resume").click().run()
    assert query(app) == {"devices": "4", "save-every": "3", "resume": f"{folder.name}:6"}
    assert f"Goes on after step 6 of the run {folder.name}" in words(app)
    assert app.number_input(key="set-steps").value == 26  # counted from the beginning
    resumed = record(Spec(devices=2, resume=f"{folder.name}:6"))
    assert f"Goes on after step 6 of the run {folder.name}" in words(lab(f"run={resumed.name}"))


def test_a_run_without_recorded_ops_has_no_measured_picture(lab: Lab, record: Callable[..., Path]):
    folder = record(Spec(record=False))
    (folder / "timeline.parquet").unlink()
    app = lab(f"run={folder.name}")
    assert not app.exception
    assert "recorded no operations" in words(app)


def test_a_folder_that_is_no_run_is_explained(lab: Lab, runs_dir: Path):
    (runs_dir / "odd").mkdir()
    (runs_dir / "odd" / "spec.json").write_text("{")
    app = lab("run=odd")
    assert not app.exception
    assert len(app.main.error) == 1


def test_on_the_cpu_data_parallel_says_who_runs_its_four_steps(lab: Lab, record: Callable[..., Path]):
    assert "nn.DataParallel itself does nothing on the CPU" in words(
        lab(f"run={record(Spec(mode='data_parallel')).name}")
    )
    assert "nn.DataParallel itself" not in words(lab(f"run={record(Spec()).name}"))


@pytest.mark.parametrize("cores, told", [(2, True), (4, False)])
def test_more_ranks_than_cores_are_told(
    lab: Lab, record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, cores: int, told: bool
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    said = words(lab(f"run={record(Spec(devices=4)).name}"))
    assert ("oversubscribed" in said) == told


def test_result_text_is_never_read_as_markup(lab: Lab, record: Callable[..., Path]):
    error = {"rank": 0, "step": 0, "op": "x", "message": "**bold** [link](http://x) :red[r] $a$"}
    app = lab(f"run={record(Spec(), state='failed', error=error).name}")
    assert r"\*\*bold\*\* \[link\]\(http\://x\) \:red\[r\] \$a\$" in app.main.error[0].value


def test_a_run_with_experts_shows_how_many_tokens_each_got(lab: Lab, record: Callable[..., Path]):
    counts = {"block1": [300, 0, 12, 200], "block2": [128, 128, 128, 128]}
    tokens = {"even": 128.0, "last": counts, "mean": counts}
    conformance = {"ok": True, "planned": 9, "measured": 9, "matched": 9, "first_difference": None, "routed": True}
    spec = Spec(mode="expert", model="moe", experts=4, global_batch=4)
    folder = record(spec, expert_tokens=tokens, conformance=conformance)
    app = lab(f"run={folder.name}")
    assert not app.exception
    assert "Tokens of each expert" in words(app)
    assert "planned from what the routers counted" in words(app)
    assert [300, 0, 12, 200] in [
        figure["data"][0]["y"][:4] for figure in charts(app) if figure["data"][0]["type"] == "bar"
    ]
    assert "Tokens of each expert" not in words(lab(f"run={record(Spec(mode='ddp')).name}"))


def test_losses_of_single_ranks_stand_beside_their_mean_and_a_repeated_order_is_red(
    lab: Lab, record: Callable[..., Path]
):
    repeated = [{"rank": 1, "epoch": 2, "like": 0}]
    run = record(Spec(), local_losses=[[2.0, 1.0], [2.0, 0.5]], repeated_orders=repeated)
    said = words(lab(f"run={run.name}"))
    assert "single ranks, last step: 0.5 to 1" in said
    assert ":red[Rank 1 saw epoch 2 in the order of epoch 0: set_epoch was not called.]" in said
