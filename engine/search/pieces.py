"""A job -> of one layer of each kind: seconds that its passes take at least, and bytes that it keeps, as the planner
itself makes them, at the prices of the simulator. Sums of these bound a layout (`engine.search.bounds`).

A rank computes one op at a time, and waits for each synchronous collective: a pass is all of these, one after the
other; or what goes round a ring, where that takes longer than attention. Other messages, and what travels in the
background, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.asking.settings import TOKEN_MODELS
from engine.cost.collectives import communication_seconds
from engine.cost.compute import compute_seconds
from engine.cost.kernels import MATMUL, MEMORY, operands
from engine.cost.machine import Machine
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.modes.context.cuts import own_tokens
from engine.modes.fsdp.plan import gather, reduce, sharing
from engine.modes.fsdp.replicas import is_shared, replicas_of
from engine.modes.fsdp.units import shard
from engine.modes.hybrid.cuts import Seat, held, output_of, units_of
from engine.modes.hybrid.plan import mesh_of
from engine.modes.hybrid.stages import scattered, standing
from engine.modes.pipeline.passes import goes_back
from engine.modes.tensor.cuts import ALL_BUT_NAME
from engine.modes.tensor.shards import gradient_bytes
from engine.plan import COLLECTIVES, Mesh, Op
from engine.scale_model.pictured import machine_of

FIRST = Seat()  # of axes along which not all ranks do the same, the rank at 0
BUCKETED = {"dp", "ep"}  # a mesh of experts and no other axes reduces gradients as DDP does, in buckets
ROUNDED = 1  # bytes that a sum over layers may be above what is rounded once


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


class Pass(NamedTuple):
    """Of each kind of layer, seconds of a pass for so many samples, and those of them in which it computes."""

    seconds: np.ndarray
    computes: np.ndarray


class Work(NamedTuple):
    """Passes of each kind of layer. Bytes: `kept` from forward to backward; made `again` before that; needed beside it
    (`scratch`)."""

    forward: Pass
    backward: Pass
    kept: np.ndarray
    again: np.ndarray
    scratch: np.ndarray


class Halves(NamedTuple):
    """Of each kind of layer, the halves of its backward; bytes that are left for that of the weights (`operands`), and
    that are made again where the outputs of all layers stay until then (`all_again`)."""

    inputs: Pass
    weights: Pass
    operands: np.ndarray
    all_again: np.ndarray


class Stays(NamedTuple):
    """Of each kind of layer, bytes that are there the whole step long, and seconds of its update; and bytes of a tensor
    of each of its matrices, which layers of a kind share."""

    bytes: np.ndarray
    update: np.ndarray
    matrices: np.ndarray


class Travels(NamedTuple):
    """Of each kind of layer, seconds of gathering it, and of reducing its gradients, a column for each axis; and of
    reducing them on all of the axes."""

    gather: np.ndarray
    reduce: np.ndarray
    reduce_all: np.ndarray


class Pieces:
    """For the layouts of one search, `on` a machine other than the one that they name: what they share is worked out
    once."""

    def __init__(self, on: Machine | None = None):
        self._on = on
        self._known: dict[tuple, Work | Stays | Travels | float] = {}
        self._layers: dict[tuple, tuple[Job, Job, tuple[Layer, ...]]] = {}
        self._machines: dict[str, Machine] = {}  # by mode
        self._kinds: dict[int, tuple[tuple[Layer, ...], tuple[int, ...]]] = {}  # by which layers they are

    def kinds_of(self, job: Job) -> tuple[int, ...]:
        """Jobs on many meshes have the same layers."""
        if id(job.layers) not in self._kinds:
            self._kinds[id(job.layers)] = job.layers, _kinds(job)
        return self._kinds[id(job.layers)][1]

    def machine(self, job: Job) -> Machine:
        if job.spec.mode not in self._machines:
            self._machines[job.spec.mode] = machine_of(job, self._on)
        return self._machines[job.spec.mode]

    def _on_rank(self, job: Job) -> tuple[Job, Job, tuple[Layer, ...]]:
        """A job of one layer of each kind; the same with the tokens that a rank has; and what it holds of those layers.
        Meshes that cut a layer alike share these."""
        key = (
            job.layers[0].params,
            *(job.degree(axis) for axis in ("cp", "ep", "tp")),
            job.expert_axis,
            job.degree("pp") > 1,
        )
        if key not in self._layers:
            one = _one_of_each(job, self.kinds_of(job))
            own = own_tokens(one)
            self._layers[key] = one, own, held(own, FIRST)
        one, own, layers = self._layers[key]
        return replace(job, layers=one.layers), replace(job, layers=own.layers, sample_bytes=own.sample_bytes), layers

    def work(self, job: Job, way: Way, *, attends: bool = True) -> Work:
        key = (*self.key_of(job, way), attends)
        if key not in self._known:
            own, mesh, each = self._passes(job, way)
            if not attends:
                each = [[list(map(_without_attention, ops)) for ops in passes] for passes in each]
            bytes_of = [
                (
                    sum(op.saved for op in ahead),
                    sum(op.saved for op in back),
                    max((op.scratch for op in back), default=0),
                )
                for ahead, back in each
            ]
            seconds = (self._priced(own, mesh, column) for column in zip(*each, strict=True))
            self._known[key] = Work(*seconds, *np.array(bytes_of, dtype=np.float64).T)
        return self._known[key]

    def halves(self, job: Job, way: Way) -> Halves:
        key = (Halves, *self.key_of(job, way))
        if key not in self._known:
            own, mesh, each = self._passes(job, way)
            stays = self._passes(job, way, stays=True)[2] if way.recompute not in (None, "none") else each
            inputs = [[chain.halves(op)[0] if goes_back(op) else op for op in back] for _, back in each]
            weights = [_weights(back) for _, back in each]
            rest = [sum(operands(op.kernels) for op in ops) if job.spec.master_weights else 0 for ops in weights]
            again = [sum(op.saved for op in back) for _, back in stays]
            seconds = (self._priced(own, mesh, column) for column in (inputs, weights))
            self._known[key] = Halves(*seconds, *np.array([rest, again], dtype=np.float64))
        return self._known[key]

    def _passes(self, job: Job, way: Way, **known: bool) -> tuple[Job, Mesh, list[tuple[list[Op], list[Op]]]]:
        """Forward and backward of each kind of layer by itself, with the rank's job and its mesh."""
        samples = job.local_batch // way.pieces
        _, own, layers = self._on_rank(replace(job, spec=job.spec.with_(recompute=way.recompute)))
        found = []
        for layer in layers:
            units = units_of(own, [layer], samples, FIRST, stage=0, **known)
            ahead, back = (
                [op for unit in units for op in unit.forward],
                [op for unit in reversed(units) for op in unit.backward],
            )
            found.append((ahead, back))
        return own, mesh_of(job), found

    def _priced(self, job: Job, mesh: Mesh, passes: Sequence[Sequence[Op]]) -> Pass:
        machine = self.machine(job)
        seconds = [(round_a_ring(ops, mesh, machine), computing(ops, mesh, machine)) for ops in passes]
        return Pass(*np.array(seconds).T)

    def key_of(self, job: Job, way: Way) -> tuple:
        """Of what a rank does for a piece, whoever else does it."""
        spec, samples = job.spec, job.local_batch // way.pieces
        shared = (spec.sequence_parallel, job.expert_axis, spec.attention, spec.balance)
        key = (samples, way.recompute, *shared, job.degree("pp") > 1)
        return *key, *(job.degree(axis) for axis in ("cp", "ep", "tp"))

    def hop(self, job: Job, way: Way) -> float:
        """Seconds in which the smallest of what stages put out is at the next one."""
        key = (*self.key_of(job, way), "hop", job.spec.pp)
        if key in self._known:
            return self._known[key]
        (_, own, layers), mesh = self._on_rank(job), mesh_of(job)
        least = min(output_of(own, layer).output_bytes for layer in layers[:-1])
        size = least * (job.local_batch // way.pieces) // scattered(job)
        op = Op(kind="send", axis="pp", peer=1, bytes=size, asynchronous=job.spec.overlap is not False)
        self._known[key] = communication_seconds(op, (0, mesh.stride("pp")), self.machine(job))
        return self._known[key]

    def stays(self, job: Job, *, waits: bool = False) -> Stays:
        """`waits`: gradients wait for the last micro-step, whole."""
        mesh = mesh_of(job)
        key = (Stays, mesh.axes, mesh.degrees, job.expert_axis, waits)
        if key not in self._known:
            (job, _, layers), found = self._on_rank(job), []
            memory_rate = self.machine(job).memory_rate
            for i, layer in enumerate(layers):
                update = chain.optimizer([shard(layer, mesh.degree("fsdp"), 0)], job.spec)
                matrices = chain.made_in([layer]) if job.spec.master_weights else 0
                found.append((_stays(job, mesh, i, layer, waits), update.bytes / memory_rate, matrices))
            self._known[key] = Stays(*np.array(found, dtype=np.float64).T)
        return self._known[key]

    def travels(self, job: Job) -> Travels:
        mesh = mesh_of(job)
        key = (Travels, mesh.axes, mesh.degrees, job.expert_axis)
        if key not in self._known:
            (job, own, layers), machine, found = self._on_rank(job), self.machine(job), []
            bucketed = "ep" in mesh.axes and set(mesh.axes) <= BUCKETED
            axes = ("fsdp", replicas_of(mesh), replicas_of(mesh, of_experts=True))
            for layer in layers:
                units = [chain.Unit(layer, (), ())]
                if job.expert_axis:  # experts are a unit of their own
                    units = units_of(own, [layer], 1, FIRST, stage=0)
                gathers = [op for unit in units for op in gather(unit.layer, job, mesh)]
                reduces = [op for unit in units for op in reduce(unit, job, mesh)]
                reduces = reduces if is_shared(mesh) and not bucketed else []
                on_axes = ([op for op in reduces if op.axis == axis] for axis in axes)
                found.append([seconds_of(ops, mesh, machine, alone=True) for ops in (gathers, *on_axes, reduces)])
            columns = np.array(found, dtype=np.float64)
            self._known[key] = Travels(columns[:, 0], columns[:, 1:-1], columns[:, -1])
        return self._known[key]


def _stays(job: Job, mesh: Mesh, place: int, layer: Layer, waits: bool) -> int:
    """Bytes that a rank keeps the whole step long for a layer alone."""
    memory = standing(job, mesh, (), {0: [layer]}) if job.degree("pp") > 1 else {}
    whole = gradient_bytes(job, layer) if waits else 0
    programs, roles = sharing(job, mesh, {place: layer}, lambda update: (), memory | {"gathered": 0}, least=whole)
    kept = programs[roles[0]].memory
    return sum(size for name, size in kept.items() if name != "weight gradients") - ROUNDED  # these all layers share


def _weights(backward: Sequence[Op]) -> list[Op]:
    """The half of the weights, where there are products for it: those of a stage are one op."""
    back = [op for op in backward if goes_back(op)]
    half = chain.halves(chain.whole_stage(back))[1:] if back else ()
    return [op for op in half if op.kernels]


def _without_attention(op: Op) -> Op:
    """Without products of tokens with tokens, as `engine.analysis.mfu` has them."""
    rest = tuple(one for one in op.kernels if one.kind == MEMORY or (one.kind == MATMUL and one.weight))
    return replace(op, kernels=rest, flops=0, bytes=0)


def round_a_ring(ops: Sequence[Op], mesh: Mesh, machine: Machine) -> float:
    """Seconds of a layer's ops. From the first message to the last that comes, keys go round: no sooner than all that
    one rank sends has gone over its link, one after the other, which the rank that needs them waits for; so does the
    one behind the slowest link, which goes from node to node where the ring does. And the last of it is sent when
    what comes before is computed: a mean rank waits for a mean link."""
    sends = [i for i, op in enumerate(ops) if op.kind == "send"]
    comes = [i for i, op in enumerate(ops) if op.kind == "recv"]
    if not sends or not comes:
        return seconds_of(ops, mesh, machine)
    around = slice(sends[0], comes[-1] + 1)
    inside = seconds_of(ops[around], mesh, machine)
    ring = mesh.group(0, ops[sends[0]].axis)
    links = list(zip(ring, (*ring[1:], ring[0]), strict=True))
    travels = max(sum(communication_seconds(ops[i], link, machine) for i in sends if i < comes[-1]) for link in links)
    last = sum(communication_seconds(ops[sends[-1]], link, machine) for link in links) / len(links)
    inside = max(inside, seconds_of(ops[sends[0] : sends[-1]], mesh, machine) + last)
    return seconds_of([*ops[: sends[0]], *ops[comes[-1] + 1 :]], mesh, machine) + max(inside, travels)


def seconds_of(ops: Sequence[Op], mesh: Mesh, machine: Machine, *, alone: bool = False) -> float:
    """Of ops of a rank, one after the other: of those that it waits for, or `alone` of all that there are."""
    total = computing(ops, mesh, machine)
    groups: dict[str, Sequence[int]] = {}
    for op in ops:
        if op.kind in COLLECTIVES and (alone or not op.asynchronous):
            if op.axis not in groups:
                groups[op.axis] = mesh.group(0, op.axis)
            total += communication_seconds(op, groups[op.axis], machine)
    return total


def computing(ops: Sequence[Op], mesh: Mesh, machine: Machine) -> float:
    return sum(compute_seconds(tuple(op for op in ops if op.is_compute), machine, mesh.size))


def _kinds(job: Job) -> tuple[int, ...]:
    """The kind of each layer: blocks of a decoder are alike apart from their names."""
    if job.spec.model not in TOKEN_MODELS:
        return tuple(range(len(job.layers)))
    numbers: dict[tuple, int] = {}
    return tuple(numbers.setdefault(ALL_BUT_NAME(layer), len(numbers)) for layer in job.layers)


def _one_of_each(job: Job, kinds: tuple[int, ...]) -> Job:
    """The same of a model that has one layer of each kind."""
    return replace(job, layers=tuple(job.layers[kinds.index(kind)] for kind in range(max(kinds) + 1)))
