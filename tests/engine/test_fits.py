"""Whether a model fits: the answer, and that what is said to fit does; memory over a step, against its peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cost.catalogue import MACHINES
from engine.cost.memory import room
from engine.job import prepare
from engine.model.presets import PRESETS, family
from engine.predict import predict
from engine.search.fits import MICROSTEPS, _fullest, fits, would_fit
from engine.spec import Spec

LARGE = Spec(mode="ddp", devices=8, model="llama3_8b", machine="h100", global_batch=8)
# Of 80 GiB CUDA has 79.2; beside PyTorch there are its context, of 0.7 GiB, and buffers of NCCL's one communicator, 688
# MiB.
H100 = round(79.2 * 2**30) - (717 + 688) * 2**20


def test_a_model_that_does_not_fit_is_told_which_rank_lacks_how_much_and_what_would_fit():
    found = fits(predict(LARGE))
    assert (found["fits"], found["capacity"], found["rank"], found["ranks_over"]) == (False, H100, 0, 8)
    assert found["category"] == "optimizer"  # 12 of 18 bytes of each of 8 billion parameters
    assert found["over"] == found["peak"] - H100 > 0
    assert found["would_fit"]
    for one in found["would_fit"]:
        again = predict(LARGE.with_(**one["settings"]))
        assert max(again.simulation.peak_memory) == one["peak_memory"] <= fits(again)["capacity"] <= H100
        assert again.step_time == pytest.approx(one["step_time"], rel=1e-9)
        assert fits(again)["fits"]


def test_where_no_change_is_enough_another_is_sought_beside_the_best():
    """65 thousand tokens on each of 8 GPUs: no sharding, no recomputation and no accumulation is enough by itself."""
    spec = LARGE.with_(global_batch=64)
    would = fits(predict(spec))["would_fit"]
    assert would and all(len(one["settings"]) > 1 for one in would)
    for one in would:
        assert fits(predict(spec.with_(**one["settings"])))["fits"]
        for name, value in one["settings"].items():  # each of them is needed
            if name in ("accumulate", "recompute"):
                with_all_but_it = {key: v for key, v in one["settings"].items() if key != name}
                assert not fits(predict(spec.with_(**with_all_but_it)), suggest=False)["fits"], (name, value)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "hsdp", "model": "llama3_8b", "global_batch": 16, "machine": "a100_40"},  # with fewer replicas
        {"mode": "tensor", "model": "llama3_70b"},  # as a mesh, of more devices
        {"mode": "layer_split", "model": "llama3_8b", "machine": "a100_40", "global_batch": 32},  # as a pipeline
        {"mode": "zero2", "model": "mixtral_8x7b", "global_batch": 32, "devices": 32},  # with gradients always in parts
    ],
    ids=lambda settings: settings["mode"],
)
def test_what_no_option_makes_fit_another_layout_may(settings):
    spec = Spec(**{"devices": 8, "global_batch": 8, "machine": "h100"} | settings)
    would = fits(predict(spec))["would_fit"]
    assert would
    for one in would:
        again = fits(predict(spec.with_(**one["settings"])), suggest=False)
        assert again["fits"] and again["peak"] == one["peak_memory"]


def test_of_a_scale_model_steps_are_as_long_as_those_that_it_shows():
    spec = Spec(mode="pipeline", devices=4, model="llama3_8b", microbatches=8, machine="h100", paced="h100")
    prediction = predict(spec)
    for one in (found := fits(prediction)["would_fit"]):
        pictured = predict(spec.with_(paced=None, **one["settings"])).step_time
        assert one["step_time"] == pytest.approx(prediction.dilation * pictured)
    assert found


def test_what_fits_in_no_way_that_was_tried_is_said_to():
    long = LARGE.with_(mode="single", model="gpt3_175b", devices=1, machine="rtx4090", context=131_072)
    assert fits(predict(long))["would_fit"] == []


@pytest.mark.parametrize("model", PRESETS)
def test_every_change_that_is_tried_can_be_planned_or_is_refused(model):
    """Into one byte nothing fits, so all of them are tried, and beside the best of them all once more."""
    degrees = {"dp": 2, "ep": 4} if family(model) == "moe" else {"dp": 2, "tp": 2, "pp": 2, "microbatches": 4}
    for layout in ({"mode": "ddp"}, {"mode": "hybrid", **degrees}):
        spec = Spec(model=model, layers=8, devices=8, machine="h100", global_batch=32, **layout)
        assert would_fit(prepare(spec).spec, replace(MACHINES["h100"], memory_size=1)) == []


def test_nothing_is_claimed_where_the_memory_of_a_device_is_not_known():
    found = fits(predict(Spec(machine="unit", mode="pipeline")))
    assert found["fits"] is None
    assert "would_fit" not in found


SHARED = {"mode": "hybrid", "devices": 4, "pp": 2, "fsdp": 2, "model": "gpt", "layers": 6, "global_batch": 32}
SHARED |= {"dataset": "synthetic", "precision": "bf16", "master_weights": True, "machine": "a100"}
SHARED |= {"schedule": "interleaved_1f1b", "stages_per_rank": 4, "split": (1,) * 8}


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "pipeline", "devices": 3, "model": "mlp", "microbatches": 4, "global_batch": 48},
        {"mode": "pipeline", "devices": 2, "model": "mlp", "layers": 7, "schedule": "interleaved_1f1b"},
        {"mode": "fsdp", "devices": 2, "model": "gpt"},
        {"mode": "hybrid", "devices": 8, "tp": 2, "pp": 4, "model": "llama3_8b", "machine": "h100", "global_batch": 8},
        SHARED | {"share_gradients": True, "microbatches": 4},
        SHARED | {"share_gradients": True, "microbatches": 4, "accumulate": 2},
    ],
)
def test_over_a_step_as_much_is_held_at_most_as_the_peak_says_and_in_the_end_what_stays(settings):
    simulation = predict(Spec(**settings)).simulation
    for role, program in enumerate(simulation.plan.programs):
        held = simulation.memory_over_time(role)
        assert held.total.max() <= simulation.peak_memory[role]
        assert held.total.max() >= 0.99 * simulation.peak_memory[role]
        assert all((values >= 0).all() for values in held.bytes.values())
        loads = max((op.saved for op in program.ops if op.kind == "load"), default=0)
        remains = sum(op.remains for op in program.ops if op.is_compute)
        assert held.total[-1] == sum(program.memory.values()) + loads + remains
        assert (np.diff(held.seconds) > 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ddp"},
        {"mode": "ddp", "sync_every_microstep": True},
        {"mode": "fsdp"},
        {"mode": "zero2", "sync_every_microstep": True},
        {"mode": "tensor"},
        {"mode": "context"},
        {"mode": "hybrid", "fsdp": 2, "dp": 2},
    ],
)
def test_many_micro_steps_hold_as_much_as_a_few(settings: dict):
    """What is planned instead to find the fullest rank is smaller, and as full."""
    spec = Spec(devices=4, model="gpt", machine="h100", global_batch=64, accumulate=MICROSTEPS + 5, **settings)
    assert _fullest(spec) == max(predict(spec).simulation.peak_memory)


def test_what_cuda_and_nccl_hold_is_not_pytorch_s_to_have():
    """NVIDIA/nccl, issues 964 and 1685; on this machine's cores there is neither."""
    whole, mib = MACHINES["h100"].memory_size, 2**20
    alone = whole - room(MACHINES["h100"], {"dp": 1})
    assert alone == 717 * mib
    held = {name: whole - room(MACHINES["h100"], degrees, name == "experts") - alone for name, degrees in {
        "two": {"dp": 2}, "many": {"dp": 8}, "mesh": {"pp": 2, "dp": 4, "tp": 8}, "experts": {"ep": 8},
    }.items()}  # fmt: skip
    assert held == {
        "two": 544 * mib, "many": 688 * mib, "mesh": (544 + 3 * 688) * mib, "experts": 688 * mib + 3_280_000_000,
    }  # fmt: skip
    assert room(MACHINES["unit"], {"dp": 8}) is None
    for name, gigabytes in DATA_SHEETS.items():  # all of which are 2^30 bytes, and of which the driver keeps some
        assert 0.98 < MACHINES[name].memory_size / (gigabytes * 2**30) < 0.993, name


DATA_SHEETS = {"v100": 32, "a100_40": 40, "a100": 80, "a800": 80, "h100": 80, "h800": 80, "h200": 141, "rtx4090": 24}
DATA_SHEETS |= {"b200": 180, "gb200": 186, "b300": 270, "gb300": 279}
