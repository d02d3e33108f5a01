"""A job under fully_shard on a mesh of replicas x shards -> its plan: FSDP in each group, and all-reduces across."""

from engine.job import Job
from engine.modes.fsdp.plan import gathering_twice
from engine.plan import Mesh, Plan


def plan(job: Job, step: int) -> Plan:
    return gathering_twice(job, Mesh(("dp", "fsdp"), (job.spec.dp, job.spec.fsdp)))
