"""A job under expert parallelism -> its plan: every block cut where its tokens travel to the experts and back."""

from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.modes.ddp.buckets import DEFAULT_BUCKET_MB, buckets
from engine.modes.ddp.plan import all_reduces, bucket_order
from engine.modes.expert.cuts import EXPERTS, ways
from engine.modes.expert.shares import held, replicated
from engine.modes.tensor.cuts import units
from engine.modes.tensor.shards import piece
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    return on_mesh(job, Mesh(("ep",), (job.degree("ep"),)), step)


def on_mesh(job: Job, mesh: Mesh, step: int) -> Plan:
    """Over ep experts are shared out, and over dp all of that is there again."""
    alike = job.routed is None  # then all ranks do the same
    programs = tuple(_program(job, step, mesh, rank) for rank in range(1 if alike else mesh.size))
    roles = (0,) * mesh.size if alike else tuple(range(mesh.size))
    return Plan(mesh, programs, roles, tuple(layer.name for layer in job.layers))


def all_ranks(mesh: Mesh) -> str:
    """The axis over which averages what every rank has."""
    return mesh.axes[0] if len(mesh.axes) == 1 else "dp_ep"


def _program(job: Job, step: int, mesh: Mesh, rank: int) -> Program:
    """DDP's buckets hold the gradients of what every rank has. A block makes the last of them at the very end."""
    shared, axis = mesh.degree("ep") > 1, all_ranks(mesh)
    group, place = (mesh.group(rank, "ep"), mesh.coordinate(rank, "ep")) if mesh.has("ep") else ((rank,), 0)
    layers, batch = held(job, place), job.micro_batch
    limit = job.spec.bucket_mb or DEFAULT_BUCKET_MB
    whole = buckets(replicated(job), limit if step > 0 else None)
    averaged = shared and mesh.degree("dp") > 1

    def passes(k: int, synced: bool) -> list[Op]:
        ops = bucket_order(whole, axis) if step == 1 and k == 0 else []
        cut = units(job, layers, batch, *ways(job, group, place, batch, k))
        ops += [op for unit in cut for op in unit.forward]
        for unit in reversed(cut):
            for op in unit.backward:
                ops.append(op)
                if averaged and synced and op.kind == "backward" and op.part.endswith(EXPERTS):
                    ops.append(_average(op.part, unit.layer))
            ops += all_reduces(whole, unit.layer.name, axis) if synced else []
        return ops

    ops = chain.microsteps(job, passes)
    clip = chain.clip(layers, job.spec, [("ep", 1)] if shared else [])  # the square of its experts' norm
    ops = joined(ops, clip, [chain.optimizer(layers, job.spec)])
    memory = chain.standing_memory(layers, job.spec)
    if not job.spec.master_weights:  # whose gradients are reduced where they are
        memory["buckets"] = sum(bucket.bytes for bucket in whole)
        memory["buckets"] += sum(op.bytes for op in ops if op.kind == "all_reduce" and op.part.endswith(EXPERTS))
    shares = tuple(mine.param_bytes / layer.param_bytes for mine, layer in zip(layers, job.layers, strict=True))
    return Program(ops, tuple(range(len(layers))), memory, shares=shares if shared else ())


def _average(part: str, layer: Layer) -> Op:
    """Of the gradients of a block's experts, over those that hold the same ones; in the background, as a bucket's."""
    where = {"part": part, "payload": "gradient", "axis": "dp"}
    return Op(kind="all_reduce", bytes=piece(layer, "", "experts", output=()).param_bytes, asynchronous=True, **where)
