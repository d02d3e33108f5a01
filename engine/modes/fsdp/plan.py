"""A job under fully_shard -> its plan: every layer gathered before it computes, its gradients reduced to their shards.

In backward fully_shard asks for the layer that comes next before it lets the current one compute
(FSDPParamGroup._backward_prefetch). Where ranks are gloo processes a collective is waited for on the spot, so this
only changes the order. GPUs gather on a stream of their own, one layer ahead in forward too, while a layer computes.
FSDP's BACKWARD_POST (`backward_prefetch` is False) asks for it behind the current one, whose gradients travel after it.
"""

from collections.abc import Callable, Mapping, Sequence

from engine.asking.frozen import trained
from engine.cost.machine import shares_cores
from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.model.shapes import FP32, Layer
from engine.modes.fsdp.copies import backward_with, forward_with
from engine.modes.fsdp.norms import norm_sums
from engine.modes.fsdp.replicas import replicas_of
from engine.modes.fsdp.turns import most_whole, prefetched
from engine.modes.fsdp.units import equal_ranks, gathered_bytes, padded_bytes, shard
from engine.modes.tensor.shards import gradient_bytes
from engine.plan import Mesh, Op, Plan, Program

Passes = Callable[[int, bool], list[Op]]  # micro-step, whether gradients are reduced -> forward and backward


def plan(job: Job, step: int) -> Plan:
    units = chain.units(job.layers, job.micro_batch, spec=job.spec)
    return gathering_twice(job, Mesh(("fsdp",), (job.degree("fsdp"),)), units)


def gathering_twice(job: Job, mesh: Mesh, units: Sequence[chain.Unit]) -> Plan:
    """Layers are freed after forward (reshard_after_forward=True), and gathered again for backward."""
    passes, gathered = passes_twice(job, mesh, units)
    return sharded(job, mesh, units, passes, gathered=gathered)


def passes_twice(job: Job, mesh: Mesh, units: Sequence[chain.Unit], beside: int = 0) -> tuple[Passes, int]:
    """The passes, and the most bytes of whole layers at any time; `beside`: of other buffers, while attention goes
    back."""
    gathers, ranks = [gather(unit.layer, job, mesh) for unit in units], mesh.degree("fsdp")
    ahead = [[op for other in others for op in gathers[other]] for others in prefetched(units)]
    there, ways_back = forward(job, mesh, units), backward_with(units, job, mesh, gathered=True)

    def passes(_: int, synced: bool) -> list[Op]:
        ops = [*there, *gathers[-1]]
        for unit, gathered, back in zip(reversed(units), reversed(ahead), reversed(ways_back[synced]), strict=True):
            if unit.layer.stops:  # gathered for nothing, as FSDP goes by the order of forward
                break
            both = (back, gathered) if job.spec.backward_prefetch is False else (gathered, back)
            ops += [*both[0], *both[1], *(reduce(unit, job, mesh) if synced and not unit.layer.frozen else ())]
        return ops

    return passes, most_whole(units, [gathered_bytes(unit.layer, ranks) for unit in units], ranks, beside)


def forward(job: Job, mesh: Mesh, units: Sequence[chain.Unit]) -> list[Op]:
    """Every layer gathered, then computed; on devices of their own the next one is gathered meanwhile."""
    gathers, passes = [gather(unit.layer, job, mesh) for unit in units], forward_with(units, mesh)
    if not overlaps(job):
        return [op for gathered, ops in zip(gathers, passes, strict=True) for op in (*gathered, *ops)]
    ahead = [*gathers[1:], []]
    return [*gathers[0], *(op for new, ops in zip(ahead, passes, strict=True) for op in (*new, *ops))]


def overlaps(job: Job) -> bool:
    """Whether ranks have devices of their own, with streams for communication."""
    return not shares_cores(job.spec.machine) and job.spec.overlap is not False


def gather(layer: Layer, job: Job, mesh: Mesh) -> list[Op]:
    """A group of one has nothing to gather."""
    ranks = mesh.degree("fsdp")
    return [_collective("all_gather", layer, "weights", "fsdp", padded_bytes(layer, ranks), job)] if ranks > 1 else []


