"""A job under DistributedDataParallel -> its plan: gradient buckets, each all-reduced once its last gradient is there.

DDP's rule (torch/csrc/distributed/c10d/reducer.cpp): in step 0 all gradients share one bucket, since their order is
not known yet. In step 1 the buckets are rebuilt in the order in which gradients arrived, and rank 0's order is
broadcast. A bucket is closed by the gradient that makes it reach its size limit.
"""

from engine import chain
from engine.job import Job
from engine.modes.ddp.buckets import Bucket, buckets
from engine.plan import Mesh, Op, Plan, Program

INT32 = 4  # bytes


def plan(job: Job, step: int) -> Plan:
    limit_mb = job.spec.bucket_mb if step > 0 else None
    whole = buckets(job.layers, limit_mb)
    ops = [chain.load(job.sample_bytes, job.local_batch)]
    ops += bucket_order(whole, "dp") if step == 1 else []
    ops += chain.forward(job.layers, job.local_batch)
    for op in chain.backward(job.layers, job.local_batch):
        ops.append(op)
        ops += all_reduces(whole, op.part, "dp")
    ops.append(chain.optimizer(job.layers, job.spec))
    memory = chain.standing_memory(job.layers, job.spec)
    memory["buckets"] = sum(b.bytes for b in whole)
    program = Program(tuple(ops), tuple(range(len(job.layers))), memory)
    ranks = job.degree("dp")
    return Plan(Mesh(("dp",), (ranks,)), (program,), (0,) * ranks, tuple(layer.name for layer in job.layers))


def bucket_order(whole: list[Bucket], axis: str) -> list[Op]:
    """Rank 0 tells the others which gradient is where: an index each and their number, then the sizes."""
    sizes = {"bucket order": sum(len(bucket.params) for bucket in whole) + 1, "bucket sizes": len(whole)}
    return [Op(kind="broadcast", part=part, payload="control", axis=axis, bytes=INT32 * n) for part, n in sizes.items()]


def all_reduces(whole: list[Bucket], layer: str, axis: str) -> list[Op]:
    """Of the buckets that are full when `layer` has made its gradients."""
    common = {"kind": "all_reduce", "payload": "gradient", "axis": axis, "asynchronous": True}
    return [Op(part=f"bucket{i}", bytes=b.bytes, **common) for i, b in enumerate(whole) if b.last_layer == layer]
