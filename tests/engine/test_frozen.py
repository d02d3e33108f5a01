"""Layers that are not trained: nothing is computed, sent or kept for their gradients, and their weights stay."""

from __future__ import annotations

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.job import prepare
from engine.spec import Spec
from tests.engine.proof import finished, holds

MLP = {"model": "mlp", "layers": 4, "hidden": 16, "global_batch": 24}  # fc1, fc2, fc3, fc4, out
GPT = {"model": "gpt", "layers": 2, "hidden": 16, "heads": 2, "context": 16}
# Of fc3 and out, whose gradients alone are made: 16 x 16 + 16 and 16 x 10 + 10 numbers of four bytes.
LEARNED = 4 * (16 * 16 + 16 + 16 * 10 + 10)
FREEZE = "fc1,fc2,fc4"


def plan_of(mode: str, devices: int, **settings):
    return modes.plan(prepare(Spec(mode=mode, devices=devices, **MLP | {"freeze": FREEZE} | settings)))


@pytest.mark.parametrize(("mode", "devices"), [("single", 1), ("ddp", 2)])
def test_nothing_goes_back_before_the_first_layer_that_is_trained(mode, devices):
    program = plan_of(mode, devices).program(0)
    ahead = {op.part: op.flops for op in program.ops if op.kind == "forward"}
    back = {op.part: op.flops for op in program.ops if op.kind == "backward"}
    assert list(back) == ["out", "fc4", "fc3"]
    assert [back[part] / ahead[part] for part in back] == [2, 1, 2]  # of a frozen layer for its input alone
    assert (program.memory["gradients"], program.memory["optimizer"]) == (LEARNED, LEARNED)
    kept = {op.part: op.saved for op in program.ops if op.kind == "forward"}
    assert kept["fc1"] == 0 and kept["fc2"] == 4 * 16 * 24 / devices  # the input of fc3


def test_only_gradients_that_are_made_are_reduced():
    (bucket,) = [op for op in plan_of("ddp", 2).program(0).ops if op.kind == "all_reduce"]
    assert bucket.bytes == LEARNED
    sent = [op for op in plan_of("zero1", 2).program(1).ops if op.kind == "broadcast"]
    assert sum(op.bytes for op in sent) == LEARNED
    assert sum(program.memory["optimizer"] for program in plan_of("zero1", 2).programs) == LEARNED
    sharded = plan_of("fsdp", 2).program(0)
    assert [op.part for op in sharded.ops if op.kind == "reduce_scatter"] == ["out", "fc3"]
    assert sharded.memory["optimizer"] == sharded.memory["gradients"] == LEARNED / 2
    gathers = [op.part for op in sharded.ops if op.kind == "all_gather"]
    assert gathers[5:] == [
        "out",
        "fc4",
        "fc3",
        "fc2",
    ]  # the last one for nothing: FSDP prefetches by the order of forward


@pytest.mark.parametrize("mode", ["layer_split", "pipeline"])
@pytest.mark.parametrize(("freeze", "asks"), [(FREEZE, [False, False]), ("fc1", [False, True]), ("fc2", [True, True])])
def test_stages_send_no_gradient_that_nobody_needs(mode, freeze, asks):
    plan = plan_of(mode, 3, freeze=freeze, split=(1, 1, 3))
    for stage in (0, 1):  # stage 2 has fc3
        down = [op for op in plan.program(stage + 1).ops if op.kind == "send" and op.payload == "gradient"]
        up = [op for op in plan.program(stage).ops if op.kind == "recv" and op.payload == "gradient"]
        assert (len(down) > 0, len(up) > 0) == (asks[stage], asks[stage])
        assert len(down) == len(up)


