"""A job on a mesh of fsdp and cp -> its plan: sequences dealt out over cp, and each rank's layers gathered over fsdp.

FSDP takes cp for its replicas: all ranks of it have the same shards, and other tokens.
"""

import dataclasses

from engine import chain
from engine.job import Job
from engine.modes.context import cuts
from engine.modes.context.deal import span
from engine.modes.context.plan import ops_of
from engine.modes.fsdp.plan import passes_twice, shard_of, sharing
from engine.plan import Mesh, Plan


def dealt_out(job: Job, mesh: Mesh) -> Plan:
    ranks, layers = job.degree("cp"), job.layers
    held, names = dict(enumerate(layers)), tuple(layer.name for layer in layers)
    programs, roles = [], []
    for place in range(ranks):
        load = chain.load(job.sample_bytes // ranks, job.local_batch)
        load = dataclasses.replace(load, part=span(place, ranks, job.spec.context, job.spec.balance))
        ways = ((cuts.forward, chain.forward), (cuts.backward, chain.backward))
        units = [
            chain.Unit(layer, *(tuple(ops_of(cut(job, layer, place), way, job.local_batch)) for cut, way in ways))
            for layer in layers
        ]
        passes, gathered = passes_twice(job, mesh, units)
        ops = (load, *passes(True))
        new, shards = sharing(job, mesh, held, lambda update, ops=ops: (*ops, *update), {"gathered": gathered})
        roles.append([len(programs) + i for i in shards])
        programs += new
    of_rank = (roles[mesh.coordinate(rank, "cp")][shard_of(mesh, rank)] for rank in range(mesh.size))
    return Plan(mesh, tuple(programs), tuple(of_rank), names)
