"""A chain of layers -> the same chain, keeping less of its forward pass and computing it again before it goes back.

torch.utils.checkpoint without reentrance: DDP and fully_shard work with it, since a layer's parameters get their
gradients once. It goes around a layer's forward, inside of its hooks: what FSDP gathers for the way back is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from engine.chain import kept
from engine.job import Job
from engine.real.models import Chain

# Matrix products, whose results are kept when recomputing selectively: they are what takes long.
PRODUCTS = (
    "mm.default", "addmm.default", "bmm.default", "convolution.default",
    "_scaled_dot_product_flash_attention_for_cpu.default", "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_cudnn_attention.default",
)  # fmt: skip


def recompute(chain: Chain, job: Job) -> None:
    """Change those layers of the chain that keep less when they are computed again."""
    layers = {layer.name: layer for layer in job.layers}
    for name, module in chain.named_children():
        if kept(layers[name], job.spec) < layers[name].saved:
            module.forward = _again(chain, name, module, selective=job.spec.recompute == "selective")


def _again(chain: Chain, name: str, module: nn.Module, *, selective: bool) -> Callable:
    forward = module.forward
    contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(_policy)} if selective else {}

    def marked(x: torch.Tensor) -> torch.Tensor:
        passed = chain.passed
        if passed is None or not passed.backward_began:
            return forward(x)
        passed.begin_recompute(name)
        try:
            return forward(x)
        finally:  # it is broken off by an exception once all that is needed is there
            passed.end_recompute(name)

    return lambda x: checkpoint(marked, x, use_reentrant=False, **contexts)


def _policy(_, op, *args, **kwargs) -> CheckpointPolicy:
    if str(op).removeprefix("aten.") in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
