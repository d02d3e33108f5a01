"""A job on a mesh of several axes -> its plan, put together from what the modes of its axes do.

Sequences are dealt out over cp, layers cut for tensor ranks, and what is left of them sharded over fsdp and replicated
over dp and cp; or, in a pipeline, dealt out to stages first.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.model.presets import family
from engine.modes.context.cuts import alike, own_tokens, summed, tokens_of
from engine.modes.expert import plan as expert
from engine.modes.fsdp.plan import passes_twice, shard_of, sharded_programs, sharing
from engine.modes.fsdp.replicas import is_shared
from engine.modes.hybrid.cuts import Seat, held, seat_of, units_of
from engine.modes.hybrid.stages import in_stages
from engine.modes.tensor.shards import gradient_bytes
from engine.plan import AXES, Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    mesh, own = mesh_of(job), own_tokens(job)
    if family(job.spec.model) == "moe" and set(mesh.axes) <= {"dp", "ep"}:
        return expert.on_mesh(job, mesh, step)
    apart = job.routed is not None and job.expert_axis != ""  # each rank gets tokens of its own number
    made: dict[tuple[Seat, int], list[Program]] = {}  # (seat, rank of a pipeline) -> of each coordinate on fsdp
    axes = [axis for axis in mesh.axes if apart or axis in ("pp", "fsdp")]  # along which programs differ
    first_alike = np.arange(job.degree("cp")) if apart else np.array(alike(job))
    like = first_alike[_coordinates(mesh, "cp")]  # of each rank, the first place on cp that does as it does
    places = np.stack([like, *(_coordinates(mesh, axis) for axis in axes if axis != "cp")])
    _, first, kind = np.unique(places, axis=1, return_index=True, return_inverse=True)
    played: dict[int, Program] = {}
    for rank in sorted(first.tolist()):
        seat, at = seat_of(job, mesh, rank) if apart else Seat(cp=int(like[rank])), _at(mesh, rank, "pp")
        if (seat, at) not in made:
            made |= {(seat, i): new for i, new in _made(own, mesh, seat, [at] if apart else range(job.degree("pp")))}
        played[rank] = made[seat, at][shard_of(mesh, rank)]
    programs = {id(program): program for program in played.values()}
    number = {name: i for i, name in enumerate(programs)}
    of_rank = np.array([number[id(played[rank])] for rank in first.tolist()])[kind.reshape(-1)]
    names = tuple(layer.name for layer in job.layers)
    return Plan(mesh, tuple(programs.values()), tuple(of_rank.tolist()), names, tokens_of(job))


def _made(job: Job, mesh: Mesh, seat: Seat, ranks: Iterable[int]) -> Iterator[tuple[int, list[Program]]]:
    """For each of these ranks of a pipeline, or the one where there is none: the program of each coordinate on fsdp."""
    for rank, (new, shards) in (
        in_stages(job, mesh, seat, ranks) if job.degree("pp") > 1 else [(0, _whole(job, mesh, seat))]
    ):
        yield rank, [new[i] for i in shards]


def mesh_of(job: Job) -> Mesh:
    """The axes that have more than one coordinate, in the order of AXES; a single rank is a replica."""
    axes = [axis for axis in AXES if job.degree(axis) > 1] or ["dp"]
    return Mesh(tuple(axes), tuple(job.degree(axis) for axis in axes))


def _coordinates(mesh: Mesh, axis: str) -> np.ndarray:
    """Of every rank."""
    return mesh.coordinate(np.arange(mesh.size), axis) if mesh.has(axis) else np.zeros(mesh.size, dtype=np.int64)


def _at(mesh: Mesh, rank: int, axis: str) -> int:
    return mesh.coordinate(rank, axis) if mesh.has(axis) else 0


def _whole(job: Job, mesh: Mesh, seat: Seat) -> tuple[list[Program], list[int]]:
    """The programs of ranks with all layers, and which of them each coordinate on fsdp runs."""
    layers = held(job, seat)
    turns = range(job.microsteps if job.routed is not None else 1)  # where tokens go is known of each
    units = [units_of(job, layers, job.micro_batch, seat, turn=k) for k in turns]
    if is_shared(mesh):
        beside = summed(job, job.micro_batch)
        each = [passes_twice(job, mesh, of_turn, beside) for of_turn in units]

        def passes(k: int, synced: bool) -> list[Op]:
            return each[k % len(each)][0](k, synced)

        # With master weights, replicas as Megatron-LM has them.
        gathered = 0 if job.spec.master_weights and mesh.degree("fsdp") == 1 else each[0][1]
        return sharded_programs(job, mesh, layers, passes, gathered=gathered)
    steps = chain.microsteps(job, lambda k, synced: _alone(units[k % len(units)]))
    sums = [op for unit in units[0] for op in unit.sums]
    whole = sum(gradient_bytes(job, layer) for layer in layers)
    known = {"memory": {"gathered": 0}, "least": whole}
    return sharing(job, mesh, dict(enumerate(layers)), lambda update: joined(steps, sums, update), **known)


def _alone(units: Sequence[chain.Unit]) -> list[Op]:
    """The passes of tensor ranks without replicas."""
    ops = [op for unit in units for op in unit.forward]
    return ops + [op for unit in reversed(units) for op in unit.backward]
