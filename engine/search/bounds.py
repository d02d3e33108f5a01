"""A layout -> seconds that its step takes at least, and bytes that a rank holds at least, without planning it.

Both are sums over the layers of a rank of what the planner itself makes of one layer of each kind, at the prices of the
simulator. They hold because of what is left out:

- A rank computes one op at a time, and waits for each synchronous collective: so all of its passes, one after the
  other, are part of its step; or what goes round a ring, where that takes longer than attention. Other messages, and
  what travels in the background, are taken to be hidden.
- In a pipeline a rank cannot begin before the first microbatch has come through all stages before its first one, and
  where a backward is one op the step goes on, when the rank is through, until the gradient has gone back through them:
  FLOPs / rate + the ideal bubble of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2). Backwards in halves may end
  with what nobody waits for, so of these only the way there counts.
- What reduces gradients after the last backward, and the optimizer, come after all that.
- A rank holds its parameters, gradients and optimizer state, and what its layers keep of the microbatches that its
  schedule has in flight. What is gathered, received or there while an op lasts is left out. Of a pipeline's ranks the
  first is looked at, which in most orders has most in flight.

Modes other than `hybrid`, machines whose devices do not compute by kernels (`local`, whose ranks share cores, and
`unit`), ranks or links that are made slower, and orders that a person gave are not bounded: no such layout is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine import schedules
from engine.asking.settings import SPLIT_BACKWARD, TOKEN_MODELS
from engine.cost.collectives import communication_seconds
from engine.cost.compute import compute_seconds
from engine.cost.kernels import MATMUL, MEMORY
from engine.cost.machine import Machine
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.modes.context.cuts import own_tokens
from engine.modes.fsdp.plan import gather, reduce, sharing
from engine.modes.fsdp.replicas import is_shared, replicas_of
from engine.modes.fsdp.units import shard
from engine.modes.hybrid.cuts import Seat, held, units_of
from engine.modes.hybrid.plan import mesh_of
from engine.modes.hybrid.stages import standing
from engine.modes.pipeline.plan import ONE_STAGE
from engine.modes.tensor.cuts import ALL_BUT_NAME
from engine.modes.tensor.shards import gradient_bytes
from engine.plan import COLLECTIVES, Mesh, Op
from engine.scale_model.pictured import machine_of

FIRST = Seat()  # of axes along which not all ranks do the same, the rank at 0
BUCKETED = {"dp", "ep"}  # a mesh of experts and no other axes reduces gradients as DDP does, in buckets
CHANGE = {"forward": 1, "backward": -1, "backward_input": -1}  # of microbatches in flight
ALL_AT_ONCE = ("gpipe", "looped_bfs")  # every forward before any backward
ROUNDS = 4  # of a schedule, after which a rank has had as many microbatches in flight as it ever has
ROUNDED = 1  # bytes that a sum over layers may be above what is rounded once


class Bound(NamedTuple):
    """`stays`: of the bytes, those that a rank holds the whole step long."""

    seconds: float = 0.0
    bytes: int = 0
    stays: int = 0


class Way(NamedTuple):
    """How a mesh goes through a replica's part of a batch: in so many equal pieces, and in a pipeline in this order."""

    pieces: int
    recompute: str | None
    schedule: str | None = None
    stages_per_rank: int = 1
    split: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Job) -> Way:
        """That of a job that is prepared."""
        spec = job.spec
        pieces = job.microsteps * (spec.microbatches or 1)
        return cls(pieces, spec.recompute, spec.schedule, spec.stages_per_rank or 1, spec.split or ())


class Work(NamedTuple):
    """Of each kind of layer, for so many samples: seconds of its passes, and bytes kept from one to the other."""

    forward: np.ndarray
    backward: np.ndarray
    kept: np.ndarray


class Stays(NamedTuple):
    """Of each kind of layer, bytes that are there the whole step long, and seconds of its update."""

    bytes: np.ndarray
    update: np.ndarray


class Travels(NamedTuple):
    """Of each kind of layer, seconds of gathering it, and of reducing its gradients, a column for each axis."""

    gather: np.ndarray
    reduce: np.ndarray


class Placed(NamedTuple):
    """How many layers of each kind a rank has (`own`), each of its stages at least (`least`), and are in stages before
    its first one (`before`), a row a rank; and each stage of rank 0 (`first`)."""

    own: np.ndarray
    least: np.ndarray
    before: np.ndarray
    first: np.ndarray


