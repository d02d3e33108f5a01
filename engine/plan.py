"""What every rank will do, in order: ops in programs, one program a role, and roles laid on a mesh of ranks.

Dependencies are not stored. They follow from program order and from matching the two ends of a message, or the
members of a collective (`engine.graph.matching`). A plan has a text form that round-trips (`engine.graph.notation`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from engine.cost.kernels import Kernels

COMPUTE = ("load", "forward", "backward", "backward_input", "backward_weight", "recompute", "optimizer", "copy")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "gather", "reduce")
MESSAGES = ("send", "recv")
KINDS = COMPUTE + COLLECTIVES + MESSAGES
PAYLOADS = ("batch", "activation", "gradient", "weights", "tokens", "control")
AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
# Axes taken as one by an op, as torch's DeviceMesh flattens them.
FLAT = (("dp", "ep"), ("dp", "cp"), ("cp", "ep"), ("dp", "cp", "ep"), ("ep", "tp"))
FLAT = {"_".join(axes): axes for axes in FLAT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One thing that a rank does.

    `bytes` is the size of a message or of a collective's tensor on this rank, as torch's call is given it; for a
    compute op it is the memory traffic. `saved` bytes of activations appear with a forward op, or with the recompute op
    before its backward op, with which they all go; those of a load when the next one comes. `remains`: bytes that
    appear with an op and are there until one says that they go, by a number below 0, or the step ends; of a reduction,
    below 0: those of whole gradients, which came with the first backward of its stage. `peer` is the other end's
    coordinate on `axis`, not its rank: so ranks that do the same share a program. Round a `ring` it is counted from the
    rank's own coordinate, so that all of the ring share one. An `asynchronous` op
    (torch.distributed's async_op=True, and every send) is not waited for by the next compute op, but by the next one of
    the same part, and at the latest by the next optimizer op, or by the load of the next micro-step.
    """

    kind: str
    stage: int | None = None
    microbatch: int | None = None
    part: str = ""  # a layer, a bucket, a parameter group
    payload: str = ""  # what moves: one of PAYLOADS
    axis: str = ""
    peer: int | None = None
    ring: bool = False
    asynchronous: bool = False
    bytes: int = 0
    flops: int = 0
    saved: int = 0
    remains: int = field(default=0, compare=False)
    scratch: int = field(default=0, compare=False)  # bytes that are there while a compute op lasts, and no longer
    kernels: Kernels = field(default=(), compare=False)  # how a compute op does it, where that is known

    @property
    def key(self) -> tuple:
        """What this op is, apart from rank, step and occurrence."""
        return (self.kind, self.stage, self.microbatch, self.part)

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    def of(self, part: str, stage: int | None) -> Op:
        """The same of another layer. Large plans are made of these, and `dataclasses.replace` takes twice as long."""
        return Op(
            kind=self.kind, stage=stage, microbatch=self.microbatch, part=part, payload=self.payload, axis=self.axis,
            peer=self.peer, ring=self.ring, asynchronous=self.asynchronous, bytes=self.bytes, flops=self.flops,
            saved=self.saved, remains=self.remains, scratch=self.scratch, kernels=self.kernels,
        )  # fmt: skip


