"""Real runs that compute again: the ops that were planned, one device's numbers, and no more kept than was planned."""

from __future__ import annotations

import pytest

from engine.spec import Spec
from tests.engine.proof import BRIEF, finished, holds
from tests.engine.test_recompute import EXPERTS, TEXT


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "devices", "settings"),
    [
        ("expert", 2, {}),
        ("expert", 4, {"accumulate": 2}),
        ("hybrid", 4, {"dp": 2, "ep": 2}),
        ("hybrid", 4, {"fsdp": 2, "ep": 2}),
        ("hybrid", 2, {"dp": 2}),
        ("hybrid", 4, {"pp": 2, "ep": 2, "microbatches": 4, "schedule": "zbv", "layers": 6}),
        ("hybrid", 8, {"pp": 2, "dp": 2, "ep": 2, "microbatches": 2}),
        ("expert", 2, {"recompute": "selective"}),
        ("hybrid", 4, {"cp": 2, "ep": 2, "recompute": "selective"}),
    ],
)
def test_experts_on_other_ranks_compute_again_what_they_were_sent(mode, devices, settings, launcher, runs_dir):
    """As many as their routers counted, once a pass: else the second micro-step would be planned with the first's."""
    sizes = TEXT | EXPERTS | {"recompute": "full"} | settings
    spec = Spec(mode=mode, devices=devices, **sizes, **BRIEF)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("ddp", TEXT | {"recompute": "full", "accumulate": 2}),
        ("zero2", {"model": "cnn", "global_batch": 16, "recompute": "selective"}),
        ("fsdp", TEXT | {"recompute": "full"}),
        ("hsdp", TEXT | {"recompute": "selective"}),
        ("layer_split", TEXT | {"recompute": "full"}),
        ("fsdp", TEXT | {"recompute": "full", "model": "moe", "experts": 4}),
        ("pipeline", TEXT | {"recompute": "full", "model": "moe", "experts": 4, "microbatches": 4}),
    ],
)
def test_real_runs_recompute_what_was_planned_and_come_to_the_same(mode, settings, launcher, runs_dir):
    result = finished(Spec(mode=mode, devices=2, **settings, **BRIEF), launcher, runs_dir)
    holds(result)
    assert result["parity"]["grad_max_rel_diff"] < 1e-5


WEIGHED = BRIEF | {"steps": 2}  # the steps in which memory is measured come after these
PIPELINE = {"mode": "pipeline", "microbatches": 4}


@pytest.mark.real
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (2, {"mode": "tensor", "recompute": "full"}),
        (2, {"mode": "tensor", "recompute": "selective"}),
        (2, {"mode": "sequence", "recompute": "full"}),
        (2, {"mode": "sequence", "recompute": "selective"}),
        (2, PIPELINE | {"recompute": "full"}),
        (2, PIPELINE | {"recompute": "selective"}),
        (2, PIPELINE | {"recompute": "full", "schedule": "gpipe"}),
        (2, {"mode": "single", "devices": 1, "recompute": "full"}),
        (2, {"mode": "fsdp", "recompute": "selective", "model": "moe", "experts": 4}),
        (2, {"mode": "layer_split", "recompute": "full"}),
        (2, {"mode": "data_parallel", "recompute": "full"}),
        (3, {"mode": "data_parallel", "recompute": "selective", "global_batch": 12, "accumulate": 2}),
        (2, {"mode": "context", "recompute": "selective"}),
        (2, {"mode": "context", "recompute": "selective", "attention": "all_gather"}),
        (2, {"mode": "context", "recompute": "full", "attention": "all_gather", "bucket_mb": 0.05}),
        (2, {"mode": "context", "recompute": "selective", "attention": "ulysses"}),
        (3, {"mode": "context", "recompute": "full", "context": 24, "global_batch": 12}),
        (4, {"mode": "hybrid", "recompute": "full", "cp": 2, "fsdp": 2}),
        (4, {"mode": "hybrid", "recompute": "selective", "cp": 2, "fsdp": 2}),
        (4, {"mode": "hybrid", "recompute": "full", "cp": 2, "tp": 2, "sequence_parallel": True}),
        (4, {"mode": "hybrid", "recompute": "selective", "cp": 2, "tp": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_what_a_real_run_computes_again_it_does_not_keep(devices, settings, launcher, runs_dir):
    """Collectives of the ranks that share a layer included, and bytes to 1 %."""
    spec = Spec(**TEXT | {"devices": devices} | settings, **WEIGHED)
    result = finished(spec, launcher, runs_dir, measure_memory=True)
    holds(result)
    memory = result["memory"]
    for plan, real in zip(memory["planned"], memory["measured"], strict=True):
        assert real["activations"] == pytest.approx(plan["activations"], rel=0.01)


IN_HALVES = {"model": "gpt", "layers": 6, "microbatches": 4}
STAGES_OF_TENSORS = {"mode": "hybrid", "devices": 4, "pp": 2, "tp": 2}


@pytest.mark.real
@pytest.mark.parametrize(
    "settings",
    [
        PIPELINE | {"recompute": "full", "schedule": "zbv"},
        PIPELINE | {"recompute": "selective", "schedule": "interleaved_zero_bubble"},
        PIPELINE | {"recompute": "full", "schedule": "dualpipev"},
        STAGES_OF_TENSORS | {"recompute": "full", "schedule": "zbv"},
        STAGES_OF_TENSORS | {"recompute": "selective", "schedule": "zbv", "sequence_parallel": True},
        {"mode": "hybrid", "devices": 4, "pp": 2, "fsdp": 2, "recompute": "full", "schedule": "zbv"},
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_stages_that_go_back_in_halves_keep_what_was_computed_again_until_the_second(settings, launcher, runs_dir):
    """To the byte but for the places of messages and the losses."""
    spec = Spec(**{"devices": 2} | TEXT | IN_HALVES | settings, **WEIGHED)
    result = finished(spec, launcher, runs_dir, measure_memory=True)
    holds(result)
    for plan, real in zip(*(result["memory"][k] for k in ("planned", "measured")), strict=True):
        assert real["activations"] == pytest.approx(plan["activations"], rel=0.002)


@pytest.mark.real
@pytest.mark.parametrize(
    "degrees",
    [{"pp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"fsdp": 2, "tp": 2, "sequence_parallel": True}],
)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_layers_are_computed_again_on_a_mesh(recompute, degrees, launcher, runs_dir):
    spec = Spec(mode="hybrid", devices=4, **TEXT, **degrees, recompute=recompute, **BRIEF)
    holds(finished(spec, launcher, runs_dir))
