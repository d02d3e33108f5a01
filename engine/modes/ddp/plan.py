"""A job under DistributedDataParallel -> its plan: gradient buckets, each all-reduced once its last gradient is there.

DDP's rule (torch/csrc/distributed/c10d/reducer.cpp): at first all gradients share one bucket, since their order is
not known yet. Once reduced, the buckets are rebuilt in the order in which gradients arrived, and rank 0's order is
broadcast. A bucket is closed by the gradient that makes it reach its size limit.
"""

from engine import chain
from engine.job import Job
from engine.modes.ddp.buckets import buckets
from engine.modes.ddp.compression import all_reduces, kept
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
    ops = []
    if reduced == 1 and (each or microstep == 0):
        num_params = sum(len(layer.params) for layer in job.layers)
        ops += [_control("bucket order", INT32 * (num_params + 1)), _control("bucket sizes", INT32 * len(whole))]
    ops += chain.forward(job.layers, job.micro_batch, spec=job.spec)
    for compute in chain.backward_by_layer(job.layers, job.micro_batch, spec=job.spec):
        full = [(i, b) for i, b in enumerate(whole) if synced and b.last_layer == compute[-1].part]
        ops += compute
        for i, bucket in full:
            sent = all_reduces(bucket, job.layers, job.spec, reduced)
            ops += [_all_reduce(f"bucket{i}{what}", size) for what, size in sent]
    return ops


def _all_reduce(part: str, size: int) -> Op:
    return Op(kind="all_reduce", part=part, payload="gradient", axis="dp", asynchronous=True, bytes=size)


def _control(part: str, size: int) -> Op:
    return Op(kind="broadcast", part=part, payload="control", axis="dp", bytes=size)
