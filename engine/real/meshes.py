"""A job -> its DeviceMesh, and the same ranks laid out once more as FSDP wants them.

FSDP wants its replicas on one axis, before that of its shards, and both in one mesh with the axis of tensor ranks.
Flattening a slice of the first mesh would do it, and is deprecated: so the ranks lie a second time on a mesh of fewer
axes, in which those along which shards are alike are one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.job import Job
from engine.modes.fsdp.replicas import REPLICATED, is_shared, replicas_of
from engine.plan import AXES, Mesh


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over which ranks something is sharded, and the axis across which equal shards meet, if there is one."""

    mesh: DeviceMesh
    replicas: str = "dp"


class Meshes:
    def __init__(self, job: Job, mesh: Mesh, device: str):
        """`mesh`: the axes that have more than one coordinate."""
        self.every = init_device_mesh(device, [job.degree(axis) for axis in AXES], mesh_dim_names=AXES)
        replicas = replicas_of(mesh)
        self.whole = self.every if replicas in ("", "dp") else self._joined(job, replicas)
        self.tp = self.whole["tp"]
        self.layers = self._sharding(self.whole, replicas) if is_shared(mesh) else None
        self.experts: Sharding | None = None
        self.experts_tp: DeviceMesh | None = None
        self.expert_group = self._expert_group(job)
        if job.expert_axis and self.layers is not None:
            replicas = replicas_of(mesh, of_experts=True)
            alike = self._of_experts(job, replicas or "dp")
            self.experts, self.experts_tp = self._sharding(alike, replicas), alike["tp"]

    def _expert_group(self, job: Job) -> dist.ProcessGroup | None:
        """The ranks that share experts out."""
        if job.expert_axis in ("", *AXES):
            return self.every.get_group(job.expert_axis) if job.expert_axis else None
        ranks = self.every.mesh.reshape(-1, job.degree(job.expert_axis))  # of the last two axes
        names = ("rest", job.expert_axis)
        return DeviceMesh(self.every.device_type, ranks, mesh_dim_names=names).get_group(job.expert_axis)

    def _joined(self, job: Job, replicas: str) -> DeviceMesh:
        """(all other axes, those of REPLICATED as one, fsdp, tp)"""
        order = [*(axis for axis in AXES if axis not in (*REPLICATED, "fsdp", "tp")), *REPLICATED, "fsdp", "tp"]
        ranks = self.every.mesh.permute([AXES.index(axis) for axis in order])
        degrees = (math.prod(map(job.degree, REPLICATED)), job.degree("fsdp"), job.degree("tp"))
        names = ("rest", replicas, "fsdp", "tp")
        return DeviceMesh(self.every.device_type, ranks.reshape(-1, *degrees), mesh_dim_names=names)

    def _of_experts(self, job: Job, replicas: str) -> DeviceMesh:
        """The ranks that have the same experts, and the tensor ranks that share these. Of the same groups as the rest,
        since calls in one keep their order."""
        order = ("pp", "ep", "dp", "cp", "fsdp", "tp")
        ranks = self.every.mesh.permute([AXES.index(axis) for axis in order])
        ranks = ranks.reshape(-1, job.degree("dp") * job.degree("cp"), job.degree("fsdp"), job.degree("tp"))
        (mine,) = [each for each in ranks if (each == self.every.get_rank()).any()]
        group = self.every.get_group("dp" if job.degree("cp") == 1 else "cp")
        if job.degree("dp") > 1 and job.degree("cp") > 1:
            across = ranks.movedim(1, -1).reshape(-1, ranks.shape[1])
            names = ("rest", replicas)
            group = DeviceMesh(self.every.device_type, across, mesh_dim_names=names).get_group(replicas)
        groups = [group, self.whole.get_group("fsdp"), self.whole.get_group("tp")]
        names = (replicas, "fsdp", "tp")
        return DeviceMesh.from_group(groups, self.every.device_type, mesh=mine, mesh_dim_names=names)

    def _sharding(self, mesh: DeviceMesh, replicas: str) -> Sharding:
        return Sharding(mesh[(replicas, "fsdp") if replicas else ("fsdp",)], replicas)
