"""A job on one device: an ordinary PyTorch training loop."""

from engine.job import Job
from engine.real import models
from engine.real.data import Batches
from engine.real.training import LocalTraining, Place


def training(job: Job, place: Place) -> LocalTraining:
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    optimizer = models.make_optimizer(job, chain.parameters())
    return LocalTraining(job, place, chain, chain, Batches(job, 0, 1, place.device), optimizer)
