"""Local SGD: weights averaged every k steps, never judged by one device's numbers, and held to its own simulation."""

from __future__ import annotations

import pytest

from engine import modes
from engine.cost.catalogue import MACHINES
from engine.cost.collectives import communication_seconds
from engine.job import prepare
from engine.predict import predict
from engine.spec import Spec
from tests.engine.proof import finished, holds_by_design

SMALL = {"model": "mlp", "layers": 2, "hidden": 32, "global_batch": 16}


def job_of(**settings):
    return prepare(Spec(mode="local_sgd", devices=2, **SMALL | settings))


@pytest.mark.parametrize("every", [1, 2, 3, 4, 7])
def test_weights_are_averaged_after_every_kth_step_and_nothing_else_is_sent(every):
    job = job_of(sync_every=every)
    weights = sum(layer.param_bytes for layer in job.layers)
    for step in range(4 * every + 3):
        sent = [op for op in modes.plan(job, step).program(0).ops if op.axis]
        assert [(op.kind, op.payload, op.bytes) for op in sent] == (
            [("all_reduce", "weights", weights)] if (step + 1) % every == 0 else []
        )


def test_the_step_that_is_shown_is_one_that_averages():
    assert modes.plan(job_of()).program(0).ops[-1].part == "average"
    assert modes.plan(job_of(sync_every=1)).program(0).ops[-1].part == "average"
    assert modes.plan(prepare(Spec(mode="ddp"))) == modes.plan(prepare(Spec(mode="ddp")), 2)


@pytest.mark.parametrize("paced", [None, "h100"])
def test_the_rarer_ranks_meet_the_less_a_step_takes(paced):
    """By all of what weights take round, in the steps without: nothing else of a step is on the way."""
    known = {"model": "gpt", "machine": "h100", "devices": 4, "global_batch": 32}
    known |= {"paced": paced, "dilation": 100} if paced else {}
    times = {}
    for every in (1, 2, 4, 100):
        found = predict(Spec(mode="local_sgd", sync_every=every, **known))
        (average,) = [op for op in found.plan.program(0).ops if op.axis]
        away = communication_seconds(average, range(4), MACHINES["h100"]) * (found.dilation or 1)
        assert found.mean_step_time == pytest.approx(found.step_time - away * (1 - 1 / every))
        times[every] = found.summary()["mean_step_time"]
        assert found.summary()["samples_per_second"] == pytest.approx(32 / times[every])
    assert times[1] > times[2] > times[4] > times[100] > 0


def test_the_first_average_is_among_the_steps_compared():
    assert job_of(steps=20).parity_steps == 5
    assert job_of(steps=20, sync_every=2).parity_steps == 3
    assert job_of(steps=4).parity_steps == 4
    assert job_of(steps=20, parity_steps=0).parity_steps == 0
    assert job_of(steps=20, sync_every=1000).parity_steps == 3
    assert prepare(Spec(mode="ddp")).parity_steps == 3


def test_a_design_is_never_simply_right_but_can_be_wrong():
    pytest.importorskip("torch")
    from engine.real.parity import design

    far = {"ok": False, "loss_max_abs_diff": 0.1, "reason": "loss_max_abs_diff is 0.1", "steps": 3}
    good, bad = {"ok": True, "reason": None}, {"ok": False, "reason": "grad_max_rel_diff is 0.5"}
    assert design(far, good, "by design") == far | {"ok": None, "reason": "by design", "exact": good}
    red = design(far, bad, "by design")
    assert red["ok"] is False and bad["reason"] in red["reason"]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_an_average_in_bf16_is_rounded_where_the_ranks_round_it(ranks):
    """A ring by hand: in each turn a rank sends a part of its sum to the one before it, which adds its own."""
    torch = pytest.importorskip("torch")
    from engine.real.reference import averaged

    torch.manual_seed(ranks)
    vectors = [torch.randn(2 * 8 * ranks - 3).bfloat16() for _ in range(ranks)]
    held = [[(part.float() / ranks).bfloat16() for part in vector.split(16)] for vector in vectors]
    for turn in range(1, ranks):
        parts = [(rank + turn) % ranks for rank in range(ranks)]
        sent = [held[rank][part].float() for rank, part in enumerate(parts)]
        for rank, part in enumerate(parts):
            held[rank - 1][part] = (sent[rank] + held[rank - 1][part].float()).bfloat16()
    whole = torch.cat([held[part][part] for part in range(ranks)])
    assert torch.equal(averaged(vectors), whole)
    assert torch.equal(whole, torch.stack(vectors).mean(0)) == (ranks == 2)


@pytest.mark.real
@pytest.mark.parametrize(
    ("devices", "settings"),
    [(2, {"sync_every": 2}), (4, {"sync_every": 3, "optimizer": "adamw", "clip": 0.3, "accumulate": 2})],
)
def test_a_real_run_equals_its_simulation_and_not_one_device(devices, settings, launcher, runs_dir):
    spec = Spec(mode="local_sgd", devices=devices, **SMALL, **settings, steps=5, device="cpu")
    result = finished(spec, launcher, runs_dir)
    parity, conformance = result["parity"], result["conformance"]
    assert parity["ok"] is None and "by design" in parity["reason"]
    assert parity["param_max_abs_diff"] > 10 * parity["tolerance"]["param_max_abs_diff"]
    holds_by_design(result)
    assert parity["exact"]["grad_max_rel_diff"] < 1e-5
    assert conformance["ok"], conformance["first_difference"]
    assert conformance["steps"] == 5
    assert result["validation_accuracy"] is not None


@pytest.mark.real
def test_in_bf16_a_real_run_equals_its_simulation_to_the_last_bit(launcher, runs_dir):
    """Embeddings of 2 and more are there, of which the last bit is 2^-6: twice what is allowed."""
    small = {"model": "gpt", "layers": 1, "hidden": 16, "heads": 2, "context": 16, "global_batch": 12}
    spec = Spec(mode="local_sgd", devices=3, **small, sync_every=2, precision="bf16", steps=4, device="cpu")
    result = finished(spec, launcher, runs_dir)
    holds_by_design(result)
    assert result["parity"]["exact"]["param_max_abs_diff"] == 0


@pytest.mark.real
def test_one_rank_s_wrong_gradient_is_wrong_by_any_design(launcher, runs_dir):
    spec = Spec(mode="local_sgd", **SMALL, sync_every=2, fault="gradient@1:1", steps=4, device="cpu")
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False and parity["exact"]["ok"] is False
    assert parity["exact"]["grad_max_rel_diff"] > 0.4
