"""A job on one DeviceMesh of all its axes, under the PyTorch classes that belong to them."""

import functools
from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from engine.asking.settings import DATA_AXES
from engine.job import Job
from engine.model.presets import family
from engine.modes.context.cuts import own_tokens
from engine.modes.context.run import deal_out, look_around
from engine.modes.expert.plan import all_ranks
from engine.modes.expert.run import replicated
from engine.modes.fsdp.run import shard_layers
from engine.modes.hybrid.cuts import held, output_of, parts, seat_of
from engine.modes.hybrid.plan import mesh_of
from engine.modes.pipeline.run import Pipeline
from engine.modes.sequence import run as sequence
from engine.modes.tensor import run as tensor
from engine.modes.tensor.run import TensorTraining, cut_layers, lay_out_gradients
from engine.real import models
from engine.real.data import Batches
from engine.real.experts import share_experts
from engine.real.functional import announce
from engine.real.layered_stage import LayeredStage
from engine.real.meshes import Meshes
from engine.real.training import Place, Training, forget_forward


def training(job: Job, place: Place) -> Training:
    axes, recorder = mesh_of(job), place.recorder
    meshes = Meshes(job, axes, place.device.type)
    recorder.mesh = axes
    if family(job.spec.model) == "moe" and set(axes.axes) <= {"dp", "ep"}:
        groups = [meshes.every.get_group(axis) for axis in ("ep", "dp")]
        return replicated(job, place, groups[0], axis=all_ranks(axes), copies=groups[1])
    if job.degree("tp") > 1:
        announce(recorder, "tp")
    recorder.parts = functools.partial(parts, job, seat=seat_of(job, axes, place.rank))
    batches = Batches(job, _replica(job, meshes.every), job.replicas, place.device)
    deal_out(batches, job, meshes.every.get_group("cp"))
    if job.degree("pp") > 1:
        return MeshPipeline(job, place, batches, meshes)
    chain = models.build(job).to(place.device)
    chain.recorder = recorder
    own = distribute(chain, job, meshes, reshard_after_forward=True)
    local = TensorTraining(job, place, chain, chain, batches, models.make_optimizer(job, chain.parameters()))
    if own:
        local.norm_groups, local.norm_names = {job.expert_axis: meshes.expert_group}, {job.expert_axis: own}
    if isinstance(chain, FSDPModule):
        local.reducing = lambda reduces: nullcontext(chain.set_requires_gradient_sync(reduces))
    return local


def _replica(job: Job, mesh: DeviceMesh) -> int:
    """Which part of the batch is this rank's."""
    replica = 0
    for axis in DATA_AXES:
        replica = replica * job.degree(axis) + mesh.get_local_rank(axis)
    return replica


def distribute(chain: models.Chain, job: Job, meshes: Meshes, *, reshard_after_forward: bool) -> list[str]:
    """Layers that see some tokens and have some experts, cut for tensor ranks; and what this rank has of them sharded
    over fsdp and replicated. Returns the names of the parameters that others along the experts' axis have not."""
    look_around(chain, job, meshes.every.get_group("cp"), chain.recorder)
    known = {"axis": job.expert_axis, "losses": job.degree("ep")}
    own = share_experts(chain, meshes.expert_group, chain.recorder, **known) if job.expert_axis else []
    if job.degree("tp") > 1:
        here = [name for name, _ in chain.named_children()]
        layouts = (sequence if job.spec.sequence_parallel else tensor).layouts(job, meshes.experts_tp)
        cut_layers(chain, meshes.tp, {n: layout for n, layout in layouts.items() if n.split(".")[0] in here})
    if meshes.layers is not None:
        shard_layers(chain, meshes.layers, experts=meshes.experts, reshard_after_forward=reshard_after_forward)
    return own


def _own_storage(chain: models.Chain, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """A stage's output is detached in place after the first half of its backward, which torch does to no view; and the
    part of an output that a tensor rank has is one."""
    return output.clone() if output._is_view() else output


class MeshPipeline(Pipeline):
    """A pipeline whose stages are distributed over the other axes of a mesh.

    Layers stay gathered in it: a backward in halves needs the parameters of its forward.
    """

    stage_class = LayeredStage

    def __init__(self, job: Job, place: Place, batches: Batches, meshes: Meshes):
        self.meshes, self.seat, self.norm_names = meshes, seat_of(job, mesh_of(job), place.rank), {}
        super().__init__(job, place, batches, meshes.every.get_group("pp"))
        # Others' DTensors sum over those themselves.
        self.norm_groups = {job.expert_axis: meshes.expert_group} if job.expert_axis else {}
        self.norm_groups["pp"] = meshes.every.get_group("pp")

    def prepared(self, chain: models.Chain) -> models.Chain:
        chain = super().prepared(chain)
        chain.register_forward_hook(_own_storage)
        own = distribute(chain, self.job, self.meshes, reshard_after_forward=False)
        if self.job.expert_axis:
            self.norm_names.setdefault(self.job.expert_axis, []).extend(own)
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
        own = own_tokens(self.job)
        return output_of(own, held(own, self.seat)[self.job.stage_layers[stage][-1]]).output
