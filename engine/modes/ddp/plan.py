"""A job under DistributedDataParallel -> its plan: gradient buckets, each all-reduced once its last gradient is there.

DDP's rule (torch/csrc/distributed/c10d/reducer.cpp): at first all gradients share one bucket, since their order is
not known yet. Once reduced, the buckets are rebuilt in the order in which gradients arrived, and rank 0's order is
broadcast. A bucket is closed by the gradient that makes it reach its size limit.
"""

from collections.abc import Callable
from dataclasses import replace

from engine import chain
from engine.job import Job
from engine.modes.ddp.buckets import Bucket, buckets
from engine.modes.ddp.compression import kept, pieces
from engine.plan import Mesh, Op, Plan, Program

INT32 = 4  # bytes


def plan(job: Job, step: int) -> Plan:
    ops = [*chain.microsteps(job, lambda k, synced: _passes(job, step, k, synced))]
    ops += [*chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec)]
    memory = chain.standing_memory(job.layers, job.spec)
    memory["buckets"] = sum(layer.param_bytes for layer in job.layers)
    if extra := kept(buckets(job.layers, job.spec.bucket_mb), job.layers, job.spec):
        memory["compression"] = extra
    program = Program(tuple(ops), tuple(range(len(job.layers))), memory)
    ranks = job.degree("dp")
    return Plan(Mesh(("dp",), (ranks,)), (program,), (0,) * ranks, tuple(layer.name for layer in job.layers))


def _passes(job: Job, step: int, microstep: int, synced: bool) -> list[Op]:
    """What no_sync leaves out is the all-reduces; buckets are rebuilt in the first forward after the first of them."""
    each = job.spec.sync_every_microstep
    reduced = step * job.microsteps + microstep if each else step  # how often gradients were reduced before
    whole = buckets(job.layers, job.spec.bucket_mb if reduced else None)
    ops = bucket_order(whole, "dp") if reduced == 1 and (each or microstep == 0) else []
    ops += chain.forward(job.layers, job.micro_batch, spec=job.spec)
    for compute in chain.backward_by_layer(job.layers, job.micro_batch, spec=job.spec):
        ops += compute
        if synced:
            sent = all_reduces(whole, compute[-1].part, "dp", lambda b: pieces(b, job.layers, job.spec, reduced))
            ops += [replace(op, asynchronous=job.spec.overlap is not False) for op in sent]
    return ops


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
