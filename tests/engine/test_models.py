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
    Spec(mode="single", devices=1, model="moe", layers=1, hidden=24, heads=3, context=10, experts=5, top_k=3),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.model}{spec.layers or ''}")
def test_shapes_are_those_of_the_modules(spec):
    from engine.real import models

    job = prepare(spec)
    model = models.build(job)
    planned = [(f"{layer.name}.{name}", shape) for layer in job.layers for name, shape in layer.params]
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == planned
    x = torch.zeros(2, spec.context, dtype=torch.long) if spec.context else torch.zeros(2, 1, 28, 28)
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
    x = torch.zeros(1, spec.context, dtype=torch.long) if spec.context else torch.zeros(1, 1, 28, 28)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x)
    assert counter.get_total_flops() == sum(layer.flops for layer in job.layers)


def block_of(**settings):
    from engine.real import models

    job = prepare(Spec(mode="single", devices=1, model="moe", layers=1, hidden=16, heads=2, **settings))
    return models.build(job).block1, torch.randn(3, job.spec.context, 16, requires_grad=True)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_token_gets_what_its_best_experts_say_by_their_probabilities(top_k):
    """Token by token, with every expert asked: no sorting, no grouping."""
    block, x = block_of(context=7, experts=5, top_k=top_k)
    wanted = torch.zeros_like(x)
    for place in [(n, c) for n in range(3) for c in range(7)]:
        logits = block.router.weight @ x[place]
        probability = logits.exp() / logits.exp().sum()
        for e in sorted(range(5), key=lambda e: -probability[e])[:top_k]:
            wanted[place] = wanted[place] + probability[e] * block.experts.get_submodule(str(e))(x[place])
    assert torch.allclose(block.mlp(x), wanted, atol=1e-6)


def test_an_expert_that_no_token_chose_has_a_gradient_of_zeros():
    from engine.real import models

    block, x = block_of(context=2, experts=8, top_k=1)
    with models.counting() as routed:
        block(x).sum().backward()
    unused = [e for e, count in enumerate(routed["block1"][0]) if count == 0]
    assert len(unused) >= 2 and sum(map(sum, routed["block1"])) == 6
    for e, expert in enumerate(block.experts.children()):
        largest = {parameter.grad.abs().max().item() for parameter in expert.parameters()}
        assert largest == {0.0} if e in unused else 0.0 not in largest


def test_a_router_learns_where_a_token_has_just_one_expert():
    """Its probability is not divided by the sum over the chosen: that would be 1, whatever the router said."""
    block, x = block_of(context=4, experts=4, top_k=1)
    block(x).square().sum().backward()
    assert block.router.weight.grad.abs().max() > 0


def test_passes_are_counted_while_somebody_counts_and_a_recomputed_one_is_not():
    from torch.utils.checkpoint import checkpoint

    from engine.real import models

    block, x = block_of(context=4, experts=4, top_k=2)
    block(x)
    with models.counting() as routed:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert sum(map(sum, routed["block1"])) == 3 * 4 * 2


def test_before_a_norm_over_one_number_nothing_learns():
    """Of x / |x| the derivative is 0, but for the norm's epsilon; why hidden 1 is refused. Of two numbers it is not."""
    from engine.real import models

    for hidden, learns in ((1, False), (2, True)):
        head, x = models.Head(hidden, 5).double(), torch.full((3, hidden), 0.5, dtype=torch.double)
        x[:, 0] = 1.0
        x.requires_grad_()
        models.loss_of(head(x), torch.tensor([0, 1, 2])).backward()
        assert head.linear.weight.grad.abs().max() > 1e-2
        assert (x.grad.abs().max() > 1e-3) == learns


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


def test_a_model_that_was_only_looked_at_is_the_next_one_built_and_no_later_one():
    from engine.real import models

    job = prepare(Spec(mode="single", devices=1, model="mlp", layers=1, hidden=4))
    looked_at = models.build(job, to_look_at=True)
    other = models.build(prepare(Spec(mode="single", devices=1, model="mlp", layers=2, hidden=4)))
    assert models.build(job) is looked_at is not other
    again = models.build(job)
    assert again is not looked_at
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), looked_at.parameters(), strict=True))
