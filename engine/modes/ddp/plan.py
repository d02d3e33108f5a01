"""A job under DistributedDataParallel -> its plan: gradient buckets, each all-reduced once its last gradient is there.

DDP's rule (torch/csrc/distributed/c10d/reducer.cpp): at first all gradients share one bucket, since their order is
not known yet. Once reduced, the buckets are rebuilt in the order in which gradients arrived, and rank 0's order is
broadcast. A bucket is closed by the gradient that makes it reach its size limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.asking.branches import left_out
from engine.asking.frozen import trained
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.modes.ddp.buckets import Bucket, buckets, filled_without
from engine.modes.ddp.compression import kept, pieces
from engine.plan import Mesh, Op, Plan, Program

INT32 = 4  # bytes
USED = "used parameters"


def plan(job: Job, step: int) -> Plan:
    memory = chain.standing_memory(job.layers, job.spec)
    if not job.spec.master_weights:  # whose gradients are views of one buffer
        memory["buckets"] = sum(layer.param_bytes for layer in trained(job.layers))
    if job.spec.find_unused:
        memory["buckets"] = memory.get("buckets", 0) + 2 * _used(job).bytes  # and as much to send
    if extra := kept(buckets(job.layers, job.spec.bucket_mb), job.layers, job.spec):
        memory["compression"] = extra
    ranks, apart = job.degree("dp"), left_out(job.spec)
    kinds = [*dict.fromkeys(apart.get(rank, ()) for rank in range(ranks))]
    programs = tuple(Program(_ops(job, step, kind), tuple(range(len(job.layers))), memory) for kind in kinds)
    of_rank = tuple(kinds.index(apart.get(rank, ())) for rank in range(ranks))
    return Plan(Mesh(("dp",), (ranks,)), programs, of_rank, tuple(layer.name for layer in job.layers))


def _ops(job: Job, step: int, without: Sequence[str]) -> tuple[Op, ...]:
    layers = tuple(layer for layer in job.layers if layer.name not in without)
    ops = chain.microsteps(job, lambda k, synced: _passes(job, layers, step, k, synced))
    return (*ops, *chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec))


def _passes(job: Job, layers: tuple[Layer, ...], step: int, microstep: int, synced: bool) -> list[Op]:
    """What no_sync leaves out is the all-reduces; buckets are rebuilt in the first forward after the first of them.
    `layers` are those that this rank has in its loss. DDP that looks for others never rebuilds its buckets."""
    each, looks = job.spec.sync_every_microstep, job.spec.find_unused
    reduced = step * job.microsteps + microstep if each else step  # how often gradients were reduced before
    whole = buckets(trained(job.layers), job.spec.bucket_mb if reduced or looks else None, forward=bool(looks))
    whole = filled_without(whole, [layer.name for layer in reversed(layers)])
    ops = bucket_order(whole, "dp") if not looks and reduced == 1 and (each or microstep == 0) else []
    ops += chain.forward(layers, job.micro_batch, spec=job.spec)
    for compute in chain.backward_by_layer(layers, job.micro_batch, spec=job.spec):
        ops += compute
        if synced:
            sent = all_reduces(whole, compute[-1].part, "dp", lambda b: pieces(b, job.layers, job.spec, reduced))
            sent += [_used(job)] if looks and compute[-1].part == whole[-1].last_layer else []
            ops += [replace(op, asynchronous=job.spec.overlap is not False) for op in sent]
    return ops


def _used(job: Job) -> Op:
    """How many ranks have each parameter in their loss is summed after the last bucket: gradients that none of them has
    are left alone (reducer.cpp, all_reduce_local_used_map)."""
    size = INT32 * sum(len(layer.params) for layer in trained(job.layers))
    return Op(kind="all_reduce", part=USED, payload="control", axis="dp", bytes=size)


def bucket_order(whole: list[Bucket], axis: str) -> list[Op]:
    """Rank 0 tells the others which gradient is where: an index each and their number, then the sizes."""
    sizes = {"bucket order": sum(len(bucket.params) for bucket in whole) + 1, "bucket sizes": len(whole)}
    return [Op(kind="broadcast", part=part, payload="control", axis=axis, bytes=INT32 * n) for part, n in sizes.items()]


def _whole(bucket: Bucket) -> list[tuple[str, int]]:
    return [("", bucket.bytes)]


def all_reduces(
    whole: list[Bucket], layer: str, axis: str, sent: Callable[[Bucket], list[tuple[str, int]]] = _whole
) -> list[Op]:
    """Of the buckets that are full when `layer` has made its gradients; `sent` is what of each, and its bytes."""
    common = {"kind": "all_reduce", "payload": "gradient", "axis": axis, "asynchronous": True}
    full = [(i, bucket) for i, bucket in enumerate(whole) if bucket.last_layer == layer]
    return [Op(part=f"bucket{i}{what}", bytes=size, **common) for i, bucket in full for what, size in sent(bucket)]
