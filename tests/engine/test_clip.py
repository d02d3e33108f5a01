"""Clipping by global norm: one norm for all shards and stages, its collectives planned, its parity held."""

from __future__ import annotations

import pytest

from engine import modes
from engine.asking.settings import MODE_SETTINGS
from engine.job import prepare
from engine.modes import MODES
from engine.spec import Spec
from tests.engine.proof import BRIEF, finished, holds

SMALL = {"model": "mlp", "layers": 2, "hidden": 32, "global_batch": 16}
TEXT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}
CLIPPING = [mode for mode in MODES if "clip" in MODE_SETTINGS[mode]]


def tail(mode: str, devices: int = 2, rank: int = 0, **settings) -> list[tuple]:
    plan = modes.plan(prepare(Spec(mode=mode, devices=devices, clip=1.0, **settings)))
    ops = plan.program(rank).ops
    first = next(i for i, op in enumerate(ops) if op.part == "norm")
    return [(op.kind, op.part, op.axis, op.bytes if op.axis else 0) for op in ops[first:] if op.kind != "broadcast"]


NORM, CLIP, STEP = ("optimizer", "norm", "", 0), ("optimizer", "clip", "", 0), ("optimizer", "", "", 0)


@pytest.mark.parametrize("mode", CLIPPING)
def test_alone_there_is_nobody_to_sum_with(mode):
    settings = {"sequence": TEXT, "context": TEXT, "expert": TEXT | {"model": "moe"}}.get(mode, SMALL)
    assert tail(mode, 1, **settings)[:3] == [NORM, CLIP, STEP]


@pytest.mark.parametrize(
    ("mode", "axis", "numbers"),
    [
        *((mode, None, 0) for mode in ("data_parallel", "ddp", "zero1")),  # every rank has all gradients
        *((mode, "fsdp", 6) for mode in ("zero2", "fsdp", "hsdp")),  # DTensor sums the norms of six parameters
        *((mode, "pp", 1) for mode in ("layer_split", "pipeline")),  # one square a stage
        ("tensor", "tp", 4),  # two layers are cut, the third is whole
    ],
)
def test_norms_are_summed_over_the_axis_along_which_gradients_are_cut(mode, axis, numbers):
    sums = [("all_reduce", "norm", axis, 4 * numbers)] if axis else []
    assert tail(mode, **SMALL) == [NORM, *sums, CLIP, STEP]


def test_norm_weights_of_sequence_parallelism_are_laid_out_and_others_are_not():
    """Two blocks of six parameters, the embedding's two and the head's two: all are DTensors there but the position
    embedding; in plain tensor parallelism so are the matrices, four a block and two."""
    sizes = [next(s for *_, axis, s in tail(mode, **TEXT) if axis) for mode in ("sequence", "tensor")]
    assert sizes == [4 * 15, 4 * 10]


def test_replicas_of_shards_sum_over_the_shards_alone():
    assert [axis for *_, axis, size in tail("hsdp", 8, dp=2, **SMALL) if size] == ["fsdp"]


def test_without_it_nothing_is_planned():
    assert not [op for op in modes.plan(prepare(Spec(mode="fsdp"))).program(0).ops if op.part in ("norm", "clip")]


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "devices", "settings"),
    [
        ("data_parallel", 2, SMALL),
        ("zero1", 2, SMALL),
        ("fsdp", 4, SMALL),  # the output's 10 rows are 3, 3, 3 and 1
        ("hsdp", 4, SMALL),
        ("layer_split", 3, SMALL),
        ("pipeline", 2, SMALL | {"schedule": "zbv", "layers": 4}),
        ("tensor", 2, TEXT),
        ("sequence", 2, TEXT),
        ("context", 2, TEXT),
        ("expert", 2, TEXT | {"model": "moe"}),
    ],
)
def test_the_norm_is_that_of_all_gradients_together(mode, devices, settings, launcher, runs_dir):
    """The limit is far below the norms, so that what is updated is what was clipped."""
    spec = Spec(mode=mode, devices=devices, **settings, clip=0.1, **BRIEF)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["parity"]["norm_max_rel_diff"] < 1e-5
    assert len(result["grad_norms"]) == BRIEF["steps"] and min(result["grad_norms"]) > 0.1


@pytest.mark.real
def test_gradients_that_are_small_enough_are_left_alone(launcher, runs_dir):
    spec = Spec(mode="ddp", **SMALL, steps=4, device="cpu")
    runs = [finished(each, launcher, runs_dir) for each in (spec, spec.with_(clip=1e3))]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert runs[0]["grad_norms"] is None
