"""A job on a mesh of several axes -> its plan, put together from what the modes of its axes do.

Sequences are dealt out over cp, layers cut for tensor ranks, and what is left of them sharded over fsdp and replicated
over dp and cp; or, in a pipeline, dealt out to stages first.
"""

from collections.abc import Sequence

from engine import chain
from engine.job import Job
from engine.modes.context.cuts import own_tokens
from engine.modes.expert import plan as expert
from engine.modes.fsdp.plan import Passes, passes_twice, shard_of, sharded_programs
from engine.modes.fsdp.replicas import is_shared
from engine.modes.hybrid.cuts import tokens_of, units_of
from engine.modes.hybrid.stages import in_stages
from engine.modes.tensor.shards import held
from engine.plan import AXES, Mesh, Op, Plan, Program
from engine.presets import family


def plan(job: Job, step: int) -> Plan:
    mesh, own = mesh_of(job), own_tokens(job)
    if family(job.spec.model) == "moe":
        return expert.on_mesh(job, mesh, step)
    programs: list[Program] = []
    roles: dict[tuple[int, int], list[int]] = {}  # (stage rank, place on cp) -> the program of each coordinate on fsdp
    for place in range(job.degree("cp")):
        for rank, (new, shards) in enumerate(
            in_stages(own, mesh, place) if job.degree("pp") > 1 else [_whole(own, mesh, place)]
        ):
            roles[rank, place] = [len(programs) + i for i in shards]
            programs += new
    of_rank = (roles[_at(mesh, rank, "pp"), _at(mesh, rank, "cp")][shard_of(mesh, rank)] for rank in range(mesh.size))
    return Plan(mesh, tuple(programs), tuple(of_rank), tuple(layer.name for layer in job.layers))


def mesh_of(job: Job) -> Mesh:
    """The axes that have more than one coordinate, in the order of AXES; a single rank is a replica."""
    axes = [axis for axis in AXES if job.degree(axis) > 1] or ["dp"]
    return Mesh(tuple(axes), tuple(job.degree(axis) for axis in axes))


def _at(mesh: Mesh, rank: int, axis: str) -> int:
    return mesh.coordinate(rank, axis) if mesh.has(axis) else 0


def _whole(job: Job, mesh: Mesh, place: int) -> tuple[list[Program], list[int]]:
    """The programs of ranks at a place on cp with all layers, and which of them each coordinate on fsdp runs."""
    units = units_of(job, held(job), job.local_batch, place)
    passes, gathered = passes_twice(job, mesh, units) if is_shared(mesh) else (_alone(units), 0)
    return sharded_programs(job, mesh, units, passes, gathered=gathered, tokens=tokens_of(job, place))


def _alone(units: Sequence[chain.Unit]) -> Passes:
    """Tensor ranks without replicas."""
    ops: list[Op] = [op for unit in units for op in unit.forward]
    ops += [op for unit in reversed(units) for op in unit.backward]
    ops += [op for unit in units for op in unit.sums]
    return lambda synced: ops