def reduce(unit: chain.Unit, job: Job, mesh: Mesh) -> list[Op]:
    """Gradients to their shards, and on a mesh with replicas each shard with its like, even where there is just one."""
    layer, ranks, ops = unit.layer, mesh.degree("fsdp"), [*unit.sums]
    if ranks > 1:
        ops.append(_collective("reduce_scatter", layer, "gradient", "fsdp", gathered_bytes(layer, ranks), job))
    if axis := replicas_of(mesh, of_experts=unit.inner):
        ops.append(_collective("all_reduce", layer, "gradient", axis, padded_bytes(layer, ranks), job))
    return ops


def _collective(kind: str, layer: Layer, payload: str, axis: str, size: int, job: Job) -> Op:
    return Op(kind=kind, part=layer.name, payload=payload, axis=axis, bytes=size, asynchronous=overlaps(job))


def sharded(job: Job, mesh: Mesh, units: Sequence[chain.Unit], passes: Passes, *, gathered: int) -> Plan:
    """The passes of every micro-step, and the update of each rank's own shard. `gathered`: most bytes of whole layers
    at any time. Gradients that wait for the last micro-step wait whole, and become shards layer by layer after it."""
    programs, roles = sharded_programs(job, mesh, [unit.layer for unit in units], passes, gathered=gathered)
    names = tuple(layer.name for layer in job.layers)
    return Plan(mesh, tuple(programs), tuple(roles[shard_of(mesh, rank)] for rank in range(mesh.size)), names)


def sharded_programs(
    job: Job, mesh: Mesh, layers: Sequence[Layer], passes: Passes, *, gathered: int
) -> tuple[list[Program], list[int]]:
    """Its programs, and which each coordinate on fsdp runs."""
    held = dict(enumerate(layers))
    steps = chain.microsteps(job, passes)
    waits = job.microsteps > 1 and not job.spec.sync_every_microstep
    whole = sum(gradient_bytes(job, layer) for layer in trained(held.values())) if waits else 0
    return sharing(job, mesh, held, lambda update: joined(steps, update), {"gathered": gathered}, least=whole)


def sharing(
    job: Job,
    mesh: Mesh,
    held: Mapping[int, Layer],
    ops: Callable[[Sequence[Op]], Sequence[Op]],
    memory: dict[str, int],
    stages: tuple[int, ...] = (),
    *,
    least: int = 0,
) -> tuple[list[Program], list[int]]:
    """The programs of ranks that share the layers `held` (by place), and which of them each coordinate on fsdp runs.

    `ops(update)`: what they do, with the update of a rank's own shard. Shards are allocated with their padding,
    optimizer state is not. `memory`: what else they keep; `least`: as many bytes of gradients, or more.
    """
    ranks = mesh.degree("fsdp")
    padded, learned = (sum(padded_bytes(it, ranks) for it in each) for each in (held.values(), trained(held.values())))
    norms = norm_sums(job, mesh, trained(held.values())) if job.spec.clip is not None else []
    programs, roles = [], []
    for run in equal_ranks(list(held.values()), ranks):
        shards = {i: shard(layer, ranks, run.start) for i, layer in held.items()}
        mine = list(shards.values())
        kept = {"parameters": padded, "gradients": max(least, learned)} | memory
        if job.spec.master_weights:
            whole = {"weight gradients": chain.made_in([*held.values()])}
            kept = kept | {"gradients": kept["gradients"] * FP32 // job.item} | memory | whole
        holds = tuple(i for i, layer in shards.items() if layer.param_bytes)
        shares = tuple(shards[i].param_bytes / job.layers[i].param_bytes for i in holds)
        roles += [len(programs)] * len(run)
        update = [*chain.clip(mine, job.spec, norms), chain.optimizer(mine, job.spec)]
        of_stage = tuple(stage for i, stage in zip(held, stages, strict=False) if i in holds)
        memory_of = chain.standing_memory(mine, job.spec) | kept
        part = () if all(share == 1 for share in shares) else shares
        programs.append(Program(ops(update), holds, memory_of, part, of_stage))
    return programs, roles


def shard_of(mesh: Mesh, rank: int) -> int:
    return mesh.coordinate(rank, "fsdp") if "fsdp" in mesh.axes else 0
