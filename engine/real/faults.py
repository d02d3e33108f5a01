"""A fault that was asked for -> a worker that breaks so, on purpose: what each kind does where torch is at hand."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import torch
import torch.distributed as dist

from engine.asking.faults import LASTING, Fault
from engine.asking.settings import TOKEN_MODELS
from engine.job import Job
from engine.model.shapes import Layer
from engine.real.training import Place, Training


def of_rank(fault: Fault | None, rank: int, step: int = 0) -> str:
    """What this rank does wrong in this step, or nothing."""
    if fault is None or fault.rank != rank:
        return ""
    return fault.kind if step == fault.step or (fault.kind in LASTING and step > fault.step) else ""


def altered(job: Job, kind: str) -> Job:
    """The job as a rank takes it whose model is not that of the others."""
    if kind == "model":
        return dataclasses.replace(job, layers=(*job.layers[:-1], _another(job), job.layers[-1]))
    if kind == "shape":
        first = job.layers[0]
        (name, (rows, *rest)), *others = first.params
        wider = dataclasses.replace(first, params=((name, (rows + 1, *rest)), *others))
        return dataclasses.replace(job, layers=(wider, *job.layers[1:]))
    return job


def _another(job: Job) -> Layer:
    """A layer that takes what the last one takes, and gives the same."""
    before = job.layers[-2]
    if job.spec.model in TOKEN_MODELS:
        return dataclasses.replace(before, name="extra")
    (width,) = before.output
    return dataclasses.replace(before, name="extra", params=(("weight", (width, width)), ("bias", (width,))))


def begin_step(fault: Fault | None, place: Place, training: Training, step: int) -> None:
    """What goes wrong before a step is computed. `leave` is for the caller to see to."""
    kind = of_rank(fault, place.rank, step)
    if kind == "raise":
        raise RuntimeError(f"raised on purpose: fault raise@{place.rank}:{step}")
    if kind == "exit":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        while True:
            time.sleep(60)
    if kind == "alone" and place.world_size > 1:
        place.recorder.doing = "broadcast"
        dist.broadcast(torch.zeros(1, device=place.device), src=(place.rank + 1) % place.world_size)
    if fault and fault.kind == "size" and step == fault.step and place.world_size > 1:
        numbers = 5 if kind else 3
        place.recorder.doing = f"all_reduce of {numbers} numbers"
        dist.all_reduce(torch.zeros(numbers, device=place.device))
    if kind == "skip":
        held = training.held()
        first = next(iter(held)).split(".")[0]
        for name, parameter in held.items():
            if name.split(".")[0] == first:
                parameter.requires_grad_(False)


def after_gradients(fault: Fault | None, place: Place, training: Training, step: int) -> None:
    if of_rank(fault, place.rank, step) == "gradient":
        for parameter in training.held().values():
            if parameter.grad is not None:  # of a frozen layer it is
                parameter.grad *= 1.5