def lane_of(op: Op, coordinate: int) -> str:
    """The queue that an op (as its rank does it: `Plan.on`) occupies there: compute, a mesh axis, or one direction of a
    link.

    A link is one lane a direction: with a single communication lane 1F1B would deadlock, since an activation going
    down meets a gradient coming up.
    """
    if op.kind in COMPUTE:
        return "compute"
    if op.kind in MESSAGES:
        source, target = (coordinate, op.peer) if op.kind == "send" else (op.peer, coordinate)
        return f"{op.axis}:{source}>{target}"
    return op.axis


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks as a grid, like torch's DeviceMesh: the last axis varies fastest. A rank may be an array of ranks."""

    axes: tuple[str, ...] = ()
    degrees: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.degrees)

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def has(self, axis: str) -> bool:
        return all(each in self.axes for each in FLAT.get(axis, (axis,)))

    @functools.lru_cache(maxsize=1024)  # asked for each op of each role  # noqa: B019
    def degree(self, axis: str) -> int:
        return math.prod(self.degrees[self.axes.index(each)] for each in self._of(axis))

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def stride(self, axis: str) -> int:
        """Ranks from one coordinate to the next."""
        return math.prod(self.degrees[self.axes.index(FLAT.get(axis, (axis,))[-1]) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Of axes taken as one the last varies fastest."""
        found = 0
        for each in self._of(axis):
            found = found * self.degree(each) + rank // self.stride(each) % self.degree(each)
        return found

    def peer(self, rank: int, axis: str, index: int) -> int:
        """The rank that differs from `rank` only in `axis`, where its coordinate is `index`."""
        for each in reversed(self._of(axis)):
            index, wanted = divmod(index, self.degree(each))
            rank = rank + (wanted - rank // self.stride(each) % self.degree(each)) * self.stride(each)
        return rank

    def _of(self, axis: str) -> list[str]:
        return [each for each in FLAT.get(axis, (axis,)) if each in self.axes]

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        if axis in FLAT:
            return tuple(self.peer(rank, axis, i) for i in range(self.degree(axis)))
        stride, degree = self.stride(axis), self.degree(axis)
        lowest = rank - rank // stride % degree * stride
        return tuple(range(lowest, lowest + degree * stride, stride))


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one role, in order, and what a device in it holds."""

    ops: tuple[Op, ...]
    holds: tuple[int, ...] = ()  # indices of the model's layers that this role holds
    memory: dict[str, int] = field(default_factory=dict)  # bytes by category that stay for the whole step
    shares: tuple[float, ...] = ()  # of each layer in `holds`, the part that it holds; empty: each of them whole
    stages: tuple[int, ...] = ()  # where a role has several: the stage of each layer that it holds
    updates: tuple[float, ...] = ()  # of each layer in `holds`, the part that it updates; empty: all that it holds


@dataclass(frozen=True)
class Plan:
    """One step of training: programs, and which role (index of a program) each rank plays. Ranks of one role may stand
    anywhere on an axis where no more differs than their neighbours round a ring, or the tokens that they load."""

    mesh: Mesh
    programs: tuple[Program, ...]
    roles: tuple[int, ...]  # one a rank
    layers: tuple[str, ...] = ()  # names of the model's layers, for the picture
    tokens: tuple[str, ...] = ()  # of each coordinate on the axis cp, in words: which tokens of a sequence are loaded

    @property
    def world_size(self) -> int:
        return len(self.roles)

    def program(self, rank: int) -> Program:
        """That of its role, as this rank runs it (`on`)."""
        place, program = self.place(rank), self.programs[self.roles[rank]]
        if len(place) == 1:
            return program
        if place not in self._programs:
            from engine.graph.columns import with_each  # columns are made of ops

            self._programs[place] = replace(program, ops=with_each(program.ops, lambda op: self.on(rank, op)))
        return self._programs[place]

    def place(self, rank: int) -> tuple[int, ...]:
        """Its role, and where it stands on the axes on which that matters: what is equal runs the same ops."""
        role = self.roles[rank]
        return role, *(self.mesh.coordinate(rank, axis) for axis in self._seen_from[role])

    def on(self, rank: int, op: Op) -> Op:
        """An op of a rank's role as this rank does it: with its peer's coordinate, and the tokens that it loads."""
        if op.ring:
            around = (self.mesh.coordinate(rank, op.axis) + op.peer) % self.mesh.degree(op.axis)
            return replace(op, peer=around, ring=False)
        if op.kind == "load" and self.tokens:
            return replace(op, part=self.tokens[self.mesh.coordinate(rank, "cp")])
        return op

    @functools.cached_property
    def _seen_from(self) -> tuple[tuple[str, ...], ...]:
        """Of each role the axes on which it matters where a rank stands: ops are not the same `on` all of them."""
        found = []
        for ops in (getattr(program.ops, "templates", program.ops) for program in self.programs):
            loads = self.tokens and any(op.kind == "load" for op in ops)
            found.append(tuple(sorted({op.axis for op in ops if op.ring} | ({"cp"} if loads else set()))))
        return tuple(found)

    @functools.cached_property
    def _programs(self) -> dict[tuple[int, ...], Program]:
        return {}

    def coordinate(self, rank: int, op: Op) -> int:
        return self.mesh.coordinate(rank, op.axis) if self.mesh.has(op.axis) else 0

    def lane(self, rank: int, op: Op) -> str:
        return lane_of(self.on(rank, op), self.coordinate(rank, op))

    def peer_rank(self, rank: int, op: Op) -> int | None:
        return None if op.peer is None else self.mesh.peer(rank, op.axis, self.on(rank, op).peer)
