"""A job under fully_shard -> its plan: every layer gathered before it computes, its gradients reduced to their shards.

In backward fully_shard asks for the layer that comes next before it lets the current one compute
(FSDPParamGroup._backward_prefetch). Where ranks are gloo processes a collective is waited for on the spot, so this
only changes the order. GPUs gather on a stream of their own, one layer ahead in forward too, while a layer computes.
"""

from collections.abc import Callable

from engine import chain
from engine.cost.machine import machine
from engine.job import Job
from engine.modes.fsdp.units import equal_ranks, gathered_bytes, padded_bytes, shard
from engine.plan import Mesh, Op, Plan, Program
from engine.shapes import Layer


def plan(job: Job, step: int) -> Plan:
    return gathering_twice(job, Mesh(("fsdp",), (job.degree("fsdp"),)))


def gathering_twice(job: Job, mesh: Mesh) -> Plan:
    """Layers are freed after forward (reshard_after_forward=True), and gathered again for backward."""
    gathers = [gather(layer, job, mesh) for layer in reversed(job.layers)]
    computes = chain.backward_by_layer(job.layers, job.micro_batch, spec=job.spec)
    reduces = [reduce(layer, job, mesh) for layer in reversed(job.layers)]

    def passes(synced: bool) -> list[Op]:
        ops = [*forward(job, mesh), *gathers[0]]
        for following, compute, reduced in zip([*gathers[1:], []], computes, reduces, strict=True):
            ops += [*following, *compute, *(reduced if synced else ())]
        return ops

    ranks = mesh.degree("fsdp")
    sizes = [0, *(gathered_bytes(layer, ranks) for layer in job.layers), 0]
    # A layer is copied out of what was gathered. Beside both lies what the layer before was gathered into, or in
    # backward the gradients of the one after it, to be reduced. A group of one copies its shards and gathers nothing.
    several = ranks > 1
    triples = zip(sizes[:-2], sizes[1:-1], sizes[2:], strict=True)
    most = max((1 + several) * own + max(several * before, after) for before, own, after in triples)
    return sharded(job, mesh, passes, gathered=most)


def forward(job: Job, mesh: Mesh) -> list[Op]:
    """Every layer gathered, then computed; on devices of their own the next one is gathered meanwhile."""
    gathers = [gather(layer, job, mesh) for layer in job.layers]
    computes = chain.forward(job.layers, job.micro_batch, spec=job.spec)
    if not overlaps(job):
        return [op for gathered, compute in zip(gathers, computes, strict=True) for op in (*gathered, compute)]
    ahead = [*gathers[1:], []]
    return [*gathers[0], *(op for pair in zip(ahead, computes, strict=True) for op in (*pair[0], pair[1]))]


def overlaps(job: Job) -> bool:
    """Whether ranks have devices of their own, with streams for communication."""
    return machine(job.spec.machine).cores == 0


def gather(layer: Layer, job: Job, mesh: Mesh) -> list[Op]:
    """A group of one has nothing to gather."""
    ranks = mesh.degree("fsdp")
    size = padded_bytes(layer, ranks)
    return [_collective("all_gather", layer, "weights", "fsdp", size, job)] if ranks > 1 else []


def reduce(layer: Layer, job: Job, mesh: Mesh) -> list[Op]:
    """Gradients to their shards, and on a mesh with replicas each shard with its like, even where there is just one."""
    ranks = mesh.degree("fsdp")
    ops = []
    if ranks > 1:
        whole = gathered_bytes(layer, ranks)
        ops.append(_collective("reduce_scatter", layer, "gradient", "fsdp", whole, job))
    if "dp" in mesh.axes:
        ops.append(_collective("all_reduce", layer, "gradient", "dp", padded_bytes(layer, ranks), job))
    return ops


def _collective(kind: str, layer: Layer, payload: str, axis: str, size: int, job: Job) -> Op:
    return Op(kind=kind, part=layer.name, payload=payload, axis=axis, bytes=size, asynchronous=overlaps(job))


def sharded(job: Job, mesh: Mesh, passes: Callable[[bool], list[Op]], *, gathered: int) -> Plan:
    """`passes(whether gradients are reduced)` of every micro-step, and the update of each rank's own shard.

    Shards are allocated with their padding; optimizer state is not padded. `gathered`: most bytes of whole layers at
    any time. Gradients that wait for the last micro-step wait whole, and become shards layer by layer after it.
    """
    ranks = mesh.degree("fsdp")
    whole_gradients = sum(layer.param_bytes for layer in job.layers)
    waits = job.microsteps > 1 and not job.spec.sync_every_microstep
    steps = chain.microsteps(job, lambda k, synced: passes(synced))
    programs, roles = [], []
    for run in equal_ranks(job.layers, ranks):
        shards = [shard(layer, ranks, run.start) for layer in job.layers]
        numbers = sum(len(layer.params) for layer in job.layers)  # the norm of each parameter
        clip = chain.clip(shards, job.spec, {"fsdp": numbers} if ranks > 1 else {})
        ops = (*steps, *clip, chain.optimizer(shards, job.spec))
        padded = sum(padded_bytes(layer, ranks) for layer in job.layers)
        kept = {"parameters": padded, "gradients": max(whole_gradients, padded) if waits else padded}
        memory = chain.standing_memory(shards, job.spec) | kept
        holds = tuple(i for i, layer in enumerate(shards) if layer.param_bytes)
        roles += [len(programs)] * len(run)
        shares = tuple(shards[i].param_bytes / job.layers[i].param_bytes for i in holds)
        programs.append(Program(ops, holds, memory | {"gathered": gathered}, shares=shares if ranks > 1 else ()))
    replicas = mesh.size // ranks
    return Plan(mesh, tuple(programs), tuple(roles) * replicas, tuple(layer.name for layer in job.layers))
