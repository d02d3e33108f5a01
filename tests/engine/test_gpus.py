"""Real runs on GPUs, where there are any: as planned, equal to one device, and timed by the device. Elsewhere they are
skipped, and `test_device_clock.py` holds what can be held without one."""

from __future__ import annotations

import pytest

from engine.asking.here import count_gpus
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished, holds

GPUS = count_gpus()
pytestmark = [pytest.mark.real, pytest.mark.skipif(not GPUS, reason="no GPU here")]
GPT = {"model": "gpt", "hidden": 32, "heads": 4, "context": 16, "layers": 2, "global_batch": 8, "steps": 4}


@pytest.mark.parametrize(
    ("mode", "devices", "settings"),
    [
        ("single", 1, {}),
        ("single", 1, {"model": "cnn", "hidden": None, "heads": None, "context": None, "layers": None}),
        ("ddp", 2, {}),
        ("zero1", 2, {"optimizer": "adamw"}),
        ("fsdp", 2, {}),
        ("hsdp", 4, {}),
        ("local_sgd", 2, {}),
        ("layer_split", 2, {}),
        ("pipeline", 2, {"schedule": "1f1b", "microbatches": 4}),
        ("pipeline", 2, {"schedule": "zbv", "microbatches": 4, "layers": 6}),
        ("tensor", 2, {}),
        ("sequence", 2, {}),
        ("context", 2, {"attention": "ring"}),
        ("expert", 2, {"model": "moe"}),
        ("hybrid", 4, {"pp": 2, "fsdp": 2, "microbatches": 4}),
        ("hybrid", 8, {"pp": 2, "fsdp": 2, "tp": 2, "microbatches": 4}),
    ],
)
def test_gpus_do_what_was_planned_and_come_to_the_numbers_of_one_device(mode, devices, settings, launcher, runs_dir):
    if devices > GPUS:
        pytest.skip(f"{devices} ranks, and {GPUS} GPUs")
    given = {name: value for name, value in (GPT | settings).items() if value is not None}
    result = finished(Spec(mode=mode, devices=devices, device="cuda", **given), launcher, runs_dir)
    if mode == "local_sgd":
        assert result["parity"]["exact"]["ok"], result["parity"]
    else:
        holds(result)
    assert result["conformance"]["ok"], result["conformance"]["first_difference"]


def test_a_step_is_made_of_what_the_gpu_computed(launcher, runs_dir):
    """Its host is through with a layer long before the device is: spans of the host would leave most of it empty."""
    sizes = {"hidden": 1024, "heads": 16, "context": 256, "layers": 4, "global_batch": 32, "steps": 8}
    spec = Spec(mode="single", devices=1, device="cuda", parity_steps=0, **(GPT | sizes))
    result = finished(spec, launcher, runs_dir)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet")
    last = timeline.where(timeline["step"] == 7)
    computed = (last["end"] - last["start"])[(last["lane"] == "compute") & (last["kind"] != "load")].sum()
    assert computed > 0.7 * result["step_time"]