class Bounds:
    """For the layouts of one search, `on` a machine other than the one that they name: what they share is worked out
    once."""

    def __init__(self, on: Machine | None = None):
        self._on = on
        self._known: dict[tuple, Work | Stays | Travels] = {}
        self._machines: dict[str, Machine] = {}  # by mode
        self._kinds: dict[int, tuple[tuple[Layer, ...], tuple[int, ...]]] = {}  # by which layers they are

    def of(self, job: Job, way: Way) -> Bound:
        """`job`: prepared, on the layout's mesh; `way`: what may be otherwise than in it."""
        if job.spec.mode != "hybrid" or job.spec.schedule_file is not None:
            return Bound()
        return self._priced(job, (self._of_pipeline if job.degree("pp") > 1 else self._of_passes)(job, way))

    def of_mesh(self, job: Job, recompute: str | None) -> Bound:
        """However it goes through its part of a batch: as in one piece, since nothing takes longer in fewer and larger
        ones. Where sequences are dealt out all but attention is a part of what one rank would do with them. The fullest
        rank of a pipeline has as much as the mean one, and does."""
        if job.spec.mode != "hybrid":
            return Bound()
        alone = replace(job, spec=job.spec.with_(cp=1, attention=None, balance=None)) if job.degree("cp") > 1 else job
        there, count = self._stays(job), np.bincount(self._kinds_of(job)) / job.degree("pp")
        stays = int(there.bytes @ count)
        if stays > (self._machine(job).memory_size or math.inf):
            return Bound(0.0, stays, stays)
        work = self._work(alone, Way(1, recompute), attends=alone is job)
        seconds = ((work.forward + work.backward) / job.degree("cp") + there.update) @ count
        return self._priced(job, Bound(float(seconds), stays, stays))

    def _priced(self, job: Job, bound: Bound) -> Bound:
        by_kernels = self._machine(job).sms and job.spec.slow_rank is None and job.spec.slow_link is None
        return bound if by_kernels else bound._replace(seconds=0.0)

    def _of_passes(self, job: Job, way: Way) -> Bound:
        """Where every rank has all layers. The first one is gathered before anything is computed, and reduced after
        everything; and what is on one axis takes turns there."""
        waits = way.pieces > 1 and not job.spec.sync_every_microstep
        work, there, travels = self._work(job, way), self._stays(job, waits=waits), self._travels(job)
        count = np.bincount(self._kinds_of(job))
        passes = way.pieces * (work.forward + work.backward) @ count
        ends = travels.gather[0] + travels.reduce[0].max() + there.update @ count
        lanes = count @ travels.reduce
        lanes[0] += 2 * way.pieces * travels.gather @ count
        seconds = max(float(passes + ends), float(lanes.max()))
        return Bound(seconds, int((there.bytes + work.kept) @ count), int(there.bytes @ count))

    def _of_pipeline(self, job: Job, way: Way) -> Bound:
        """Of an order; or of any, whose fullest rank has as much as the mean one, and does. In whatever order, when a
        microbatch is in the last stage of a rank it is in all of them."""
        work, there = self._work(job, way), self._stays(job)
        kinds, both = self._kinds_of(job), work.forward + work.backward
        if way.schedule is None:
            count = np.bincount(kinds) / job.spec.pp
            seconds, stays = float((way.pieces * both + there.update) @ count), int(there.bytes @ count)
            return Bound(seconds, stays + (int(work.kept @ count) if job.spec.master_weights else 0), stays)
        placed = _placed(kinds, way.split, way.schedule, job.spec.pp, way.stages_per_rank)
        passes = placed.before @ work.forward + way.pieces * placed.own @ both
        # In one stage gradients are reduced after all else; of several, at least those of the one that ends last.
        last = placed.own if way.schedule in ONE_STAGE else placed.least
        ends = (last @ self._travels(job).reduce).max(axis=1) + placed.own @ there.update
        back = 0.0 if way.schedule in SPLIT_BACKWARD else placed.before @ work.backward + ends[0]
        output = 0.0
        if not job.spec.master_weights:  # what a stage puts out is counted elsewhere
            output = job.local_batch // way.pieces * max(layer.output_bytes for layer in job.layers[:-1])
        numbers = (job.spec.pp, way.pieces // job.microsteps, way.stages_per_rank)
        kept = (in_flight(way.schedule, *numbers) @ np.maximum(0.0, placed.first @ work.kept - output)).max()
        stays = placed.own @ there.bytes
        fullest = max(stays.max(), stays[0] + kept)
        return Bound(float((passes + np.maximum(ends, back)).max()), int(fullest), int(stays.max()))

    def _kinds_of(self, job: Job) -> tuple[int, ...]:
        """Jobs on many meshes have the same layers."""
        if id(job.layers) not in self._kinds:
            self._kinds[id(job.layers)] = job.layers, _kinds(job)
        return self._kinds[id(job.layers)][1]

    def _machine(self, job: Job) -> Machine:
        if job.spec.mode not in self._machines:
            self._machines[job.spec.mode] = machine_of(job, self._on)
        return self._machines[job.spec.mode]

    def _work(self, job: Job, way: Way, *, attends: bool = True) -> Work:
        spec, samples = job.spec, job.local_batch // way.pieces
        shared = (spec.sequence_parallel, job.expert_axis, spec.attention, spec.balance)
        key = (samples, way.recompute, *shared, job.degree("pp") > 1)
        key += (attends, *(job.degree(axis) for axis in ("cp", "ep", "tp")))
        if key not in self._known:
            job = replace(_one_of_each(job), spec=spec.with_(recompute=way.recompute))
            own, mesh, machine, found = own_tokens(job), mesh_of(job), self._machine(job), []
            for layer in held(own, FIRST):
                units = units_of(own, [layer], samples, FIRST, stage=0)
                passes = [[op for unit in units for op in unit.forward], [op for unit in units for op in unit.backward]]
                saved = sum(op.saved for op in passes[0])
                if not attends:
                    passes = [list(map(_without_attention, ops)) for ops in passes]
                found.append((*(round_a_ring(ops, mesh, machine) for ops in passes), saved))
            self._known[key] = Work(*np.array(found, dtype=np.float64).T)
        return self._known[key]

    def _stays(self, job: Job, *, waits: bool = False) -> Stays:
        """`waits`: gradients wait for the last micro-step, whole."""
        mesh = mesh_of(job)
        key = (Stays, mesh.axes, mesh.degrees, job.expert_axis, waits)
        if key not in self._known:
            job, found = _one_of_each(job), []
            memory_rate = self._machine(job).memory_rate
            for i, layer in enumerate(held(own_tokens(job), FIRST)):
                update = chain.optimizer([shard(layer, mesh.degree("fsdp"), 0)], job.spec)
                found.append((_stays(job, mesh, i, layer, waits), update.bytes / memory_rate))
            self._known[key] = Stays(*np.array(found, dtype=np.float64).T)
        return self._known[key]

    def _travels(self, job: Job) -> Travels:
        mesh = mesh_of(job)
        key = (Travels, mesh.axes, mesh.degrees, job.expert_axis)
        if key not in self._known:
            job = _one_of_each(job)
            own, machine, found = own_tokens(job), self._machine(job), []
            bucketed = "ep" in mesh.axes and set(mesh.axes) <= BUCKETED
            axes = ("fsdp", replicas_of(mesh), replicas_of(mesh, of_experts=True))
            for layer in held(own, FIRST):
                units = [chain.Unit(layer, (), ())]
                if job.expert_axis:  # experts are a unit of their own
                    units = units_of(own, [layer], 1, FIRST, stage=0)
                gathers = [op for unit in units for op in gather(unit.layer, job, mesh)]
                reduces = [op for unit in units for op in reduce(unit, job, mesh)]
                reduces = reduces if is_shared(mesh) and not bucketed else []
                on_axes = ([op for op in reduces if op.axis == axis] for axis in axes)
                found.append([seconds_of(ops, mesh, machine, alone=True) for ops in (gathers, *on_axes)])
            columns = np.array(found, dtype=np.float64)
            self._known[key] = Travels(columns[:, 0], columns[:, 1:])
        return self._known[key]


def _stays(job: Job, mesh: Mesh, place: int, layer: Layer, waits: bool) -> int:
    """Bytes that a rank keeps the whole step long for a layer alone."""
    memory = standing(job, mesh, (), {0: [layer]}) if job.degree("pp") > 1 else {}
    whole = gradient_bytes(job, layer) if waits else 0
    programs, roles = sharing(job, mesh, {place: layer}, lambda update: (), memory | {"gathered": 0}, least=whole)
    kept = programs[roles[0]].memory
    return sum(size for name, size in kept.items() if name != "weight gradients") - ROUNDED  # these all layers share


def _without_attention(op: Op) -> Op:
    """Without products of tokens with tokens, as `engine.analysis.mfu` has them."""
    rest = tuple(one for one in op.kernels if one.kind == MEMORY or (one.kind == MATMUL and one.weight))
    return replace(op, kernels=rest, flops=0, bytes=0)


def round_a_ring(ops: Sequence[Op], mesh: Mesh, machine: Machine) -> float:
    """Seconds of a layer's ops. From the first message to the last that comes, keys go round: no sooner than all that
    one rank sends has gone over its link, one after the other, which the rank that needs them waits for."""
    sends = [i for i, op in enumerate(ops) if op.kind == "send"]
    comes = [i for i, op in enumerate(ops) if op.kind == "recv"]
    if not sends or not comes:
        return seconds_of(ops, mesh, machine)
    around = slice(sends[0], comes[-1] + 1)
    inside = seconds_of(ops[around], mesh, machine)
    travels = sum(
        communication_seconds(ops[i], (0, mesh.peer(0, ops[i].axis, ops[i].peer)), machine)
        for i in sends
        if i < comes[-1]
    )
    return seconds_of([*ops[: sends[0]], *ops[comes[-1] + 1 :]], mesh, machine) + max(inside, travels)


def seconds_of(ops: Sequence[Op], mesh: Mesh, machine: Machine, *, alone: bool = False) -> float:
    """Of ops of a rank, one after the other: of those that it waits for, or `alone` of all that there are."""
    total = sum(compute_seconds(tuple(op for op in ops if op.is_compute), machine, mesh.size))
    groups: dict[str, Sequence[int]] = {}
    for op in ops:
        if op.kind in COLLECTIVES and (alone or not op.asynchronous):
            if op.axis not in groups:
                groups[op.axis] = mesh.group(0, op.axis)
            total += communication_seconds(op, groups[op.axis], machine)
    return total


def _kinds(job: Job) -> tuple[int, ...]:
    """The kind of each layer: blocks of a decoder are alike apart from their names."""
    if job.spec.model not in TOKEN_MODELS:
        return tuple(range(len(job.layers)))
    numbers: dict[tuple, int] = {}
    return tuple(numbers.setdefault(ALL_BUT_NAME(layer), len(numbers)) for layer in job.layers)


def _one_of_each(job: Job) -> Job:
    """The same of a model that has one layer of each kind."""
    kinds = _kinds(job)
    return replace(job, layers=tuple(job.layers[kinds.index(kind)] for kind in range(max(kinds) + 1)))


@functools.lru_cache(maxsize=4096)
def _placed(kinds: tuple[int, ...], split: tuple[int, ...], schedule: str, ranks: int, stages_per_rank: int) -> Placed:
    number, ends = max(kinds) + 1, np.cumsum(split)[:-1]
    stages = np.stack([np.bincount(part, minlength=number) for part in np.split(np.array(kinds), ends)])
    ahead = np.cumsum(stages, axis=0) - stages
    placement = schedules.placement(schedule, ranks, stages_per_rank)
    each = [(stages[list(own)], ahead[min(own)]) for own in placement]
    rows = [(own.sum(axis=0), own.min(axis=0), before) for own, before in each]
    return Placed(*map(np.stack, zip(*rows, strict=True)), each[0][0])


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> np.ndarray:
    """How many microbatches are between a forward and its backward in each stage of rank 0: a row for each time at
    which that differs."""
    if schedule in ALL_AT_ONCE:
        return np.full((1, stages_per_rank), microbatches)
    if microbatches % ranks == 0:  # rounds of one size, all alike from the first few on
        microbatches = min(microbatches, ROUNDS * ranks)
    own = schedules.placement(schedule, ranks, stages_per_rank)[0]
    row = schedules.order(schedule, ranks, microbatches, stages_per_rank)[0]
    changes, place = np.zeros((len(row), len(own)), dtype=np.int32), {stage: i for i, stage in enumerate(own)}
    for i, (kind, stage, *_) in enumerate(row):
        changes[i, place[stage]] = CHANGE.get(kind, 0)
    return np.unique(changes.cumsum(axis=0), axis=0)
