"""A job under context parallelism -> its plan: DDP's, with a rank's own tokens, and each block cut at its attention.

Who holds what differs from DDP only in the data: all ranks see the same samples, and each has other tokens of them. So
DDP's buckets go over the axis cp, and a bucket is full when the piece of a layer that makes its last gradient is done.
"""

import dataclasses

from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.modes.context.cuts import own_tokens, summed, ways
from engine.modes.context.deal import span
from engine.modes.ddp import plan as ddp
from engine.modes.ddp.buckets import buckets
from engine.modes.tensor.cuts import Cut, units
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    (replica,) = ddp.plan(job, step).programs
    shared = [dataclasses.replace(op, axis="cp") for op in replica.ops if op.axis]
    control = [op for op in shared if op.kind != "all_reduce"]
    reduces = [op for op in shared if op.kind == "all_reduce"]
    last = [bucket.params[-1] for bucket in buckets(job.layers, job.spec.bucket_mb if step else None)]
    due = dict(zip(last, reduces, strict=True))
    ranks, samples, own = job.degree("cp"), job.micro_batch, own_tokens(job)
    programs = []  # each rank has tokens of its own
    for rank in range(ranks):
        layers, cuts = own.layers, ways(samples, rank)
        made = {name: each for layer in layers for name, each in _made(cuts[1](own, layer)).items()}
        each = units(own, layers, samples, *cuts)

        def passes(k: int, synced: bool, made: dict = made, each: list[chain.Unit] = each) -> list[Op]:
            ops = [*([] if k else control), *(op for unit in each for op in unit.forward)]
            for unit in reversed(each):
                for op in unit.backward:
                    of_piece = made.get(op.part, ()) if synced and op.kind == "backward" else ()
                    ops += [op, *(due[name] for name in of_piece if name in due)]
            return ops

        where = span(rank, ranks, job.spec.context, job.spec.balance) if ranks > 1 else ""
        steps = chain.microsteps(own, passes)
        update = [*chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec)]
        programs.append(joined(chain.loading(steps, where), update))
    holds = tuple(range(len(job.layers)))
    memory = replica.memory | {"summed": summed(own, samples)}
    played = tuple(Program(ops, holds, memory) for ops in programs)
    return Plan(Mesh(("cp",), (ranks,)), played, tuple(range(ranks)), tuple(layer.name for layer in job.layers))


def _made(cut: Cut) -> dict[str, list[str]]:
    """Piece of a way back -> the parameters whose gradients it makes, in order."""
    pieces = [item for item in cut if isinstance(item, Layer)]
    return {item.name: [f"{item.name.split('.')[0]}.{name}" for name, _ in reversed(item.params)] for item in pieces}
