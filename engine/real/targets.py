"""A training and a step -> how many targets a sample has over all ranks on average, by which its losses are divided."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from engine import modes
from engine.asking.masked import LEFT_OUT, counts
from engine.job import Job
from engine.plan import Op
from engine.real.data import Batches
from engine.real.training import Place


class Targets:
    """Counts those of each step, where some are left out; made on all ranks alike."""

    def __init__(self, job: Job, place: Place):
        self.job, self.place = job, place
        self.counts: list[Op] = []
        if job.spec.masked is None:
            return
        mesh = modes.plan(job, 0).mesh
        self.counts = counts(job, mesh)
        if self.counts:
            whole = init_device_mesh(place.device.type, mesh.degrees, mesh_dim_names=mesh.axes)
            self.groups = {op.axis: whole.get_group(op.axis) for op in self.counts}

    def count(self, batches: Batches | None, step: int, *, alone: bool = False) -> None:
        """Collective. `alone`: as if the others had as many as this rank."""
        if batches is None or self.job.spec.masked is None:
            return
        mine = counted(batches(step)[1])
        everywhere, ranks = mine.reshape(1).clone(), 1
        for op in self.counts:
            with self.place.recorder.calls(op):
                dist.all_reduce(everywhere, group=self.groups[op.axis])
            ranks *= dist.get_world_size(self.groups[op.axis])
        self.mine = mine.item()
        batches.per_sample = (self.mine if alone else everywhere.item() / ranks) / batches.size

    def line(self, batches: Batches | None, loss: float | None) -> dict[str, float]:
        """Of a rank that has a loss: over how many targets, and the sum of theirs."""
        if loss is None or batches is None or batches.per_sample is None:
            return {}
        return {"targets": self.mine, "target_loss": loss * batches.per_sample * batches.size}


def counted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != LEFT_OUT).sum()
