"""A stage's layers and an example of its input -> a module that computes the same with the same parameters, compiled.

Both compile what one device computes. Neither splits a model or sends anything: the pipeline is torch's schedule, as
without them.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from engine.real.models import Chain, MixtureBlock


def compiled(chain: Chain, example: torch.Tensor, how: str) -> nn.Module:
    return {"none": _as_it_is, "torchscript": _traced, "torch_compile": _compiled}[how](chain, example)


def _as_it_is(chain: Chain, example: torch.Tensor) -> nn.Module:
    return chain


def _traced(chain: Chain, example: torch.Tensor) -> nn.Module:
    """A trace: `torch.jit.script` cannot read the marks of a chain, which a stage does not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is, in favour of torch.compile
        return torch.jit.trace(chain, (example.detach(),))


def _compiled(chain: Chain, example: torch.Tensor) -> nn.Module:
    """Compiled here and now, forward and backward, in every rank at once: in the first pass through the pipeline each
    would wait for the one before it, which takes longer than peers wait for a message."""
    from torch._inductor import config

    config.compile_threads = 1  # no process pool: a worker is forked, and ends without clearing up
    # A graph ends where an expert's tokens are counted, and the next ones take any number of them; of samples there is
    # but one number, and for that all else is compiled.
    mixes = any(isinstance(layer, MixtureBlock) for layer in chain.children())
    module = torch.compile(chain, dynamic=mixes)
    leaf = example.detach().requires_grad_(example.requires_grad)
    output = module(leaf)
    torch.autograd.grad(output, [p for p in (leaf, *chain.parameters()) if p.requires_grad], torch.zeros_like(output))
    return module
