"""A job under torch's PostLocalSGDOptimizer from the first step on: no DDP, and a PeriodicModelAverager."""

from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from engine.job import Job
from engine.real import models
from engine.real.data import Batches
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    place.recorder.label = lambda kind: ("dp", "weights")
    period = job.spec.sync_every
    # It averages first when its warm-up ends: after k steps, and not after the first.
    averager = PeriodicModelAverager(period=period, warmup_steps=period - 1)
    optimizer = PostLocalSGDOptimizer(models.make_optimizer(job, chain.parameters()), averager)
    batches = Batches(job, place.rank, place.world_size, place.device)
    return LocalTraining(job, place, chain, chain, batches, optimizer)
