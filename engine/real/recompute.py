"""A chain of layers -> the same chain, keeping less of its forward pass and computing it again before it goes back.

torch.utils.checkpoint without reentrance: DDP and fully_shard work with it, since a layer's parameters get their
gradients once. It goes around a layer's forward, inside of its hooks: what FSDP gathers for the way back is there.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from engine.job import Job
from engine.model.chain import is_recomputed
from engine.modes.tensor.cuts import SUMS
from engine.real.models import Chain, in_backward

# Matrix products, whose results are kept when recomputing selectively: they are what takes long.
PRODUCTS = (
    "mm.default", "addmm.default", "bmm.default", "convolution.default",
    "_scaled_dot_product_flash_attention_for_cpu.default", "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_cudnn_attention.default",
)  # fmt: skip
# Of attention among ranks that share a sequence, what all its products come to.
ATTENDED = ("lockstep.attend_in_turns.default", "lockstep.attend_to_all.default")
# And sums over ranks, which the ranks would have to meet for again.
SUMMED = ("_c10d_functional.all_reduce.default", "_c10d_functional.reduce_scatter_tensor.default")
# A selective recomputation has to call what forward called. Marks for the profiler are not of the layer: experts that
# are gathered in forward, by fully_shard around them, may be there on the way back.
MARKS = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction
SAC_IGNORED_OPS.update(MARKS)


def recompute(chain: Chain, job: Job) -> None:
    """Change those layers of the chain that keep less when they are computed again."""
    layers = {layer.name: layer for layer in job.layers}
    for name, module in chain.named_children():
        if is_recomputed(layers[name], job.spec):
            module.__class__ = _again(chain, name, type(module), selective=job.spec.recompute == "selective")


class Again:
    """Whether a layer of this process is just then computed again, and how many have been."""

    going_on: ClassVar[bool] = False
    done: ClassVar[int] = 0


def _again(chain: Chain, name: str, kind: type[nn.Module], *, selective: bool) -> type[nn.Module]:
    """The class of a module -> that of one that is computed again, as are its copies (nn.DataParallel makes some)."""
    contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(_policy)} if selective else {}

    def marked(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return kind.forward(self, x)
        if not in_backward():
            with _kept_once_there():
                return kind.forward(self, x)
        passed, Again.going_on = chain.passed, True
        if passed is not None:
            passed.begin_recompute(name, SUMS if selective else ())
        try:
            return kind.forward(self, x)
        finally:  # it is broken off by an exception once all that is needed is there
            if passed is not None:
                passed.end_recompute(name)
            Again.going_on, Again.done = False, Again.done + 1

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(partial(marked, self), x, use_reentrant=False, **contexts)

    return type(kind.__name__, (kind,), {"forward": forward})


def _kept_once_there() -> saved_tensors_hooks:
    """Of what is saved now, whatever is computed again is there until the last node that asks for it has gone back: a
    backward in halves goes through a layer once for its input and once for each group of weights, and PyTorch would
    compute it again for each (GraphExecGroup lets nobody ask twice, and a product asks for both its factors twice)."""
    pack, unpack = _top_saved_tensors_default_hooks(False)

    def again(saved: list) -> torch.Tensor:
        if len(saved) == 1:
            saved.append(unpack(saved[0]))
        return saved[1]

    return saved_tensors_hooks(lambda tensor: [pack(tensor)], again)


def _policy(_, op, *args, **kwargs) -> CheckpointPolicy:
    if str(op).removeprefix("aten.") in (*PRODUCTS, *ATTENDED, *SUMMED):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
