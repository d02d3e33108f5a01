"""A job is a spec with every setting that applies filled in; and what this machine cannot run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import job as jobs
from engine.asking.rules import SpecError
from engine.asking.settings import (
    CONTEXT_SETTINGS,
    MODE_MODELS,
    MODE_SETTINGS,
    MODEL_DEFAULTS,
    PIPELINE_SETTINGS,
    PLANNED_EXPERTS,
    PLANNED_SIZES,
)
from engine.job import prepare, prepare_real
from engine.spec import MODELS, MODES, Spec

# These are nothing unless they are asked for; the others, of axes that are 1 wide.
ASKED_FOR = (
    "clip",
    "masked",
    "leave_out",
    "freeze",
    "compress_rank",
    "schedule_file",
    *PLANNED_SIZES,
    *PLANNED_EXPERTS,
)
NARROW = {
    "hybrid": (*PIPELINE_SETTINGS, *CONTEXT_SETTINGS, "sequence_parallel", "expert_tp")
}  # of axes that are 1 wide, unless asked for


@pytest.mark.parametrize(
    ("mode", "model"), [(mode, model) for mode in MODES for model in MODE_MODELS.get(mode, MODELS)]
)
def test_a_job_has_every_setting_that_applies_and_no_other(mode, model):
    devices = 1 if mode == "single" else 2
    resolved = prepare(Spec(mode=mode, model=model, devices=devices)).spec
    for settings, own in ((MODEL_DEFAULTS, model), (MODE_SETTINGS, mode)):
        for name in {name for of in settings.values() for name in of}:
            if name in ASKED_FOR:
                continue
            given = name in settings[own] and name not in NARROW.get(mode, ())
            assert (getattr(resolved, name) is not None) == given, name
    assert resolved.dataset is not None
    # So it can be stored, read and prepared again, and is the same.
    assert prepare(Spec.from_dict(json.loads(json.dumps(resolved.to_dict())))).spec == resolved


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_not_named_is_the_first_that_the_mode_can_train(mode):
    """The help of the setting says which. One that is named and cannot be cut is refused, as the default may not be."""
    devices = 1 if mode == "single" else 2
    model = prepare(Spec(mode=mode, devices=devices)).spec.model
    assert model == {"sequence": "gpt", "context": "gpt", "expert": "moe"}.get(mode, "cnn")
    text = Spec.__dataclass_fields__["model"].metadata["help"]
    assert "by default cnn, in sequence and context gpt, in expert moe" in text
    if model != "cnn":
        with pytest.raises(SpecError) as refused:
            prepare(Spec(mode=mode, devices=devices, model="cnn"))
        assert (refused.value.code, refused.value.suggest[0]) == ("model_of_mode", model)


def test_a_batch_is_shared_over_replicas_and_not_over_stages():
    assert prepare(Spec(mode="ddp", devices=4)).local_batch == 16
    assert prepare(Spec(mode="data_parallel", devices=4)).local_batch == 16
    assert prepare(Spec(mode="pipeline", devices=4)).local_batch == 64
    assert prepare(Spec(mode="single", devices=1)).local_batch == 64


def test_epochs_are_as_many_steps_as_full_batches():
    """1,437 digits make 22 batches of 64 and one of 29, which is left out."""
    assert prepare(Spec(epochs=3)).steps == 66
    assert prepare(Spec(steps=7)).steps == 7
    assert prepare(Spec(epochs=3)).batches_per_epoch == 22


def test_stages_are_the_split_and_whole_without_one():
    names = [[layer.name for layer in stage] for stage in prepare(Spec(mode="pipeline", split=(1, 3))).stages]
    assert names == [["conv1"], ["conv2", "fc1", "fc2"]]
    assert len(prepare(Spec(mode="ddp")).stages) == 1


@pytest.mark.parametrize(("devices", "schedule", "expected"), [(2, "1f1b", 4), (4, "1f1b", 8), (3, "gpipe", 8)])
def test_without_microbatches_there_are_twice_as_many_as_stages_or_the_next_that_divides(devices, schedule, expected):
    assert prepare(Spec(mode="pipeline", devices=devices, schedule=schedule)).spec.microbatches == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", 1), ("zb_h2", 1), ("looped_bfs", 2), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipe", 2)],
)
def test_a_device_has_as_many_stages_as_its_schedule_is_for(schedule, expected):
    spec = Spec(mode="pipeline", schedule=schedule, model="mlp", layers=7)
    job = prepare(spec)
    assert job.spec.stages_per_rank == expected
    # DualPipe's two stages a device are of two copies of the model: two stages in each.
    assert len(job.stages) == 2 * expected
    assert len(job.spec.split) == (2 if schedule == "dualpipe" else 2 * expected)


def test_the_stages_of_dualpipe_are_two_copies_of_the_model():
    stages = prepare(Spec(mode="pipeline", schedule="dualpipe", split=(1, 3))).stages
    names = [[layer.name for layer in stage] for stage in stages]
    assert names == [["conv1"], ["conv2", "fc1", "fc2"]] * 2


def test_what_runs_in_one_process_says_so():
    assert prepare(Spec(mode="data_parallel", devices=4)).processes == 1
    assert prepare(Spec(mode="ddp", devices=4)).processes == 4


# Real runs


@pytest.mark.parametrize(
    ("settings", "gpus", "code", "suggest"),
    [
        ({"device": "cuda"}, 0, "no_gpu", ("cpu",)),
        ({"devices": 4, "device": "cuda"}, 2, "more_ranks_than_gpus", (2,)),
        ({"devices": 4}, 2, "more_ranks_than_gpus", (2,)),
        ({"devices": 8}, 3, "more_ranks_than_gpus", (2,)),  # 64 samples cannot be shared by 3
        ({"devices": 4, "mode": "pipeline"}, 3, "more_ranks_than_gpus", (3,)),
        # 12 samples can be shared by 3, and 8 experts cannot.
        ({"devices": 4, "mode": "expert", "model": "moe", "global_batch": 12}, 3, "more_ranks_than_gpus", (2,)),
        ({"devices": 128, "global_batch": 128}, 0, "cannot_run_here", (64,)),
        ({"devices": 100, "global_batch": 100}, 0, "cannot_run_here", (50,)),
    ],
)
def test_what_this_machine_cannot_run_is_refused_with_what_it_can(monkeypatch, settings, gpus, code, suggest):
    monkeypatch.setattr(jobs, "count_gpus", lambda: gpus)
    with pytest.raises(SpecError) as refused:
        prepare_real(Spec(**settings))
    assert (refused.value.code, refused.value.suggest) == (code, suggest)
    for value in suggest:
        prepare_real(Spec(**(settings | {refused.value.setting: value})))


REAL = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


@pytest.mark.parametrize(
    ("settings", "suggest"),
    [
        ({"schedule": "zb_h2"}, REAL),
        ({"schedule": "zb_2p"}, REAL),
        ({"schedule": "dualpipe"}, REAL),
        ({"schedule": "zb_h2", "devices": 4}, ("gpipe", "1f1b")),  # the cnn has four layers
        ({"schedule": "dualpipe", "microbatches": 4, "devices": 2, "stages_per_rank": 2}, REAL[2:]),
        ({"schedule": "zb_h2", "microbatches": 1}, ("gpipe", *REAL[2:6])),  # 1f1b and dualpipev need more
    ],
)
def test_a_schedule_that_pytorch_lacks_is_planned_and_not_run(settings, suggest):
    spec = Spec(mode="pipeline", **settings)
    prepare(spec)
    with pytest.raises(SpecError) as refused:
        prepare_real(spec)
    assert (refused.value.code, refused.value.setting, refused.value.suggest) == ("planned_only", "schedule", suggest)
    assert settings["schedule"] in str(refused.value)
    for name in suggest:
        prepare_real(spec.with_(schedule=name))


@pytest.mark.parametrize(
    ("asked", "gpus", "given"), [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")]
)
def test_a_real_run_is_on_gpus_where_there_are_any_unless_asked_otherwise(monkeypatch, asked, gpus, given):
    monkeypatch.setattr(jobs, "count_gpus", lambda: gpus)
    assert prepare_real(Spec(device=asked)).spec.device == given


def test_gpus_are_counted_without_those_that_are_hidden(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0"), Path("/dev/nvidia1"), Path("/dev/nvidiactl")])
    for visible, count in ((None, 2), ("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 2)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert jobs.count_gpus() == count
