"""Gradient compression in DDP: what is sent, in planned and real runs, and numbers held to what compression allows."""

from __future__ import annotations

import math

import pytest

from engine import modes
from engine.job import prepare
from engine.modes.ddp.compression import factors
from engine.spec import Spec
from tests.engine.proof import finished, holds

SMALL = {"model": "mlp", "layers": 2, "hidden": 32, "global_batch": 16}
TEXT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}


def sent(step: int = 2, **settings) -> list[tuple[str, int]]:
    plan = modes.plan(prepare(Spec(mode="ddp", devices=2, **SMALL | settings)), step)
    return [(op.part, op.bytes) for op in plan.program(0).ops if op.kind == "all_reduce"]


NUMBERS = 32 * 785 + 32 * 33 + 10 * 33


def test_fp16_sends_half_as_much_in_the_same_buckets():
    for settings in ({}, {"bucket_mb": 0.001}, {"accumulate": 4, "sync_every_microstep": True}):
        plain, half = sent(**settings), sent(compress="fp16", **settings)
        assert half == [(part, size // 2) for part, size in plain]
    assert sum(size for _, size in sent(compress="fp16")) == 2 * NUMBERS


def test_powersgd_sends_two_factors_and_the_rest_from_the_third_reduction_on():
    """Matrices of 32 x 784 and 32 x 32; that of 10 x 32 too, with rank 1: 2 x 42 < 320, but 8 x 42 > 320."""
    rest = 32 + 32 + 10
    for rank, left, right, kept in ((1, 32 + 32 + 10, 784 + 32 + 32, rest), (4, 4 * 64, 4 * 816, rest + 320)):
        found = sent(compress="powersgd", compress_rank=rank)
        assert found == [("bucket0.rest", 4 * kept), ("bucket0.P", 4 * left), ("bucket0.Q", 4 * right)]
    assert [sent(step, compress="powersgd") for step in (0, 1)] == [[("bucket0", 4 * NUMBERS)]] * 2


@pytest.mark.parametrize(
    ("shape", "rank", "both"),
    [
        ((32, 784), 2, (64, 1568)),
        ((50, 20, 5, 5), 2, (100, 1000)),  # a convolution is a matrix of its outputs
        ((5,), 1, None),
        ((8, 8), 2, None),  # 2 x (8 + 8) x 2 is not less than 64
        ((8, 9), 2, (16, 18)),  # 68 < 72
    ],
)
def test_what_would_hardly_get_smaller_is_sent_whole(shape, rank, both):
    assert factors(shape, rank) == both


def test_torch_agrees_on_what_would():
    hook = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    for rows in range(1, 40, 3):
        for columns in range(1, 40, 4):
            for rank in (1, 2, 3):
                least = min(rows, columns, rank)
                whole = not hook._should_compress(rows, columns, least, 2)[0]
                assert (factors((rows, columns), rank) is None) == whole


def test_compression_keeps_what_it_left_out():
    plain, powersgd = (
        modes.plan(prepare(Spec(mode="ddp", compress=c, **SMALL))).program(0) for c in ("none", "powersgd")
    )
    assert "compression" not in plain.memory
    whole = 4 * NUMBERS
    extra = sum(size for _, size in sent(compress="powersgd"))
    assert powersgd.memory["compression"] == 2 * whole + extra


def test_the_simulated_powersgd_is_exact_where_matrices_are_of_that_rank():
    """Four ranks' gradients of rank 1 with the same rows sum to one of rank 1; and what it leaves out comes later."""
    torch = pytest.importorskip("torch")
    from engine.real.powersgd import PowerSGD

    job = prepare(Spec(mode="ddp", devices=4, compress="powersgd", compress_rank=1, **SMALL))
    torch.manual_seed(1)
    names = {f"{layer.name}.{name}": shape for layer in job.layers for name, shape in layer.params}

    def gradients() -> dict:
        return {n: torch.randn(s[0], 1) @ row[n] if len(s) == 2 else torch.randn(s) for n, s in names.items()}

    row = {n: torch.randn(1, s[1]) for n, s in names.items() if len(s) == 2}
    simulated = PowerSGD(job)
    for _ in range(4):
        of_ranks = [gradients() for _ in range(4)]
        result = simulated.reduce(of_ranks)
        for name, value in result.items():
            mean = torch.stack([each[name] for each in of_ranks]).mean(0)
            assert torch.allclose(value, mean, atol=1e-5)
    for name in names:  # what all ranks left out is the difference from the mean, and sums to nothing here
        assert torch.stack([each[name] for each in simulated.errors]).mean(0).abs().max() < 1e-5


@pytest.mark.real
@pytest.mark.parametrize(
    "settings",
    [SMALL | {"bucket_mb": 0.01, "accumulate": 2}, TEXT | {"optimizer": "adamw", "devices": 3, "global_batch": 12}],
)
def test_real_runs_in_fp16_send_half_and_differ_by_its_rounding(settings, launcher, runs_dir):
    spec = Spec(mode="ddp", compress="fp16", steps=4, device="cpu", **settings)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["parity"]["grad_max_rel_diff"] > 1e-5  # it did compress


@pytest.mark.real
@pytest.mark.parametrize(
    ("devices", "settings"),
    [(2, SMALL | {"compress_rank": 1}), (4, TEXT | {"compress_rank": 4, "accumulate": 2, "clip": 0.3})],
)
def test_real_powersgd_equals_its_simulation_and_sends_what_was_planned(devices, settings, launcher, runs_dir):
    spec = Spec(mode="ddp", devices=devices, compress="powersgd", steps=6, device="cpu", **settings)
    result = finished(spec, launcher, runs_dir)
    parity, conformance = result["parity"], result["conformance"]
    assert parity["ok"] is None and "by design" in parity["reason"]
    assert parity["grad_max_rel_diff"] > 0.5
    assert parity["exact"]["ok"], parity["exact"]
    assert parity["exact"]["steps"] == 5 and parity["exact"]["grad_max_rel_diff"] < 1e-4
    assert conformance["ok"], conformance["first_difference"]
    assert conformance["steps"] == 6
    assert all(math.isfinite(loss) for loss in result["losses"])


@pytest.mark.real
def test_one_rank_s_wrong_gradient_is_seen_under_powersgd(launcher, runs_dir):
    spec = Spec(mode="ddp", **SMALL, compress="powersgd", fault="gradient@1:4", steps=5, device="cpu")
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False and parity["exact"]["ok"] is False
