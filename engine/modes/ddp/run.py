"""A job under torch's DistributedDataParallel, with a DistributedSampler."""

from collections.abc import Callable
from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from engine.asking.branches import left_out
from engine.job import Job
from engine.modes.ddp.buckets import DEFAULT_BUCKET_MB
from engine.modes.ddp.plan import INT32, USED
from engine.real import models
from engine.real.compression import compress_by_factors
from engine.real.data import Batches
from engine.real.events import Event
from engine.real.recorder import Recorder
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    chain = models.build(job).to(place.device)
    chain.left_out = left_out(job.spec).get(place.rank, ())
    replica = replicate(chain, job, place, axis="dp")
    if job.spec.compress == "fp16":
        replica.register_comm_hook(None, fp16_compress_hook)
    elif job.spec.compress == "powersgd":
        compress_by_factors(replica, job, place.recorder)
    optimizer = models.make_optimizer(job, replica.parameters())
    batches = Batches(job, place.rank, place.world_size, place.device)
    local = LocalTraining(job, place, chain, replica, batches, optimizer)
    local.reducing = lambda reduces: nullcontext() if reduces else replica.no_sync()
    return local


def replicate(
    chain: models.Chain, job: Job, place: Place, *, axis: str, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """The chain under DDP among the ranks of `group` (None: all), which are those of the mesh's `axis`."""
    chain.recorder = place.recorder
    place.recorder.label = lambda kind: (axis, "gradient" if kind == "all_reduce" else "control")
    # Left out, the limit is torch's default, which has a smaller first bucket.
    limit = {} if job.spec.bucket_mb in (None, DEFAULT_BUCKET_MB) else {"bucket_cap_mb": job.spec.bucket_mb}
    find_unused = bool(job.spec.find_unused)
    if find_unused:
        place.recorder.identify = tell_used(len([*chain.parameters()]), place.recorder, axis)
    return DistributedDataParallel(chain, process_group=group, find_unused_parameters=find_unused, **limit)


def tell_used(parameters: int, recorder: Recorder, axis: str) -> Callable[[Event], tuple[str, str, str, str]]:
    """Which parameters took part in the loss is summed after the gradients, as a whole number of each: what comes in
    numbers of that type, which no gradient has."""

    def identify(event: Event) -> tuple[str, str, str, str]:
        if event.kind == "all_reduce" and event.whole and event.bytes == INT32 * parameters:
            return event.kind, axis, "control", USED
        return event.kind, *recorder.label(event.kind), ""

    return identify
