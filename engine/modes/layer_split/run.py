"""A job split by layers: each rank holds a run of layers; activations and gradients pass through torch.distributed."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from engine.asking.frozen import goes_back
from engine.job import Job
from engine.modes.layer_split.plan import is_compiled
from engine.real import models
from engine.real.data import Batches
from engine.real.stage_compiler import compiled
from engine.real.training import Place, in_microsteps


def training(job: Job, place: Place) -> "LayerSplit":
    return LayerSplit(job, place)


class LayerSplit:
    norm_groups: ClassVar = {"pp": None}  # each parameter is on one of its ranks

    def __init__(self, job: Job, place: Place):
        self.job, self.stage, self.recorder = job, place.rank, place.recorder
        self.is_first, self.is_last = self.stage == 0, self.stage == place.world_size - 1
        # Whether the gradient of what is sent, and of what is received, is asked for.
        self.asks = not self.is_last and goes_back(job.stages[self.stage])
        self.asked = not self.is_first and goes_back(job.stages[self.stage - 1])
        self.chain = models.piece(models.build(job), job, self.stage).to(place.device)
        self.optimizer = models.make_optimizer(job, self.chain.parameters())
        self.batches = Batches(job, 0, 1, place.device) if self.is_first or self.is_last else None
        like = {"device": place.device, "dtype": models.dtype_of(job.spec)}
        if not self.is_first:
            shape = job.stages[self.stage - 1][-1].output
            self.inbound = torch.empty(job.micro_batch, *shape, **like)
        if self.asks:
            shape = job.stages[self.stage][-1].output
            self.outbound = torch.empty(job.micro_batch, *shape, **like)  # for its gradient
        self.compiled = is_compiled(job)
        if self.compiled:
            example = self.batches(0, 0, job.microsteps)[0] if self.is_first else torch.zeros_like(self.inbound)
            example.requires_grad_(not self.is_first)
            self.module = compiled(self.chain, example, job.spec.compile_stage)
        else:
            self.module, self.chain.recorder = self.chain, place.recorder

    def make_gradients(self, step: int) -> float | None:
        self.optimizer.zero_grad()
        losses = in_microsteps(self.job, self.recorder, partial(self._pass, step))
        return sum(losses) if self.is_last else None

    def _pass(self, step: int, k: int, count: int) -> float | None:
        """Micro-step `k` of `count`, with its part of the batch, of the mean loss, and of the gradients."""
        inputs = targets = loss = None
        if self.batches:
            with self.recorder.span("load", payload="batch", microbatch=self.recorder.microbatch):
                inputs, targets = self.batches(step, k, count)
                inputs, targets = models.ends(inputs, targets, is_first=self.is_first, is_last=self.is_last)
        if not self.is_first:
            inputs = self._receive(self.inbound, "activation", self.stage - 1).detach().requires_grad_(self.asked)
        sent = gradient = None
        with self._whole("forward"):
            output = self.module(inputs)
            if self.is_last:
                output = loss = self.chain.loss(output, targets, self.batches.per_sample) / count
        if not self.is_last:
            sent = self._send(output.detach(), "activation", self.stage + 1)
        if self.asks:
            gradient = self._receive(self.outbound, "gradient", self.stage + 1)
        with self._whole("backward"):
            self.chain.backward(output, gradient)
        returned = None if not self.asked else self._send(inputs.grad, "gradient", self.stage - 1)
        for work in (sent, returned):
            if work is not None:
                work.wait()
        return None if loss is None else loss.item()

    def _whole(self, kind: str) -> AbstractContextManager:
        """Marks a stage's pass, where the chain does not mark each layer."""
        where = {"stage": self.stage, "microbatch": max(self.recorder.microbatch, 0)}
        return self.recorder.span(kind, **where) if self.compiled else nullcontext()

    def _send(self, tensor: torch.Tensor, payload: str, peer: int) -> dist.Work:
        tensor = tensor.contiguous()
        self._note("send", tensor, payload, peer)
        return dist.isend(tensor, peer)

    def _receive(self, tensor: torch.Tensor, payload: str, peer: int) -> torch.Tensor:
        self._note("recv", tensor, payload, peer)
        dist.recv(tensor, peer)
        return tensor

    def _note(self, kind: str, tensor: torch.Tensor, payload: str, peer: int) -> None:
        where = {"stage": self.stage, "microbatch": max(self.recorder.microbatch, 0), "peer": peer}
        self.recorder.message(kind, payload=payload, size=tensor.nbytes, **where)

    def outputs(self, inputs: torch.Tensor | None, samples: int) -> torch.Tensor | None:
        if not self.is_first:
            inputs = self.inbound.new_empty(samples, *self.inbound.shape[1:])
            dist.recv(inputs, self.stage - 1)
        output = self.chain(inputs)
        if self.is_last:
            return output
        dist.send(output, self.stage + 1)
        return None

    def held(self) -> dict[str, nn.Parameter]:
        return dict(self.chain.named_parameters())
