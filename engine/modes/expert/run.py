"""A job whose experts are shared out over the ranks: PyTorch's all-to-all takes tokens there and back, and its
DistributedDataParallel averages the gradients of all the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from engine.job import Job
from engine.modes.ddp.run import replicate
from engine.modes.expert.cuts import parts
from engine.real import models
from engine.real.data import Batches
from engine.real.experts import share_experts
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
