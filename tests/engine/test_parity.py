"""Parity is proved by numbers that can fail: each way of being wrong turns it red."""

from __future__ import annotations

import math

import pytest

from engine.spec import Spec

torch = pytest.importorskip("torch")

ALLOWED = {"loss_max_abs_diff": 1e-4, "grad_max_rel_diff": 1e-3, "param_max_abs_diff": 1e-4}


def verdict_of(**changes):
    from engine.real.parity import verdict

    report = {"held": ["a"], "losses": [2.0, 1.0], "grad": 1e-6, "param": 1e-7} | changes
    other = {"held": ["b"], "losses": [None, None], "grad": 0.0, "param": 0.0}
    return verdict([report, other], [2.0, 1.0], ["a", "b"], 2, ALLOWED)


def test_equal_numbers_are_in_parity():
    assert verdict_of() == {
        "ok": True, "loss_max_abs_diff": 0.0, "grad_max_rel_diff": 1e-6, "param_max_abs_diff": 1e-7,
        "tolerance": ALLOWED, "reason": None, "steps": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"losses": [2.0, 1.01]}, "loss_max_abs_diff"),
        ({"grad": 0.5}, "grad_max_rel_diff"),
        ({"param": 1e-3}, "param_max_abs_diff"),
        ({"grad": math.inf}, "grad_max_rel_diff"),
        ({"losses": [2.0, math.nan]}, "loss_max_abs_diff"),
        ({"held": []}, "no rank holds a"),
    ],
)
def test_each_difference_is_red_and_named(changes, named):
    result = verdict_of(**changes)
    assert result["ok"] is False
    assert named in result["reason"]


def test_a_norm_is_held_to_its_own_tolerance():
    """One rank's own norm for that of two equal shards is off by a factor of the square root of two."""
    from engine.real.parity import verdict

    allowed = ALLOWED | {"norm_max_rel_diff": 1e-3}
    report = {"held": ["a"], "losses": [2.0], "grad": 0.0, "param": 0.0}
    for norm, ok in ((1e-6, True), (1 - 2**-0.5, False), (math.inf, False)):
        result = verdict([report | {"norm": norm}, report | {"norm": 1e-7}], [2.0], ["a"], 1, allowed)
        assert result["ok"] is ok
        assert ok or "norm_max_rel_diff" in result["reason"]


def test_tokens_that_went_to_another_expert_are_counted_once():
    from engine.real.parity import strayed

    ranks = [{"block1": [[2, 1, 0], [1, 0, 0]]}, {"block1": [[1, 0, 3]], "block2": [[2, 2, 2]]}]
    assert strayed(ranks, {"block1": [[4, 1, 3]], "block2": [[2, 2, 2]]}) == 0
    assert strayed(ranks, {"block1": [[5, 1, 2]], "block2": [[2, 4, 0]]}) == 1 + 2
    assert strayed([{}, {}], {}) == 0


def test_a_nan_is_never_close():
    from engine.real.parity import relative

    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert relative(bad, good) == math.inf
    assert relative(good, bad) == math.inf


def test_gradients_are_compared_by_their_tensor_s_size():
    from engine.real.parity import relative

    reference = torch.tensor([1e-3, 2e-3])
    assert relative(reference * 1.5, reference) == pytest.approx(0.5)
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative(torch.ones(2), torch.zeros(2)) == math.inf


def test_the_tolerance_follows_the_optimizer():
    from engine.real.parity import tolerance

    assert tolerance(Spec(optimizer="sgd", lr=0.05))["param_max_abs_diff"] == 1e-4
    assert tolerance(Spec(optimizer="adamw", lr=1e-3))["param_max_abs_diff"] == pytest.approx(2.01e-4)
