"""A job on one DeviceMesh of all its axes, under the PyTorch classes that belong to them."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from engine.job import Job
from engine.modes.context.run import deal_out
from engine.modes.expert.plan import all_ranks
from engine.modes.expert.run import replicated
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
from engine.real.recorder import Pass
from engine.real.training import Place, Training, forget_forward


def training(job: Job, place: Place) -> Training:
    mesh = init_device_mesh(place.device.type, tuple(job.degree(axis) for axis in AXES), mesh_dim_names=AXES)
    replica = mesh.get_local_rank("dp") * job.degree("fsdp") + mesh.get_local_rank("fsdp")
    batches = Batches(job, replica, job.replicas, place.device)
    place.recorder.mesh = mesh_of(job)
    if job.spec.model == "moe":
        return replicated(job, place, mesh.get_group("ep"), axis=all_ranks(mesh_of(job)), copies=mesh.get_group("dp"))
    if job.degree("tp") > 1:
        announce(place.recorder, "tp")
        place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    if job.degree("pp") > 1:
        return MeshPipeline(job, place, batches, mesh)
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    deal_out(chain, batches, job, mesh.get_group("cp"), place.recorder)
    distribute(chain, job, mesh, reshard_after_forward=True)
    return TensorTraining(job, place, chain, chain, batches, models.make_optimizer(job, chain.parameters()))


def distribute(chain: models.Chain, job: Job, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """Layers cut for tensor ranks, and what this rank has of them sharded over fsdp and replicated over dp."""
    if job.degree("tp") > 1:
        here = [name for name, _ in chain.named_children()]
        layouts = (sequence if job.spec.sequence_parallel else tensor).layouts(job)
        cut_layers(chain, mesh["tp"], {n: layout for n, layout in layouts.items() if n.split(".")[0] in here})
    if job.degree("cp") > 1:
        replicated = _turned(mesh, "cp", "fsdp")
        shard_layers(chain, replicated, replicas="cp", reshard_after_forward=reshard_after_forward)
    elif job.degree("dp") > 1 or job.degree("fsdp") > 1:
        axes = ("dp", "fsdp") if job.degree("dp") > 1 else ("fsdp",)
        shard_layers(chain, mesh[axes], reshard_after_forward=reshard_after_forward)


def _turned(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Two axes of a mesh in the other order, which a slice cannot have; of the same groups."""
    groups = [mesh.get_group(axis) for axis in axes]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh[axes[::-1]].mesh.T, mesh_dim_names=axes)


def _own_storage(chain: models.Chain, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """A stage's output is detached in place after the first half of its backward, which torch does to no view; and the
    part of an output that a tensor rank has is one."""
    return output.clone() if output._is_view() else output


class MeshPipeline(Pipeline):
    """A pipeline whose stages are distributed over the other axes of a mesh.

    Layers stay gathered in it: a backward in halves needs the parameters of its forward.
    """

    stage_class = LayeredStage

    def __init__(self, job: Job, place: Place, batches: Batches, mesh: DeviceMesh):
        self.mesh = mesh
        super().__init__(job, place, batches, mesh.get_group("pp"))
        self.norm_groups = {"pp": self.group}  # the other axes' DTensors sum over those themselves

    def _stage(self, whole: models.Chain, stage: int, place: Place) -> LayeredStage:
        layered = super()._stage(whole, stage, place)
        layered.passes: dict[int, Pass] = {}  # by microbatch, those whose backward is still to come
        return layered

    def prepared(self, chain: models.Chain) -> models.Chain:
        chain.recorder = self.recorder
        chain.register_forward_hook(_own_storage)
        distribute(chain, self.job, self.mesh, reshard_after_forward=False)
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
        return output_of(self.job, held(self.job)[self.job.stage_layers[stage][-1]]).output
