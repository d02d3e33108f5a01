"""A job whose experts are shared out over the ranks: PyTorch's all-to-all takes tokens there and back, and its
DistributedDataParallel averages the gradients of all the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from engine.job import Job
from engine.modes.ddp.run import replicate
from engine.modes.expert.cuts import parts
from engine.real import models
from engine.real.data import Batches
from engine.real.recorder import Recorder
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    group = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("ep",)).get_group()
    return replicated(job, place, group, axis="ep")


def replicated(
    job: Job, place: Place, group: dist.ProcessGroup, *, axis: str, copies: dist.ProcessGroup | None = None
) -> LocalTraining:
    """Experts are shared out over `group`, and the same ones held by the ranks of `copies`; all ranks, together the
    `axis`, average all the rest."""
    chain = models.build(job).to(place.device)
    own = share_experts(chain, group, place.recorder)
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(chain, own)
    replica = replicate(chain, job, place, axis=axis)
    optimizer = models.make_optimizer(job, chain.parameters())
    batches = Batches(job, place.rank, place.world_size, place.device)
    local = ExpertTraining(job, place, chain, replica, batches, optimizer)
    local.norm_groups, local.norm_names = {"ep": group}, {"ep": own}
    if own and copies is not None and dist.get_world_size(copies) > 1:
        blocks = [block for block in chain.children() if isinstance(block, models.MixtureBlock)]
        local.averages = [Average(block, copies, place.recorder) for block in blocks]
    local.reducing = local.holding_back
    return local


class ExpertTraining(LocalTraining):
    """Gradients are there when also those of experts are averaged."""

    averages: Sequence["Average"] = ()

    @contextmanager
    def holding_back(self, reduces: bool) -> Iterator[None]:
        for average in self.averages:
            average.holds = not reduces
        with nullcontext() if reduces else self.callee.no_sync():
            yield

    def make_gradients(self, step: int) -> float:
        loss = super().make_gradients(step)
        for average in self.averages:
            average.finish()
        return loss


class Average:
    """Of a block's experts, whose gradients go out in one all-reduce over those that hold the same ones: in the
    background, once the last is there."""

    def __init__(self, block: models.MixtureBlock, group: dist.ProcessGroup, recorder: Recorder):
        self.name, self.parameters = f"{block.name}.experts", list(block.experts.parameters())
        self.group, self.recorder, self.there = group, recorder, 0
        self.holds = False  # gradients of a later micro-step are added to these first
        self.sum = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _: torch.Tensor) -> None:
        self.there += not self.holds
        if self.there == len(self.parameters):
            torch.cat([parameter.grad.flatten() for parameter in self.parameters], out=self.sum)
            self.recorder.background("all_reduce", self.name, "gradient", self.sum.nbytes, axis="dp")
            self.work = dist.all_reduce(self.sum, group=self.group, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        means = self.sum.div_(dist.get_world_size(self.group)).split([p.numel() for p in self.parameters])
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad.copy_(mean.view_as(parameter))
        self.there = 0


def share_experts(chain: models.Chain, group: dist.ProcessGroup, recorder: Recorder) -> list[str]:
    """Leave each rank of the group a run of each block's experts, and let tokens travel to all of them. Returns the
    names of the parameters that this rank has and the others have not; a group of one shares nothing.

    The loss is the mean over the ranks' losses, and an expert sees the tokens of all of them: so its gradient is the
    sum over the ranks, divided by their number, and among them is final.
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
        block.elsewhere = Elsewhere(block, group, recorder)
    return names


class Elsewhere:
    """A block's experts on all ranks of a group, instead of its own."""

    def __init__(self, block: models.MixtureBlock, group: dist.ProcessGroup, recorder: Recorder):
        self.block, self.group, self.recorder = block, group, recorder

    def __call__(self, tokens: torch.Tensor, order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks, each = dist.get_world_size(self.group), len([*self.block.experts.children()])
        coming = torch.empty_like(counts)  # from each rank, for each of the experts here
        self.recorder.collective("all_to_all", counts.nbytes, axis="ep", payload="control")
        dist.all_to_all_single(coming, counts, group=self.group)
        self.recorder.waited()
        there, here = (sizes.view(ranks, each).sum(1).tolist() for sizes in (counts, coming))
        arrived = self._exchange(tokens[order], there, here)
        expert = torch.arange(each, device=coming.device).repeat(ranks).repeat_interleave(coming)
        by_expert = expert.argsort(stable=True)  # they come by rank
        made = self.block.experts(arrived, by_expert, coming.view(ranks, each).sum(0))
        if made.requires_grad:  # between the two, gradients are those of the mean over the ranks
            made.register_hook(lambda gradient: gradient / ranks)
            arrived.register_hook(lambda gradient: gradient * ranks)
        return self._exchange(made[by_expert.argsort()], here, there)

    def _exchange(self, copies: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        """The first `sent[0]` copies to the first rank, and so on; gradients travel the other way."""
        recorder = self.recorder
        recorder.collective("all_to_all", copies.nbytes, axis="ep", payload="tokens")
        result = funcol.wait_tensor(funcol.all_to_all_single_autograd(copies, got, sent, self.group))
        recorder.waited()
        if result.requires_grad:
            result.register_hook(lambda g: recorder.collective("all_to_all", g.nbytes, axis="ep", payload="gradient"))
            copies.register_hook(lambda gradient: recorder.waited())
        return result
