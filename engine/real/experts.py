"""A block whose experts tensor ranks share -> what each of them has of it, and what comes in and goes out.

Every rank routes all tokens of its group and computes its part of each expert; what comes of that is summed once, for a
token and not for each of its copies. Left to DTensor, every expert's output would be summed by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from engine.real import models

PLACES = {"up": Shard(0), "down": Shard(1)}


class SharedExperts(ParallelStyle):
    """Of a block: every expert by columns, then by rows; the router whole. `tokens`: how these lie on the ranks outside
    of it. `experts`: the mesh of tensor ranks for experts, where these are sharded otherwise than the rest."""

    def __init__(self, tokens: Placement, experts: DeviceMesh | None = None):
        super().__init__()
        self.tokens, self.experts = tokens, experts

    def _apply(self, block: models.MixtureBlock, mesh: DeviceMesh) -> nn.Module:
        _lay_out(block.router, mesh, Replicate())
        for expert in block.experts.children():
            for name, place in PLACES.items():
                _lay_out(getattr(expert, name), self.experts or mesh, place)
        block.around = functools.partial(_summed, mesh=mesh, tokens=self.tokens)
        return block


def _lay_out(product: nn.Linear, mesh: DeviceMesh, place: Placement) -> None:
    """All ranks have the same weight, so nothing is sent."""
    laid_out = distribute_tensor(product.weight.detach(), mesh, [place], src_data_rank=None)
    product.weight = nn.Parameter(laid_out)


def _summed(mixture: Callable, x: torch.Tensor, *, mesh: DeviceMesh, tokens: Placement) -> torch.Tensor:
    """Each rank's gradient of what it is given is a part, through its router as through its experts."""
    x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [tokens], run_check=False)
    part = mixture(x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]))
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[tokens]).to_local()