@pytest.mark.parametrize(
    ("settings", "code", "setting"),
    [
        ({"freeze": "fc9"}, "bad_freeze", "freeze"),
        ({"freeze": "fc1,fc2,fc3,fc4,out"}, "bad_freeze", "freeze"),
        ({"freeze": "fc1", "compress": "fp16"}, "exclusive", "freeze"),
        ({"freeze": "fc1", "mode": "pipeline", "schedule": "zbv"}, "schedule_of_frozen", "schedule"),
        ({"freeze": "fc1", "mode": "pipeline", "compile_stage": "torchscript"}, "exclusive", "freeze"),
        ({"freeze": "fc1", "mode": "tensor"}, "does_not_apply", "freeze"),
    ],
)
def test_what_cannot_be_frozen_is_refused(settings, code, setting):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(**MLP | settings))
    assert (refused.value.code, refused.value.setting) == (code, setting)
    for value in refused.value.suggest:
        prepare(Spec(**MLP | settings | {setting: value}))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_frozen_weights_stay_to_the_last_bit_and_the_others_learn(optimizer, tmp_path):
    torch = pytest.importorskip("torch")
    from engine.real import models
    from engine.real.reference import one_device

    job = prepare(Spec(mode="single", devices=1, freeze=FREEZE, optimizer=optimizer, **MLP))
    before = {name: p.detach().clone() for name, p in models.build(job).named_parameters()}
    after = one_device(job, 3, tmp_path).parameters
    moved = {name.partition(".")[0] for name, p in after.items() if not torch.equal(p, before[name])}
    assert moved == {"fc3", "out"}


DECODER = {"layers": 3, "hidden": 32, "heads": 2, "context": 16, "dataset": "synthetic"}
KEPT = [
    *[({"model": "gpt"}, freeze) for freeze in ("block2", "head", "embed", "embed,block1", "embed,block2,head")],
    *[({"model": "gpt", "precision": "bf16"}, freeze) for freeze in ("block2", "embed", "embed,block1,block2,block3")],
    *[({"model": "moe", "experts": 4}, freeze) for freeze in ("block2", "embed,block1,block3")],
    *[({"model": "mlp", "layers": 3}, freeze) for freeze in ("fc2", "fc1,fc3")],
    *[({"model": "cnn"}, freeze) for freeze in ("conv1", "conv2", "conv2,fc1", "conv1,fc1", "fc2")],
]


@pytest.mark.parametrize(("settings", "freeze"), KEPT, ids=[f"{case['model']}-{freeze}" for case, freeze in KEPT])
def test_what_is_kept_is_what_autograd_saves(settings, freeze):
    """Each tensor once, without weights, the batch and its places; frozen layers keep less than trained ones would."""
    torch = pytest.importorskip("torch")
    from engine.real import models
    from engine.real.data import Batches

    of_model = DECODER if settings["model"] in ("gpt", "moe") else {}
    spec = Spec(mode="single", devices=1, global_batch=8, **(of_model | settings))
    job = prepare(spec.with_(freeze=freeze))
    model, (x, y) = models.build(job), Batches(job, 0, 1, torch.device("cpu"))(0)
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, y, *model.parameters())}
    saved = {}

    def see(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = models.loss_of(model(x), y)
    assert loss.requires_grad
    planned, trained = (
        sum(op.saved for op in modes.plan(each).program(0).ops if op.kind == "forward") for each in (job, prepare(spec))
    )
    assert planned == pytest.approx(sum(storage.nbytes() for storage in saved.values()), abs=8 * 16 + 4)
    assert planned <= trained
    assert planned < trained or not of_model  # a ReLU and a convolution keep what they need in any case


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "devices", "settings"),
    [
        ("ddp", 2, MLP | {"freeze": FREEZE}),
        ("zero1", 2, GPT | {"global_batch": 8, "freeze": "embed,head", "optimizer": "adamw"}),
        ("fsdp", 3, GPT | {"global_batch": 6, "freeze": "embed,block1", "clip": 0.1}),
        ("layer_split", 3, MLP | {"freeze": "fc1,fc2", "accumulate": 2, "split": (1, 2, 2)}),
        ("pipeline", 3, MLP | {"freeze": FREEZE, "optimizer": "adamw", "clip": 0.1, "split": (1, 1, 3)}),
        ("pipeline", 4, GPT | {"global_batch": 8, "freeze": "embed,block1", "recompute": "full", "schedule": "gpipe"}),
    ],
)
def test_a_real_run_does_what_was_planned_and_equals_one_device(mode, devices, settings, launcher, runs_dir):
    """pytorch#153484, PiPPy PR#1029: stages between which no gradient goes."""
    holds(finished(Spec(mode=mode, devices=devices, steps=3, device="cpu", **settings), launcher, runs_dir))
