"""The chain of layers that plans are made of is the chain of modules that is trained."""

from __future__ import annotations

import pytest

from engine.job import prepare
from engine.spec import Spec

torch = pytest.importorskip("torch")

SPECS = [
    Spec(mode="single", devices=1, model="cnn"),
    Spec(mode="single", devices=1, model="mlp", layers=3, hidden=32),
    Spec(mode="single", devices=1, model="mlp", layers=1, hidden=7),
    Spec(mode="single", devices=1, model="gpt", layers=2, hidden=24, heads=3, context=10),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.model}{spec.layers or ''}")
def test_shapes_are_those_of_the_modules(spec):
    from engine.real import models

    job = prepare(spec)
    model = models.build(job)
    planned = [(f"{layer.name}.{name}", shape) for layer in job.layers for name, shape in layer.params]
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == planned
    x = torch.zeros(2, 1, 28, 28) if spec.model != "gpt" else torch.zeros(2, spec.context, dtype=torch.long)
    for layer, module in zip(job.layers, model, strict=True):
        x = module(x)
        assert tuple(x.shape[1:]) == layer.output


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.model}{spec.layers or ''}")
def test_flops_are_those_that_torch_counts(spec):
    """torch's own counter sees every matmul and convolution, and attention where it runs as two matmuls."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from engine.real import models

    job = prepare(spec)
    model = models.build(job)
    x = torch.zeros(1, 1, 28, 28) if spec.model != "gpt" else torch.zeros(1, spec.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x)
    assert counter.get_total_flops() == sum(layer.flops for layer in job.layers)


def test_the_same_seed_gives_the_same_weights_and_another_does_not():
    from engine.real import models

    one, same, other = (models.build(prepare(SPECS[0].with_(seed=seed))).fc1.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_replicas_share_out_the_batches_of_one(replicas):
    """What all replicas see in a step is what one would see, in every epoch; epochs differ in order."""
    from engine.real.data import Batches

    job = prepare(Spec(mode="ddp", devices=replicas, global_batch=48, dataset="synthetic", model="mlp"))
    one = Batches(job, 0, 1, torch.device("cpu"))
    parts = [Batches(job, r, replicas, torch.device("cpu")) for r in range(replicas)]
    for step in (0, job.batches_per_epoch - 1, job.batches_per_epoch):
        whole = one(step)[0].flatten(1).sum(1).sort().values
        shared = torch.cat([part(step)[0] for part in parts]).flatten(1).sum(1).sort().values
        assert torch.equal(whole, shared)
    assert not torch.equal(one(0)[0], one(job.batches_per_epoch)[0])
