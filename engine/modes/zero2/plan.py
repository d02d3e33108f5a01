"""A job under fully_shard(reshard_after_forward=False) -> its plan: every layer gathered once, kept until backward."""

import itertools

from engine.job import Job
from engine.model import chain
from engine.modes.fsdp.copies import backward_with
from engine.modes.fsdp.plan import forward, reduce, sharded
from engine.modes.fsdp.units import gathered_bytes
from engine.plan import Mesh, Op, Plan


def plan(job: Job, step: int) -> Plan:
    ranks = job.degree("fsdp")
    mesh, units = Mesh(("fsdp",), (ranks,)), chain.units(job.layers, job.micro_batch, spec=job.spec)
    there, ways_back = forward(job, mesh, units), backward_with(units, job, mesh, gathered=False)

    def passes(_: int, synced: bool) -> list[Op]:
        ops = list(there)
        for unit, back in zip(reversed(units), reversed(ways_back[synced]), strict=True):
            ops += [*back, *(reduce(unit, job, mesh) if synced else ())]
        return ops

    sizes = [gathered_bytes(layer, ranks) for layer in job.layers]
    # All layers so far are whole; the last was copied out of what was gathered, and what the one before was gathered
    # into is still there.
    beside = [a + b if ranks > 1 else 0 for a, b in itertools.pairwise([0, *sizes])]
    gathered = max(whole + flat for whole, flat in zip(itertools.accumulate(sizes), beside, strict=True))
    return sharded(job, mesh, units, passes, gathered=gathered)
