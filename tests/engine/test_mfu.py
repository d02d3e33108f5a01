"""MFU is what published formulas of a decoder's FLOPs give, in both conventions; and null where no peak is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.analysis.mfu import model_flops, planned_flops, utilisation
from engine.cost.kernels import attention_flops
from engine.cost.machine import machine
from engine.job import prepare
from engine.predict import predict
from engine.spec import Spec

GPT = Spec(mode="ddp", devices=4, model="gpt", layers=3, hidden=64, heads=4, context=128, machine="a100")


@pytest.mark.parametrize("flash", [True, False])
def test_model_flops_are_those_of_the_published_formula(flash):
    """72 B l s h^2 (1 + s / 6h + V / 12 l h), without recomputation (Narayanan et al. 2021, arXiv:2104.04473, section
    3.2.1, has 96 with all of it); of it 12 B l s^2 h are attention's, of which a causal mask leaves half."""
    job = prepare(GPT.with_(flash=flash))
    batch, layers, hidden, context = job.spec.global_batch, 3, 64, 128
    vocabulary = next(shape[0] for name, shape in job.layers[0].params if name == "token.weight")
    full = 72 * batch * layers * context * hidden**2
    full *= 1 + context / (6 * hidden) + vocabulary / (12 * layers * hidden)
    attention = 12 * batch * layers * context**2 * hidden
    assert model_flops(job.layers, batch) == (pytest.approx(full), pytest.approx(full - attention / 2))


def test_models_without_attention_have_one_mfu():
    job = prepare(Spec(mode="ddp", devices=2, model="cnn"))
    assert sum(attention_flops(layer.kernels) for layer in job.layers) == 0
    full, causal = model_flops(job.layers, 10)
    assert full == causal == 3 * 10 * sum(layer.flops for layer in job.layers)


@pytest.mark.parametrize("devices", [1, 4])
def test_mfu_is_1_where_all_time_is_spent_at_the_peak(devices):
    job = prepare(GPT)
    on = machine("a100")
    full, causal = model_flops(job.layers, 8)
    seconds = full / on.peak_flop_rate / devices
    found = utilisation(job.layers, 8, 4 / 3 * full, seconds, devices, on)
    assert (found["full"], found["hfu"]) == (pytest.approx(1), pytest.approx(4 / 3))
    assert found["causal"] == pytest.approx(causal / full) and found["reason"] is None
    assert found["flop_rate"] == pytest.approx(on.peak_flop_rate)
    slower = utilisation(job.layers, 8, full, 2 * seconds, devices, on)
    assert slower["full"] == slower["hfu"] == pytest.approx(0.5)


def test_a_prediction_tells_mfu_and_recomputation_adds_to_hfu_alone():
    plain, again = (predict(GPT.with_(recompute=how)) for how in ("none", "full"))
    found = [each.summary()["mfu"] for each in (plain, again)]
    assert found[0]["model_flops"] == found[1]["model_flops"] == found[0]["planned_flops"] < found[1]["planned_flops"]
    assert 0 < found[0]["causal"] < found[0]["full"] < 1
    assert found[0]["hfu"] == found[0]["full"] and found[1]["hfu"] > found[1]["full"]
    assert planned_flops(plain.simulation.graph) == 4 * sum(
        op.flops for op in plain.plan.program(0).ops if op.kind in ("forward", "backward")
    )


def test_in_bf16_the_peak_is_that_of_bf16():
    one, two = (predict(GPT.with_(precision=name)).summary()["mfu"]["peak_flop_rate"] for name in ("fp32", "bf16"))
    assert two == machine("a100").bf16_gain * one


@pytest.mark.parametrize(("name", "seconds"), [("local", 1.0), ("unit", 1.0), ("a100", None), ("a100", 0.0)])
def test_what_is_not_known_is_null_with_its_reason(name, seconds):
    job = prepare(GPT)
    found = utilisation(job.layers, 8, 1.0, seconds, 4, machine(name))
    assert found["full"] is found["causal"] is found["hfu"] is None and found["reason"]
    assert found["model_flops"] > 0
    assert utilisation(job.layers, 8, 1.0, 1.0, 4, None)["reason"] == "the machine's peak is not known"


def test_a_higher_peak_makes_it_a_smaller_part():
    job, on = prepare(GPT), machine("a100")
    double = replace(on, peak_flop_rate=2 * on.peak_flop_rate)
    one, two = (utilisation(job.layers, 8, 1.0, 1.0, 4, each)["full"] for each in (on, double))
    assert two == pytest.approx(one / 2)


def test_frozen_layers_count_what_is_computed_of_them():
    """Of 3 blocks the first has a forward pass alone, the second all, the third no gradients of its matrices, of 12 h^2
    numbers; attention has no weights: as the plan does."""
    frozen = GPT.with_(freeze="embed,block1,block3")
    found, whole = (predict(spec).summary()["mfu"] for spec in (frozen, GPT))
    assert found["planned_flops"] == found["model_flops"]
    tokens, attention = frozen.global_batch * 128, frozen.global_batch * 4 * 128 * 128 * 64
    matrices = 2 * tokens * 12 * 64 * 64
    assert whole["model_flops"] - found["model_flops"] == 2 * (matrices + attention) + matrices
    assert whole["causal_model_flops"] - found["causal_model_flops"] == 2 * (matrices + attention / 2) + matrices
