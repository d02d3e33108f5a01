"""A job under torch's parallelize_module: linear layers cut by columns, then by rows; all ranks see the whole batch."""

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from engine.job import Job
from engine.model.shapes import num_experts
from engine.modes.tensor.plan import parts
from engine.modes.tensor.shards import styles
from engine.real import models
from engine.real.data import Batches
from engine.real.experts import SharedExperts, WholeExperts
from engine.real.functional import announce
from engine.real.training import LocalTraining, Place

LOGITS = {"output_layouts": Shard(-1), "use_local_output": False}  # stay cut by tokens of the vocabulary, for the loss


def training(job: Job, place: Place) -> "TensorTraining":
    chain = parallel_chain(job, place, layouts(job))
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    optimizer = models.make_optimizer(job, chain.parameters())
    return TensorTraining(job, place, chain, chain, Batches(job, 0, 1, place.device), optimizer)


def layouts(job: Job, experts: DeviceMesh | None = None) -> dict[str, ParallelStyle]:
    """Module name -> how its parameters lie on the ranks. `experts`: the mesh for those of blocks, if it is another."""
    plan: dict[str, ParallelStyle] = routed(job, Replicate(), experts)
    for name, style in styles_alone(job):
        if style == "vocabulary":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif style == "column":
            plan[name] = ColwiseParallel(**(LOGITS if name == "head.linear" else {}))
        else:
            plan[name] = RowwiseParallel()
    return plan


def routed(job: Job, tokens: Placement, experts: DeviceMesh | None) -> dict[str, ParallelStyle]:
    """Blocks whose experts tensor ranks share. `tokens`: how these lie on the ranks outside of them."""
    if job.degree("tp") == 1:
        return {}
    style = WholeExperts(tokens) if job.whole_experts else SharedExperts(tokens, experts)
    return {layer.name: style for layer in job.layers if num_experts(layer)}


def styles_alone(job: Job) -> list[tuple[str, str]]:
    """Of modules that are laid out by themselves, and not with their block: name and style."""
    return [(name, style) for name, style in styles(job).items() if ".experts." not in name]


class TensorTraining(LocalTraining):
    """The loss of logits that are cut by tokens of the vocabulary, and gradients laid out as their parameters are.

    Autograd leaves some otherwise: of an embedding's rows it gives every rank all, of a norm that has seen a part of
    the context a part, to be summed.
    """

    def make_gradients(self, step: int) -> float:
        with loss_parallel():
            loss = super().make_gradients(step)
        lay_out_gradients(self.chain.parameters())
        return loss


def lay_out_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """As their parameters are, where autograd has left them otherwise."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def parallel_chain(job: Job, place: Place, plan: dict[str, ParallelStyle]) -> models.Chain:
    """The model with its parameters laid over the ranks as `plan` says, its collectives announced to the recorder."""
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    cut_layers(chain, init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("tp",)), plan)
    announce(place.recorder, "tp")
    return chain


def cut_layers(chain: models.Chain, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    """To be followed, once for all of a process's chains, by `announce`."""
    if plan:
        parallelize_module(chain, mesh, plan)
    chain.watch_first_gradients()
