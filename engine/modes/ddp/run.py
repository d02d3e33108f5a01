"""A job under torch's DistributedDataParallel, with a DistributedSampler."""

from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

from engine.job import Job
from engine.modes.ddp.buckets import DEFAULT_BUCKET_MB
from engine.real import models
from engine.real.data import Batches
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    place.recorder.label = lambda kind: ("dp", "gradient" if kind == "all_reduce" else "control")
    limit = {} if job.spec.bucket_mb == DEFAULT_BUCKET_MB else {"bucket_cap_mb": job.spec.bucket_mb}
    replica = DistributedDataParallel(chain, **limit)
    optimizer = models.make_optimizer(job, replica.parameters())
    batches = Batches(job, place.rank, place.world_size, place.device)
    local = LocalTraining(job, place, chain, replica, batches, optimizer)
    local.reducing = lambda reduces: nullcontext() if reduces else replica.no_sync()
    return local
