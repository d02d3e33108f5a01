"""A job under local SGD -> its plan: one device's steps on every rank, and after each k-th all weights averaged."""

import dataclasses

from engine.job import Job
from engine.modes.single import plan as single
from engine.plan import Mesh, Op, Plan


def period(job: Job) -> int:
    return job.spec.sync_every


def plan(job: Job, step: int) -> Plan:
    alone = single.plan(job, step)
    (program,) = alone.programs
    if (step + 1) % period(job) == 0:
        # PyTorch lays all parameters end to end, and keeps them there: twice the weights while it does so.
        size = sum(layer.param_bytes for layer in job.layers)
        average = Op(kind="all_reduce", part="average", payload="weights", axis="dp", bytes=size)
        program = dataclasses.replace(program, ops=(*program.ops, average), memory=program.memory | {"average": size})
    ranks = job.degree("dp")
    return Plan(Mesh(("dp",), (ranks,)), (program,), (0,) * ranks, alone.layers)
