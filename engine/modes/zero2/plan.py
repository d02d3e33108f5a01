"""A job under fully_shard(reshard_after_forward=False) -> its plan: every layer gathered once, kept until backward."""

from engine import chain
from engine.job import Job
from engine.modes.fsdp.plan import forward, reduce, sharded
from engine.modes.fsdp.units import gathered_bytes
from engine.plan import Mesh, Op, Plan


def plan(job: Job, step: int) -> Plan:
    ranks = job.degree("fsdp")
    mesh = Mesh(("fsdp",), (ranks,))

    def passes(synced: bool) -> list[Op]:
        ops = forward(job, mesh)
        computes = chain.backward_by_layer(job.layers, job.micro_batch, spec=job.spec)
        for layer, compute in zip(reversed(job.layers), computes, strict=True):
            ops += [*compute, *(reduce(layer, job, mesh) if synced else ())]
        return ops

    return sharded(job, mesh, passes, gathered=sum(gathered_bytes(layer, ranks) for layer in job.layers))
