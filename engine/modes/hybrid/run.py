"""A job on one DeviceMesh of all its axes, under the PyTorch classes that belong to them."""

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from engine.job import Job
from engine.modes.context.cuts import own_tokens
from engine.modes.context.run import deal_out, look_around
from engine.modes.expert.plan import all_ranks
from engine.modes.expert.run import replicated
from engine.modes.fsdp.replicas import REPLICATED, is_shared, replicas_of
from engine.modes.fsdp.run import shard_layers
from engine.modes.hybrid.cuts import output_of, parts
from engine.modes.hybrid.plan import mesh_of
from engine.modes.pipeline.run import Pipeline
from engine.modes.sequence import run as sequence
from engine.modes.tensor import run as tensor
from engine.modes.tensor.run import TensorTraining, cut_layers, lay_out_gradients
from engine.modes.tensor.shards import held
from engine.plan import AXES
from engine.real import models
from engine.real.data import Batches
from engine.real.functional import announce
from engine.real.layered_stage import LayeredStage
from engine.real.training import Place, Training, forget_forward


def training(job: Job, place: Place) -> Training:
    mesh, alike = meshes(job, place.device.type)
    replica = mesh.get_local_rank("dp") * job.degree("fsdp") + mesh.get_local_rank("fsdp")
    batches = Batches(job, replica, job.replicas, place.device)
    recorder, at = place.recorder, mesh.get_local_rank("cp")
    recorder.mesh = mesh_of(job)
    if job.spec.model == "moe":
        return replicated(job, place, mesh.get_group("ep"), axis=all_ranks(mesh_of(job)), copies=mesh.get_group("dp"))
    if job.degree("tp") > 1:
        announce(recorder, "tp")
    if job.degree("tp") > 1 or job.degree("cp") > 1:
        recorder.parts = functools.cache(lambda kind, layer: parts(job, kind, layer, at))
    deal_out(batches, job, mesh.get_group("cp"))
    if job.degree("pp") > 1:
        return MeshPipeline(job, place, batches, mesh, alike)
    chain = models.build(job).to(place.device)
    chain.recorder = recorder
    distribute(chain, job, mesh, alike, reshard_after_forward=True)
    return TensorTraining(job, place, chain, chain, batches, models.make_optimizer(job, chain.parameters()))


def meshes(job: Job, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    """All axes; and, in a mesh of the same ranks, those along which shards are alike as one, before those of fsdp and
    tp. FSDP wants its axes and tp's in one mesh, its replicas on one axis, and that one first."""
    every = init_device_mesh(device, tuple(job.degree(axis) for axis in AXES), mesh_dim_names=AXES)
    if job.degree("cp") == 1:
        return every, every
    order = [*(axis for axis in AXES if axis not in (*REPLICATED, "fsdp", "tp")), *REPLICATED, "fsdp", "tp"]
    ranks = every.mesh.permute([AXES.index(axis) for axis in order])
    ranks = ranks.reshape(-1, job.degree("dp") * job.degree("cp"), job.degree("fsdp"), job.degree("tp"))
    names = ("stages", replicas_of(mesh_of(job)), "fsdp", "tp")
    return every, DeviceMesh(device, ranks, mesh_dim_names=names)


def distribute(
    chain: models.Chain, job: Job, mesh: DeviceMesh, alike: DeviceMesh, *, reshard_after_forward: bool
) -> None:
    """Layers that see some tokens, cut for tensor ranks; and what this rank has of them sharded over fsdp and
    replicated over dp and cp."""
    look_around(chain, job, mesh.get_group("cp"), chain.recorder)
    if job.degree("tp") > 1:
        here = [name for name, _ in chain.named_children()]
        layouts = (sequence if job.spec.sequence_parallel else tensor).layouts(job)
        cut_layers(chain, alike["tp"], {n: layout for n, layout in layouts.items() if n.split(".")[0] in here})
    if is_shared(mesh_of(job)):
        replicas = replicas_of(mesh_of(job))
        axes = (replicas, "fsdp") if replicas else ("fsdp",)
        shard_layers(chain, alike[axes], replicas=replicas, reshard_after_forward=reshard_after_forward)


def _own_storage(chain: models.Chain, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """A stage's output is detached in place after the first half of its backward, which torch does to no view; and the
    part of an output that a tensor rank has is one."""
    return output.clone() if output._is_view() else output


class MeshPipeline(Pipeline):
    """A pipeline whose stages are distributed over the other axes of a mesh.

    Layers stay gathered in it: a backward in halves needs the parameters of its forward.
    """

    stage_class = LayeredStage

    def __init__(self, job: Job, place: Place, batches: Batches, mesh: DeviceMesh, alike: DeviceMesh):
        self.meshes, self.own = (mesh, alike), own_tokens(job)
        super().__init__(job, place, batches, mesh.get_group("pp"))
        self.norm_groups = {"pp": self.group}  # the other axes' DTensors sum over those themselves

    def prepared(self, chain: models.Chain) -> models.Chain:
        chain = super().prepared(chain)
        chain.register_forward_hook(_own_storage)
        distribute(chain, self.job, *self.meshes, reshard_after_forward=False)
        return chain

    def make_gradients(self, step: int) -> float | None:
        loss = super().make_gradients(step)
        lay_out_gradients(self.held().values())
        return loss

    def outputs(self, inputs: torch.Tensor | None, samples: int) -> torch.Tensor | None:
        output = super().outputs(inputs, samples)
        for chain in self.chains.values():
            forget_forward(chain)
        return output

    def _pass(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> float | None:
        with loss_parallel():
            return super()._pass(inputs, targets)

    def output_of(self, stage: int) -> tuple[int, ...]:
        return output_of(self.own, held(self.own)[self.job.stage_layers[stage][-1]]).output
