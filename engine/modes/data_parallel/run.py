"""A job under nn.DataParallel: the real class on GPUs; on the CPU its four steps with replicas on threads.

On the CPU nn.DataParallel silently runs the bare module, so there the steps are done here: scatter, replicate,
parallel apply, gather, and their mirror image on the way back.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from engine.job import Job
from engine.real import models
from engine.real.data import Batches
from engine.real.training import LocalTraining, Place, in_microsteps

T = TypeVar("T")


def training(job: Job, place: Place) -> "LocalTraining | Threads":
    if place.device.type == "cuda":
        chain = models.build(job).to(place.device)
        callee = nn.DataParallel(chain, device_ids=list(range(job.spec.devices)))
        optimizer = models.make_optimizer(job, chain.parameters())
        return LocalTraining(job, place, chain, callee, Batches(job, 0, 1, place.device), optimizer)
    return Threads(job, place)


class Threads:
    """One process, one thread a device; device 0 keeps the weights, the gradients and the optimizer."""

    def __init__(self, job: Job, place: Place):
        self.job, self.recorder, self.devices = job, place.recorder, job.spec.devices
        master = models.build(job)
        self.replicas = [master, *(copy.deepcopy(master) for _ in range(1, self.devices))]
        for device, replica in enumerate(self.replicas):
            replica.recorder, replica.rank = place.recorder, device
        self.optimizer = models.make_optimizer(job, master.parameters())
        self.batches = Batches(job, 0, 1, place.device)
        self.chains = dict(enumerate(self.replicas))
        self.pool = ThreadPoolExecutor(self.devices)

    def make_gradients(self, step: int) -> float:
        self.replicas[0].zero_grad()
        return sum(in_microsteps(self.job, self.recorder, partial(self._pass, step)))

    def _pass(self, step: int, k: int, count: int) -> float:
        """Micro-step `k` of `count`: device 0 adds up the gradients of all, and of all micro-steps."""
        recorder = self.recorder
        for replica in self.replicas[1:]:
            replica.zero_grad()
        with recorder.span("load", payload="batch", microbatch=recorder.microbatch):
            inputs, targets = self.batches(step, k, count)
        parts = self._move("scatter", "inputs", "batch", inputs.nbytes, lambda: _cut(inputs, self.devices))
        weights = sum(p.nbytes for p in self.replicas[0].parameters())
        self._move("broadcast", "replicate", "weights", weights, self._replicate)
        outputs = list(self.pool.map(lambda r, x: r(x), self.replicas, parts))
        size = sum(o.nbytes for o in outputs)
        gathered = self._move("gather", "outputs", "activation", size, lambda: torch.cat([o.detach() for o in outputs]))
        with recorder.span("forward", stage=0, microbatch=max(recorder.microbatch, 0), part="loss"):
            loss = models.loss_of(gathered.requires_grad_(), targets, self.batches.per_sample) / count
            loss.backward()
        gradients = self._move(
            "scatter", "output gradients", "gradient", size, lambda: _cut(gathered.grad, self.devices)
        )
        list(self.pool.map(lambda r, o, g: r.backward(o, g), self.replicas, outputs, gradients))
        self._move("reduce", "gradients", "gradient", weights, self._reduce)
        return loss.item()

    def _move(self, kind: str, part: str, payload: str, size: int, move: Callable[[], T]) -> T:
        """A movement between the devices is seen on all of them, from its start to its end."""
        if self.devices == 1:
            return move()
        self.recorder.doing = f"{kind} {part}"
        start = self.recorder.moment()
        result = move()
        end = self.recorder.moment()
        where = {"microbatch": self.recorder.microbatch, "axis": "dp", "size": size}
        for device in range(self.devices):
            self.recorder.mark(kind, start, end, part=part, payload=payload, rank=device, **where)
        return result

    def _replicate(self) -> None:
        with torch.no_grad():
            for replica in self.replicas[1:]:
                for mine, theirs in zip(replica.parameters(), self.replicas[0].parameters(), strict=True):
                    mine.copy_(theirs)

    def _reduce(self) -> None:
        for replica in self.replicas[1:]:
            for theirs, mine in zip(replica.parameters(), self.replicas[0].parameters(), strict=True):
                mine.grad += theirs.grad

    def outputs(self, inputs: torch.Tensor, samples: int) -> torch.Tensor:
        return self.replicas[0](inputs)

    def held(self) -> dict[str, nn.Parameter]:
        return dict(self.replicas[0].named_parameters())


def _cut(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [part.clone() for part in tensor.chunk(parts)]
