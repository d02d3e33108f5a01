"""A job under fully_shard on a mesh of replicas x shards -> its plan: FSDP in each group, and all-reduces across."""

from engine.job import Job
from engine.model import chain
from engine.modes.fsdp.plan import gathering_twice
from engine.plan import Mesh, Plan


def plan(job: Job, step: int) -> Plan:
    mesh = Mesh(("dp", "fsdp"), (job.degree("dp"), job.degree("fsdp")))
    return gathering_twice(job, mesh, chain.units(job.layers, job.micro_batch, spec=job.spec))
