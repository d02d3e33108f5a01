"""A job -> its first steps in one process: what parity compares with.

One device takes every global batch whole. A mode that differs from that by design is also simulated: as many replicas
as it has, each with its own part of the batch, and between them just what the mode does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from engine.asking.branches import left_out
from engine.job import Job
from engine.real import checkpoint, models
from engine.real.data import Batches
from engine.real.powersgd import PowerSGD
from engine.real.targets import counted

CPU = torch.device("cpu")
# What makes a mode or an option come to other numbers than one device, in words for the result.
LOCAL_SGD = "local SGD differs from one device by design: replicas drift apart between averages"


POWERSGD = "PowerSGD differs from one device by design: it sends matrices as products of a few columns"


class Trained(NamedTuple):
    """A training as one rank sees it: losses, gradients and their norms of each step, and the parameters in the end."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    norms: list[float | None]  # before clipping; None where nothing is clipped
    parameters: dict[str, torch.Tensor]
    routed: list[dict[str, list[list[int]]]]  # block -> tokens of each expert, in each pass


class Replica:
    """One model on one device, with its part of each batch."""

    def __init__(self, job: Job, replica: int, replicas: int):
        self.largest = job.spec.clip
        self.model = models.build(job)
        self.left_out = left_out(job.spec)
        self.optimizer = models.make_optimizer(job, self.model.parameters())
        self.trained = Trained([], [], [], {}, [])
        branches = self.left_out and replicas == 1  # each part of the batch goes the way of the rank that has it
        parts = range(job.replicas) if branches else [replica]
        self.whole = None if job.spec.masked is None else Batches(job, 0, 1, CPU)
        self.parts = {rank: Batches(job, rank, len(parts) if branches else replicas, CPU) for rank in parts}

    def make_gradients(self, step: int) -> None:
        self.optimizer.zero_grad()
        total, per_sample = 0.0, None
        if self.whole is not None:
            per_sample = counted(self.whole(step)[1]).item() / self.whole.size
        with models.counting() as routed:
            for rank, batches in self.parts.items():
                inputs, targets = batches(step)
                self.model.left_out = self.left_out.get(rank, ())
                loss = models.loss_of(self.model(inputs), targets, per_sample) / len(self.parts)
                loss.backward()
                total += loss.item()
        self.trained.routed.append(routed)
        self.trained.losses.append(total)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of what took no part in the loss: 0."""
        parameters = self.model.named_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters}

    def take(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name].clone()

    def update(self) -> None:
        parameters = self.model.parameters()
        self.trained.gradients.append(self.gradients())
        largest = self.largest
        norm = None if largest is None else torch.nn.utils.clip_grad_norm_(parameters, largest).item()
        self.trained.norms.append(norm)
        self.optimizer.step()

    def done(self) -> Trained:
        return self.trained._replace(parameters={name: p.detach() for name, p in self.model.named_parameters()})


def one_device(job: Job, steps: int, run_dir: Path) -> Trained:
    """Of a run that resumes: from the same checkpoint, with its optimizer state."""
    alone = Replica(job, 0, 1)
    if job.spec.resume is not None:
        held = dict(alone.model.named_parameters())
        checkpoint.restore(run_dir, job, held, alone.optimizer, alone=True)
    for step in range(steps):
        alone.make_gradients(step)
        alone.update()
    return alone.done()


def by_design(job: Job) -> str | None:
    """Why a job is not to equal one device, if it is not."""
    if job.spec.compress == "powersgd":
        return POWERSGD
    return LOCAL_SGD if job.spec.mode == "local_sgd" else None


def simulated(job: Job, steps: int) -> list[Trained]:
    """What each rank of such a job must come to."""
    replicas = [Replica(job, rank, job.replicas) for rank in range(job.replicas)]
    compression = PowerSGD(job) if job.spec.compress == "powersgd" else None
    for step in range(steps):
        for replica in replicas:
            replica.make_gradients(step)
        if compression:
            reduced = compression.reduce([replica.gradients() for replica in replicas])
            for replica in replicas:
                replica.take(reduced)
        for replica in replicas:
            replica.update()
        if job.spec.sync_every and (step + 1) % job.spec.sync_every == 0:
            _average([replica.model for replica in replicas])
    return [replica.done() for replica in replicas]


@torch.no_grad()
def _average(alike: list[models.Chain]) -> None:
    """Of all parameters laid end to end, as torch's model averager has them."""
    average = averaged([nn.utils.parameters_to_vector(model.parameters()) for model in alike])
    for model in alike:
        nn.utils.vector_to_parameters(average.clone(), model.parameters())


def averaged(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of what n ranks have, rounded where torch and gloo round it: each divides its own, and then they are
    added up in a ring, the c-th of n parts from rank c - 1 down to rank c. In bf16 another order is another weight."""
    n = len(vectors)
    size = 2 * -(-len(vectors[0]) // (2 * n))  # each part is sent in two pieces
    parts = zip(*((vector / n).split(size) for vector in vectors), strict=True)
    return torch.cat([functools.reduce(torch.add, [part[c - 1 - k] for k in range(n)]) for c, part in enumerate(parts)])
