"""A job under context parallelism -> its plan: DDP's, with a rank's own tokens, and each block cut at its attention.

Who holds what differs from DDP only in the data: all ranks see the same samples, and each has other tokens of them. So
DDP's buckets go over the axis cp, and a bucket is full when the piece of a layer that makes its last gradient is done.
"""

import dataclasses

from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.modes.context.cuts import alike, own_tokens, summed, tokens_of, ways
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
    samples, own, role_of = job.micro_batch, own_tokens(job), alike(job)
    programs = {}  # of ranks that attend to as many blocks
    for rank in dict.fromkeys(role_of):
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

        update = [*chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec)]
        programs[rank] = joined(chain.microsteps(own, passes), update)
    holds = tuple(range(len(job.layers)))
    memory = replica.memory | {"summed": summed(own, samples)}
    played = tuple(Program(ops, holds, memory) for ops in programs.values())
    roles, names = tuple(map(list(programs).index, role_of)), tuple(layer.name for layer in job.layers)
    return Plan(Mesh(("cp",), (len(roles),)), played, roles, names, tokens_of(job))


def _made(cut: Cut) -> dict[str, list[str]]:
    """Piece of a way back -> the parameters whose gradients it makes, in order."""
    pieces = [item for item in cut if isinstance(item, Layer)]
    return {item.name: [f"{item.name.split('.')[0]}.{name}" for name, _ in reversed(item.params)] for item in pieces}
