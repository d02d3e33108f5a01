"""A setting that means nothing in a mode, or to a model, is refused, and which ones do is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.asking.rules import SpecError
from engine.asking.settings import MODEL_DEFAULTS, applies
from engine.job import prepare
from engine.spec import MODELS, MODES, Spec

ROOT = Path(__file__).parents[2]


def settings_that_do_not_apply() -> list[tuple[str, str, str]]:
    values = {"layers": "3", "hidden": "64", "heads": "4", "context": "32", "bucket-mb": "1", "split": "2,2"}
    values |= {"microbatches": "4", "schedule": "gpipe", "dp": "1", "fsdp": "1", "stages-per-rank": "4"}
    values |= {"experts": "4", "top-k": "4", "receives": "early"}
    return [
        (mode, model, name)
        for mode in MODES
        for model in MODELS
        for name in values
        if not applies(name.replace("-", "_"), mode, model)
    ]


@pytest.mark.parametrize(("mode", "model", "name"), settings_that_do_not_apply())
def test_a_setting_that_means_nothing_here_is_refused_and_not_ignored(mode, model, name):
    value = {"schedule": "gpipe", "split": "2,2", "receives": "early"}.get(name, "4")
    with pytest.raises(SpecError) as refused:
        prepare(Spec.from_params({"mode": mode, "model": model, "devices": "1", name: value}))
    error = refused.value
    setting = name.replace("-", "_")
    assert (error.code, error.setting) == ("does_not_apply", setting)
    whose = f"the model {model}" if setting in MODEL_DEFAULTS["moe"] else f"the mode {mode}"
    assert str(error).startswith(f"{name} does not apply to {whose}; it is ")


def test_what_applies_is_told_for_each_mode_and_model():
    assert applies("schedule", "pipeline", "cnn") and not applies("schedule", "layer_split", "cnn")
    assert applies("heads", "ddp", "gpt") and not applies("heads", "ddp", "mlp")
    assert applies("hidden", "ddp", "mlp") and applies("lr", "ddp", "cnn")
    assert not applies("bucket_mb", "pipeline", "cnn")


def test_of_two_settings_that_do_not_apply_the_same_one_is_named_every_time():
    code = "from engine import job, spec\ntry: job.prepare(spec.Spec(heads=2, hidden=8, context=9, layers=3))\n"
    code += "except spec.SpecError as error: print(error.setting)"
    said = set()
    for seed in ("1", "2", "3"):
        environment = {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        said.add(done.stdout)
    assert said == {"layers\n"}
