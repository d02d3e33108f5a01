"""A job on a mesh of several axes -> its plan, put together from what the modes of its axes do.

Layers are cut for tensor ranks, and what is left of them sharded over fsdp and replicated over dp; or, in a pipeline,
dealt out to stages first.
"""

from collections.abc import Sequence

from engine import chain
from engine.job import Job
from engine.modes.expert import plan as expert
from engine.modes.fsdp.plan import gathering_twice, is_shared, sharded
from engine.modes.hybrid.cuts import units_of
from engine.modes.hybrid.dealt import dealt_out
from engine.modes.hybrid.stages import in_stages
from engine.modes.tensor.shards import held
from engine.plan import AXES, Mesh, Plan


def plan(job: Job, step: int) -> Plan:
    mesh = mesh_of(job)
    if job.spec.model == "moe":
        return expert.on_mesh(job, mesh, step)
    if job.degree("pp") > 1:
        return in_stages(job, mesh)
    if job.degree("cp") > 1:
        return dealt_out(job, mesh)
    units = units_of(job, held(job), job.local_batch)
    return gathering_twice(job, mesh, units) if is_shared(mesh) else alone(job, mesh, units)


def mesh_of(job: Job) -> Mesh:
    """The axes that have more than one coordinate, in the order of AXES; a single rank is a replica."""
    axes = [axis for axis in AXES if job.degree(axis) > 1] or ["dp"]
    return Mesh(tuple(axes), tuple(job.degree(axis) for axis in axes))


def alone(job: Job, mesh: Mesh, units: Sequence[chain.Unit]) -> Plan:
    """Tensor ranks without replicas."""
    ops = [op for unit in units for op in unit.forward] + [op for unit in reversed(units) for op in unit.backward]
    ops += [op for unit in units for op in unit.sums]
    return sharded(job, mesh, units, lambda synced: ops, gathered=0)
