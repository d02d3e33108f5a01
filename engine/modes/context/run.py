"""A job whose sequences are dealt out to the ranks: attention between them, and torch's DistributedDataParallel."""

import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from engine.job import Job
from engine.modes.context.cuts import parts
from engine.modes.context.deal import positions
from engine.modes.ddp.run import replicate
from engine.real import models
from engine.real.context_attention import ATTENTION, Ranks
from engine.real.data import Batches
from engine.real.recorder import Recorder
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    group = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("cp",)).get_group("cp")
    chain = models.build(job).to(place.device)
    batches = Batches(job, 0, 1, place.device)
    deal_out(batches, job, group)
    look_around(chain, job, group, place.recorder)
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer, place.rank)
    replica = replicate(chain, job, place, axis="cp", group=group)
    optimizer = models.make_optimizer(job, replica.parameters())
    local = LocalTraining(job, place, chain, replica, batches, optimizer)
    local.reducing = lambda reduces: nullcontext() if reduces else replica.no_sync()
    return local


def deal_out(batches: Batches, job: Job, group: dist.ProcessGroup) -> None:
    """Leave a rank of `group` its own tokens of every sequence."""
    if dist.get_world_size(group) > 1:
        places = _places(job, group)
        batches.x, batches.y = batches.x[:, places], batches.y[:, places]
        batches.validation = tuple(part[:, places] for part in batches.validation)


def look_around(chain: models.Chain, job: Job, group: dist.ProcessGroup, recorder: Recorder) -> None:
    """Give the chain the attention that asks the other ranks of `group`.

    Its parameters stay as they are, so it may be wrapped in anything that averages gradients over `group`.
    """
    if dist.get_world_size(group) == 1:
        return
    for name, layer in chain.named_children():
        if isinstance(layer, models.Embed):
            layer.places = _places(job, group).to(next(layer.parameters()).device)
        if isinstance(layer, models.Block):
            among = Ranks(group, recorder, job.spec.balance, name)
            layer.attention = functools.partial(ATTENTION[job.spec.attention], ranks=among)


def _places(job: Job, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.tensor(positions(dist.get_rank(group), dist.get_world_size(group), job.spec.context, job.spec.balance))
