"""bf16: two bytes of everything that two bytes are kept or sent of, and gradients as near as such numbers can be."""

from __future__ import annotations

import pytest

from engine import modes
from engine.cost.machine import machine
from engine.job import prepare
from engine.model.shapes import FP32
from engine.modes import MODES
from engine.predict import predict
from engine.spec import Spec
from tests.engine.proof import BRIEF, finished, holds

SMALL = {"model": "mlp", "layers": 2, "hidden": 32, "global_batch": 16}
TEXT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}
ROUTED = TEXT | {"model": "moe"}


def plans_of(mode: str) -> list:
    settings = {"sequence": TEXT, "context": TEXT, "expert": ROUTED}.get(mode, SMALL)
    spec = Spec(mode=mode, devices=1 if mode == "single" else 2, clip=1.0, **settings)
    return [modes.plan(prepare(spec.with_(precision=precision))) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize("mode", MODES)
def test_all_that_is_kept_or_sent_of_the_model_is_half_as_large(mode):
    whole, half = plans_of(mode)
    for rank in range(whole.world_size):
        one, other = whole.program(rank), half.program(rank)
        assert {k: v // 2 for k, v in one.memory.items()} == other.memory
        for a, b in zip(one.ops, other.ops, strict=True):
            # Norms are summed in fp32, and so is what tensor parallelism needs for the loss: a number a token. How many
            # tokens an expert gets is a whole number.
            in_fp32 = a.part == "norm" or a.part in ("head.logits", "head.largest", "head.total")
            if a.axis and not (in_fp32 and a.kind == "all_reduce") and not a.part.endswith(".counts"):
                assert b.bytes * 2 == a.bytes > 0, (a, b)


def test_activations_are_half_as_large_but_for_what_is_kept_in_fp32():
    """A block makes 15 numbers of each hidden feature, and in fp32 for its two norms copies of their inputs, values
    before the weight and scales, and each head's log-sum-exp; an embedding what it puts out. Of these the block keeps
    all but its output, and the embedding nothing."""
    layers = prepare(Spec(mode="single", devices=1, **TEXT, precision="bf16")).layers
    assert layers[1].saved == 16 * (2 * 15 * 32 + FP32 * (2 * (2 * 32 + 1) + 2))
    assert layers[1].copied == layers[0].copied == layers[0].saved == 16 * 2 * 32
    in_fp32 = prepare(Spec(mode="single", devices=1, **TEXT)).layers
    assert layers[-1].saved - in_fp32[-1].saved == 16 * (FP32 - 2) * 32  # the copy, less half of the output
    assert [layer.copied for layer in in_fp32] == [0] * len(in_fp32)


def test_owners_of_nothing_broadcast_a_number_in_fp32():
    job = prepare(Spec(mode="zero1", devices=8, model="mlp", layers=1, precision="bf16"))
    sizes = [op.bytes for op in modes.plan(job).program(7).ops if op.kind == "broadcast"]
    assert sizes == [2 * 784 * 256, 2 * 2560, 2 * 256, 2 * 10, 4, 4, 4, 4]


def test_gpus_multiply_twice_as_fast_in_bf16():
    assert machine("h100").at("bf16").flop_rate == 2 * machine("h100").flop_rate
    assert machine("h100").at("fp32") == machine("h100")
    spec = Spec(mode="fsdp", devices=8, model="gpt", layers=8, hidden=2048, context=512, heads=16, machine="h100")
    assert predict(spec.with_(precision="bf16")).step_time < 0.6 * predict(spec).step_time


def test_the_tolerance_tells_rounding_from_a_mistake():
    """One device in fp32 and the same in bf16, step 0: rounding is within the tolerance, a gradient 1.5 times as large
    is not."""
    torch = pytest.importorskip("torch")
    from engine.real import models
    from engine.real.data import Batches
    from engine.real.parity import apart, sizes, tolerance

    gradients = []
    for precision in ("fp32", "bf16"):
        job = prepare(Spec(mode="single", devices=1, model="cnn", global_batch=16, precision=precision))
        model = models.build(job)
        inputs, targets = Batches(job, 0, 1, torch.device("cpu"))(0)
        models.loss_of(model(inputs), targets).backward()
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    (whole, rounded), allowed = gradients, tolerance(job.spec)["grad_norm_rel_diff"]
    scale = sizes(whole)
    assert 0 < max(apart(rounded[n], whole[n], scale[n]) for n in whole) < allowed
    assert all(apart(1.5 * whole[n], whole[n], scale[n]) > 2 * allowed for n in whole)
    assert apart(whole["fc1.bias"] * float("nan"), whole["fc1.bias"], scale["fc1.bias"]) == float("inf")


def test_an_expert_s_gradient_is_held_against_those_of_its_block():
    """Of an expert with hardly a token one token more is much, and nothing beside what all get."""
    torch = pytest.importorskip("torch")
    from engine.real.parity import sizes, tolerance

    names = {"block1.experts.0.up.weight": 7.0, "block1.experts.1.up.weight": 1.0}
    others = {"block1.experts.0.down.weight": 3.0, "block10.experts.0.up.weight": 4.0, "block1.up.weight": 2.0}
    found = sizes({name: torch.full((1,), value) for name, value in (names | others).items()})
    assert found == dict.fromkeys(names, pytest.approx(5.0)) | others
    for tokens, allowed in ((1024, 2 * (4 * 2**-9) ** 0.5), (64, 2 * 64**-0.5)):  # of an expert
        spec = prepare(Spec(mode="single", devices=1, model="moe", global_batch=tokens // 16, precision="bf16")).spec
        assert tolerance(spec)["grad_norm_rel_diff"] == pytest.approx(allowed)


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("ddp", {"model": "cnn", "global_batch": 16}),
        ("zero1", TEXT | {"optimizer": "adamw", "clip": 0.1}),
        ("fsdp", SMALL | {"accumulate": 2}),
        ("pipeline", {"model": "cnn", "global_batch": 16}),
        ("sequence", TEXT | {"optimizer": "adamw"}),
        ("context", TEXT),
        ("context", TEXT | {"attention": "all_gather"}),
        ("context", TEXT | {"attention": "ulysses"}),
        ("ddp", ROUTED),
        ("fsdp", ROUTED | {"optimizer": "adamw", "recompute": "full"}),
        ("pipeline", ROUTED | {"schedule": "interleaved_zero_bubble"}),
        ("expert", ROUTED | {"clip": 0.1, "accumulate": 2}),
    ],
)
def test_real_runs_in_bf16_equal_one_device_in_bf16(mode, settings, launcher, runs_dir):
    spec = Spec(mode=mode, devices=2, **settings, precision="bf16", **BRIEF)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "tp": 2},
        {"fsdp": 2, "tp": 2},
        {"dp": 2, "pp": 2},
        {"fsdp": 2, "tp": 2, "sequence_parallel": True},
        {"fsdp": 2, "cp": 2},
        {"dp": 2, "ep": 2},
        {"fsdp": 2, "ep": 2},
        {"pp": 2, "ep": 2},
    ],
)
def test_a_mesh_in_bf16_equals_one_device_in_bf16(degrees, launcher, runs_dir):
    model = ROUTED if "ep" in degrees else TEXT
    spec = Spec(mode="hybrid", devices=4, **model, **degrees, precision="bf16", **BRIEF)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize(("mode", "model"), [("ddp", SMALL), ("expert", ROUTED)])
def test_a_wrong_gradient_is_seen_in_bf16(mode, model, launcher, runs_dir):
    spec = Spec(mode=mode, **model, precision="bf16", fault="gradient@1:2", steps=4, device="cpu")
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False and "grad_norm_rel_diff" in parity["reason"]
