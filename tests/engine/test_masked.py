"""Targets that are left out of the loss: which, what ranks tell each other for it, and that every mode weighs the rest
as one device does."""

from __future__ import annotations

import numpy as np
import pytest

from engine import modes
from engine.__main__ import main
from engine.asking.masked import LEFT_OUT, left_out, means
from engine.asking.rules import SpecError
from engine.job import prepare
from engine.spec import Spec
from tests.engine.proof import BRIEF, finished, holds

TEXT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16, "masked": 0.5}


@pytest.mark.parametrize("part", [0.1, 0.5, 0.8])
def test_each_text_leaves_out_its_beginning_and_all_together_the_part_that_was_asked_for(part):
    targets = np.arange(1000 * 64).reshape(1000, 64)
    masked = left_out(targets, part, seed=0)
    gone = masked == LEFT_OUT
    assert np.array_equal(masked[~gone], targets[~gone])
    assert (np.diff(gone, axis=1).sum(1) <= 1).all() and not gone[:, -1].any()  # one run, and never the last
    assert len(set(gone.sum(1))) > 10
    assert gone.mean() == pytest.approx(part, abs=0.02)
    assert np.array_equal(left_out(targets, part, seed=0), masked)


def test_a_mean_over_targets_is_not_the_mean_of_means():
    """transformers#34242: a loss of 12 over 6 tokens, and one of 2 over 2."""
    assert means([12.0, 2.0], [6, 2]) == {"counted": [6, 2], "over_targets": 1.75, "over_ranks": 1.5}


@pytest.mark.parametrize(
    ("settings", "axes"),
    [
        ({"mode": "single", "devices": 1}, []),
        ({"mode": "data_parallel", "devices": 2}, []),
        ({"mode": "tensor", "devices": 2}, []),
        ({"mode": "pipeline", "devices": 2}, []),
        ({"mode": "ddp", "devices": 2, "accumulate": 2}, ["dp"]),
        ({"mode": "hybrid", "devices": 16, "dp": 2, "cp": 2, "pp": 2, "tp": 2}, ["dp", "cp"]),
    ],
)
def test_ranks_that_have_other_targets_count_them_together_once_in_a_step(settings, axes):
    spec = Spec(**(TEXT | settings))
    plan, plain = modes.plan(prepare(spec)), modes.plan(prepare(spec.with_(masked=None)))
    for rank in range(plan.world_size):
        ops = plan.program(rank).ops
        told = ops[: len(axes)]
        assert [(op.kind, op.axis, op.bytes, op.payload) for op in told] == [
            ("all_reduce", axis, 8, "control") for axis in axes
        ]
        assert tuple(ops[len(axes) :]) == tuple(plain.program(rank).ops)


def test_it_does_not_apply_where_nothing_is_averaged_or_there_is_no_text():
    for settings, code in (({"mode": "local_sgd"}, "option_of_mode"), ({"model": "mlp"}, "does_not_apply")):
        with pytest.raises(SpecError) as refused:
            prepare(Spec(masked=0.5, **({"model": "gpt"} | settings)))
        assert (refused.value.code, refused.value.setting) == (code, "masked")


@pytest.mark.real
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "single", "devices": 1, "accumulate": 2},
        {"mode": "data_parallel", "devices": 2},
        {"mode": "ddp", "devices": 2, "accumulate": 2, "dataset": "synthetic"},
        {"mode": "zero1", "devices": 2, "optimizer": "adamw"},
        {"mode": "fsdp", "devices": 4, "clip": 0.1},
        {"mode": "hsdp", "devices": 4, "dp": 2},
        {"mode": "layer_split", "devices": 2},
        {"mode": "pipeline", "devices": 2, "masked": 0.8},
        {"mode": "sequence", "devices": 2},
        {"mode": "context", "devices": 2, "balance": "none"},
        {"mode": "expert", "devices": 2, "model": "moe"},
        {"mode": "hybrid", "devices": 8, "pp": 2, "fsdp": 2, "tp": 2},
        {"mode": "hybrid", "devices": 8, "dp": 2, "fsdp": 2, "cp": 2},
    ],
    ids=lambda settings: f"{settings['mode']}-{settings['devices']}",
)
def test_every_mode_weighs_targets_as_one_device_does(settings, launcher, runs_dir):
    result = finished(Spec(**(TEXT | settings), **BRIEF), launcher, runs_dir)
    holds(result)
    told = result["targets"]
    assert told["over_targets"] == pytest.approx(result["losses"][-1], rel=1e-5)
    if len(set(told["counted"])) > 1:
        assert abs(told["over_ranks"] - told["over_targets"]) > 1e-4


@pytest.mark.real
def test_the_mean_of_a_rank_s_own_targets_is_another_training(launcher, runs_dir, capsys):
    """The negative control: one rank of two divides by its own number. And both means are told."""
    result = finished(Spec(mode="ddp", devices=2, fault="mean@1:0", **TEXT, **BRIEF), launcher, runs_dir)
    parity = result["parity"]
    assert parity["ok"] is False and "loss_max_abs_diff" in parity["reason"] and "grad_max_rel_diff" in parity["reason"]
    assert result["conformance"]["ok"]
    assert main(["show", result["run_id"], "--runs-dir", str(runs_dir)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "targets, last step" in line]
    for value in (*result["targets"]["counted"], f"{result['targets']['over_ranks']:.4f}"):
        assert str(value) in line
