"""A job under context parallelism -> its plan: DDP's, with a rank's own tokens, and each block cut at its attention.

Who holds what differs from DDP only in the data: all ranks see the same samples, and each has other tokens of them. So
DDP's buckets go over the axis cp, and a bucket is full when the piece of a layer that makes its last gradient is done.
"""

import dataclasses
from collections.abc import Callable

from engine import chain
from engine.job import Job
from engine.modes.context.cuts import backward, forward, own_tokens
from engine.modes.context.deal import span
from engine.modes.ddp import plan as ddp
from engine.modes.ddp.buckets import buckets
from engine.modes.tensor.cuts import Cut
from engine.plan import Mesh, Op, Plan, Program
from engine.shapes import Layer


def plan(job: Job, step: int) -> Plan:
    (replica,) = ddp.plan(job, step).programs
    shared = [dataclasses.replace(op, axis="cp") for op in replica.ops if op.axis]
    control = [op for op in shared if op.kind != "all_reduce"]
    reduces = [op for op in shared if op.kind == "all_reduce"]
    last = [bucket.params[-1] for bucket in buckets(job.layers, job.spec.bucket_mb if step else None)]
    due = dict(zip(last, reduces, strict=True))
    ranks, samples, own = job.degree("cp"), job.micro_batch, own_tokens(job)
    programs: dict[tuple[Op, ...], int] = {}
    roles = []
    for rank in range(ranks):

        def passes(k: int, synced: bool, rank: int = rank) -> list[Op]:
            ops = [] if k else [*control]
            for layer in own.layers:
                ops += ops_of(forward(job, layer, rank), chain.forward, samples)
            for layer in reversed(own.layers):
                for item in backward(job, layer, rank):
                    ops += ops_of([item], chain.backward, samples)
                    made = [f"{layer.name}.{name}" for name, _ in item.params] if isinstance(item, Layer) else []
                    ops += [due[name] for name in reversed(made) if synced and name in due]
            return ops

        where = span(rank, ranks, job.spec.context, job.spec.balance) if ranks > 1 else ""
        steps = chain.microsteps(own, passes)
        ops = [dataclasses.replace(op, part=where) if op.kind == "load" else op for op in steps]
        ops += [*chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec)]
        roles.append(programs.setdefault(tuple(ops), len(programs)))
    layers = range(len(job.layers))
    made = tuple(Program(ops, tuple(layers), replica.memory) for ops in programs)
    return Plan(Mesh(("cp",), (ranks,)), made, tuple(roles), tuple(layer.name for layer in job.layers))


def ops_of(cut: Cut, way: Callable[..., list[Op]], samples: int) -> list[Op]:
    """A pass (chain.forward or chain.backward) of a batch through a layer that is cut."""
    ops: list[Op] = []
    for item in cut:
        exchange = isinstance(item, Op)
        ops += [dataclasses.replace(item, bytes=item.bytes * samples)] if exchange else way([item], samples)
    return ops
