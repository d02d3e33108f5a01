"""A job under torch's fully_shard: every layer of the chain a unit of its own, and the chain as the root."""

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from engine.job import Job
from engine.real import models
from engine.real.averaging import check_averages
from engine.real.data import Batches
from engine.real.events import Event
from engine.real.meshes import Sharding
from engine.real.recorder import Recorder
from engine.real.training import LocalTraining, Place

UNIT = re.compile(r"FSDP::post_backward_reduce \((.+)\)")
REDUCE_SCATTER = "lockstep::reduce_scatter"


def training(job: Job, place: Place) -> LocalTraining:
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("fsdp",))
    return sharded_training(job, place, mesh, reshard_after_forward=True)


def sharded_training(job: Job, place: Place, mesh: DeviceMesh, *, reshard_after_forward: bool) -> LocalTraining:
    chain = models.build(job).to(place.device)
    chain.recorder = place.recorder
    shard_layers(chain, Sharding(mesh), reshard_after_forward=reshard_after_forward)
    optimizer = models.make_optimizer(job, chain.parameters())
    batches = Batches(job, place.rank, place.world_size, place.device)
    local = LocalTraining(job, place, chain, chain, batches, optimizer)
    local.reducing = lambda reduces: nullcontext(chain.set_requires_gradient_sync(reduces))
    return local


def shard_layers(
    chain: models.Chain, whole: Sharding, *, reshard_after_forward: bool, experts: Sharding | None = None
) -> None:
    """Every layer a unit of its own, and the chain as the root. `experts`: how those of a block are sharded, if not as
    the rest of it.

    The hook that is put in front here comes after FSDP's, which is put in front of it, and before one that cuts the
    layer's input for tensor ranks.
    """
    inner = {f"{name}.experts": layer.experts for name, layer in chain.named_children() if experts and _mixes(layer)}
    for sharding in (whole, *([experts] if inner else [])):
        check_averages(sharding.mesh, next(chain.parameters()).device)
    for name, layer in chain.named_children():
        layer.register_forward_pre_hook(_marks(chain, name), prepend=True)
    for unit in inner.values():
        fully_shard(unit, mesh=experts.mesh, reshard_after_forward=reshard_after_forward)
    for unit in [*chain.children(), chain]:
        fully_shard(unit, mesh=whole.mesh, reshard_after_forward=reshard_after_forward)
    for name, layer in [*chain.named_children(), *inner.items()]:
        layer.set_custom_all_gather(AnnouncedAllGather(chain.recorder, name))
        layer.set_custom_reduce_scatter(MarkedReduceScatter())
    of_experts = (experts or whole).replicas
    chain.recorder.identify = functools.partial(identify, replicas=whole.replicas, of_experts=of_experts)


def _mixes(layer: nn.Module) -> bool:
    return isinstance(layer, models.MixtureBlock)


class AnnouncedAllGather(DefaultAllGather):
    """PyTorch's own call, announced: one in the background is seen outside of the marks around its call."""

    def __init__(self, recorder: Recorder, layer: str):
        super().__init__()
        self.recorder, self.layer = recorder, layer

    def __call__(self, output_tensor, input_tensor, *args, **kwargs):
        self.recorder.background("all_gather", self.layer, "weights", input_tensor.nbytes, axis="fsdp")
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class MarkedReduceScatter(DefaultReduceScatter):
    """PyTorch's own call in a mark: gloo makes an all-reduce of it, and is seen to run that."""

    def __call__(self, *args, **kwargs):
        with record_function(REDUCE_SCATTER):
            return super().__call__(*args, **kwargs)


def identify(event: Event, replicas: str, of_experts: str) -> tuple[str, str, str, str]:
    """(kind, axis, payload, layer), by FSDP's marks around it: what was called, whatever the backend made of it.

    gloo's all-reduce for a reduce-scatter takes the same tensor, so the bytes seen are those of the call. What a layer
    all-reduces outside of a reduce-scatter goes across the replicas.
    """
    unit = next((found[1] for found in map(UNIT.fullmatch, event.inside) if found), "")
    if REDUCE_SCATTER in event.inside:
        return "reduce_scatter", "fsdp", "gradient", unit
    return event.kind, of_experts if unit.endswith(".experts") else replicas, "gradient", unit


def _marks(chain: models.Chain, name: str) -> Callable:
    """A hook that runs after FSDP has gathered the layer and before it computes, so none of the marks has a wait in it.

    The way back ends with the gradient of the layer's input, or of its own weights where that needs none; FSDP reduces
    after both.
    """
    hooked = False

    def ended(_: torch.Tensor) -> None:
        if chain.passed is not None:
            chain.passed.end_backward_of(name)

    def begin(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal hooked
        if not torch.is_grad_enabled():
            return
        if chain.passed is not None:
            chain.passed.begin(name)
        if inputs[0].requires_grad:
            inputs[0].register_hook(ended)
        elif not hooked:  # the gathered parameters are the same objects in every step
            hooked = True
            for parameter in (each for each in layer.parameters() if each.requires_grad):
                parameter.register_post_accumulate_grad_hook(ended)

    return begin
