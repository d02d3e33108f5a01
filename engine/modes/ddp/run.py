"""A job under torch's DistributedDataParallel, with a DistributedSampler."""

from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from engine.job import Job
from engine.modes.ddp.buckets import DEFAULT_BUCKET_MB
from engine.real import models
from engine.real.compression import compress_by_factors
from engine.real.data import Batches
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    chain = models.build(job).to(place.device)
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
    return DistributedDataParallel(chain, process_group=group, **limit)
