"""A block whose experts ranks share -> what each of them has of it, where its tokens travel, and what comes in and goes
out.

Ranks that share experts out send tokens there and back by PyTorch's all-to-all. Tensor ranks are among them, each with
its part of the tokens and with whole experts; or they cut each expert. Then every rank routes all tokens of its group
and computes its part of each expert; what comes of that is summed once, for a token and not for each of its copies.
Left to DTensor, every expert's output would be summed by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from engine.real import models
from engine.real.recorder import Recorder

PLACES = {"up": Shard(0), "down": Shard(1)}
OWN_TOKENS = Shard(1)  # of [N, context, hidden]


def share_experts(
    chain: models.Chain, group: dist.ProcessGroup, recorder: Recorder, *, axis: str = "ep", losses: int | None = None
) -> list[str]:
    """Leave each rank of the group, together the `axis`, a run of each block's experts, and let tokens travel to all of
    them. Returns the names of the parameters that this rank has and the others have not; a group of one shares nothing.

    The loss is the mean over the ranks' losses, and an expert sees the tokens of all of them: so its gradient is the
    sum over the ranks, divided by their number, and among them is final. `losses`: how many there are in the group,
    where ranks with parts of the same samples have one together.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return []
    names = []
    for block in chain.children():
        if not isinstance(block, models.MixtureBlock):
            continue
        each = block.num_experts // ranks
        first = dist.get_rank(group) * each
        for expert in [name for name, _ in block.experts.named_children() if not first <= int(name) < first + each]:
            delattr(block.experts, expert)
        names += [f"{block.name}.experts.{name}" for name, _ in block.experts.named_parameters()]
        block.elsewhere = Elsewhere(block, group, recorder, axis, losses or ranks)
    return names


class Elsewhere:
    """A block's experts on all ranks of a group, instead of its own."""

    def __init__(
        self, block: models.MixtureBlock, group: dist.ProcessGroup, recorder: Recorder, axis: str, losses: int
    ):
        self.block, self.group, self.recorder, self.axis, self.losses = block, group, recorder, axis, losses

    def __call__(self, tokens: torch.Tensor, order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks, each = dist.get_world_size(self.group), len([*self.block.experts.children()])
        coming = torch.empty_like(counts)  # from each rank, for each of the experts here
        self.recorder.collective("all_to_all", counts.nbytes, axis=self.axis, payload="control")
        dist.all_to_all_single(coming, counts, group=self.group)
        self.recorder.waited()
        there, here = (sizes.view(ranks, each).sum(1).tolist() for sizes in (counts, coming))
        arrived = self._exchange(tokens[order], there, here)
        expert = torch.arange(each, device=coming.device).repeat(ranks).repeat_interleave(coming)
        by_expert = expert.argsort(stable=True)  # they come by rank
        made = self.block.experts(arrived, by_expert, coming.view(ranks, each).sum(0))
        if made.requires_grad:  # between the two, gradients are those of the mean of the losses
            made.register_hook(lambda gradient: gradient / self.losses)
            arrived.register_hook(lambda gradient: gradient * self.losses)
        return self._exchange(made[by_expert.argsort()], here, there)

    def _exchange(self, copies: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        """The first `sent[0]` copies to the first rank, and so on; gradients travel the other way."""
        recorder, axis = self.recorder, self.axis
        recorder.collective("all_to_all", copies.nbytes, axis=axis, payload="tokens")
        result = funcol.wait_tensor(funcol.all_to_all_single_autograd(copies, got, sent, self.group))
        recorder.waited()
        if result.requires_grad:
            result.register_hook(lambda g: recorder.collective("all_to_all", g.nbytes, axis=axis, payload="gradient"))
            copies.register_hook(lambda gradient: recorder.waited())
        return result


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


class WholeExperts(ParallelStyle):
    """Of a block: the router whole, and experts as they are. `tokens`: how these lie on the ranks outside of it."""

    def __init__(self, tokens: Placement):
        super().__init__()
        self.tokens = tokens

    def _apply(self, block: models.MixtureBlock, mesh: DeviceMesh) -> nn.Module:
        _lay_out(block.router, mesh, Replicate())
        block.around = functools.partial(_of_own_tokens, mesh=mesh, tokens=self.tokens)
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


def _of_own_tokens(mixture: Callable, x: torch.Tensor, *, mesh: DeviceMesh, tokens: Placement) -> torch.Tensor:
    """Each rank sends its part of the tokens to their experts. Where all have all of them, what came of each part is
    gathered, and on the way back its gradient."""
    x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [tokens], run_check=False)
    made = mixture(x.redistribute(placements=[OWN_TOKENS]).to_local())
    return DTensor.from_local(made, mesh, [OWN_TOKENS], run_check=False).redistribute(placements=[tokens]).to_local()
