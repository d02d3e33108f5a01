"""An op and this machine's calibration -> its seconds, what its rank spends before it, and the cores it keeps busy.

A compute op takes what its class was measured to take beside its matmuls (a fixed part, which is Python's and
PyTorch's, and so much a byte: norms, activations, copies), and each of these at the rate of a matmul of its size. A
communication op takes what the same call took between as many processes. Before an op a rank may spend time that is no
part of it: hooks of `fully_shard` or of a pipeline's schedule, copies in and out, the loop around a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.cost.calibration import Calibration, Cost, Curve, along
from engine.cost.kernels import ATTENTION, ATTENTION_BACKWARD, MATMUL
from engine.plan import COLLECTIVES, COMPUTE, Op, Plan, Program
from engine.spec import PRECISIONS

if TYPE_CHECKING:
    from engine.graph.matching import Graph

# What runs the ops of a mode, where that is not the mode's own name alone.
RUN_BY = {"hsdp": ("hsdp", "fsdp")}
ANY = "*"  # in place of a part
PLAIN = "single"
SIMILAR = {"recv": "send", "scatter": "broadcast", "gather": "all_gather", "reduce": "all_reduce"}
HALVES = {"backward_input": 0.5, "backward_weight": 0.5}  # of a backward, where it is two ops
ALIKE = {"recompute": "forward", **dict.fromkeys(HALVES, "backward")}
PASSES = ("forward", "backward", *ALIKE)
SHARDED = ("fsdp", "hsdp")  # each layer has the hooks of `fully_shard`


def part_class(part: str) -> str:
    """Layers that differ in their number only are of one class; convolutions are not, whose shapes differ, nor is one
    of several pieces (`attention#`, as a ring has them) of one that is done at once."""
    return part if part.startswith("conv") else re.sub(r"\d+", "", re.sub(r"(\.\D+)\d+$", r"\1#", part))


def class_of(op: Op) -> str:
    """That of its part; which tokens a load is of makes no difference."""
    return ANY if op.kind == "load" else part_class(op.part)


class Product(NamedTuple):
    """`count` matrix products of as many FLOPs each; `within`: of one call, whose threads each make some of them."""

    flops: float
    count: float = 1
    within: bool = False


def products(op: Op) -> list[Product]:
    """An op's products; where its kernels are not known, one of all its FLOPs. Those of a convolution and of an
    optimizer are part of what a byte of it takes. Attention is two of each head, backward five, or half of them."""
    if op.part.startswith("conv") or op.kind == "optimizer":
        return []
    if not op.kernels:
        return [Product(op.flops)] if op.flops else []
    return [
        Product(2 * k.m * k.n * k.k, k.flops / (2 * k.m * k.n * k.k), not k.weight)
        for k in op.kernels
        if k.kind in (MATMUL, ATTENTION, ATTENTION_BACKWARD) and k.flops
    ]


def moved(op: Op) -> float:
    """The bytes of a compute op without those of the parameters in its products, which are part of what these take."""
    weights = (k for k in op.kernels if k.kind == MATMUL and k.weight)
    return max(0.0, op.bytes - sum(k.item * k.batch * k.n * (k.m if k.of_weight else k.k) for k in weights))


@dataclass(frozen=True)
class Local:
    """`who`: what runs the ops: modes, of which the first that was measured with an op of its class counts."""

    calibration: Calibration
    who: tuple[str, ...] = (PLAIN,)
    precision: str = "fp32"

    @property
    def memory_rate(self) -> float:
        """Bytes a second, read and written."""
        return self.calibration.rates["memory"]

    def compute(self, op: Op, threads: int, layers: Sequence[str] = ()) -> float:
        """Seconds, on so many threads. `layers`: those of which an op of a whole stage is made."""
        return self.beside(op, threads, layers) + self.matmul(op, threads)

    def beside(self, op: Op, threads: int, layers: Sequence[str] = ()) -> float:
        """What an op takes beside its matmuls."""
        own = self._own(op.kind, class_of(op), threads)
        if op.part or op.kind not in PASSES:
            return _of(own or self._plain(op.kind, class_of(op), threads), moved(op))
        return (own or Cost()).scale * self.stage(op, threads, layers)

    def stage(self, op: Op, threads: int, layers: Sequence[str]) -> float:
        """What a stage's layers take beside their matmuls, were they alone; with what is before each of them, its
        hooks, where they are sharded."""
        costs = [self._layer(op.kind, part_class(layer), threads) for layer in layers]
        if not costs:
            return 0.0
        per_byte = sum(c.per_byte + c.lead_per_byte for c in costs) / len(costs)
        return sum(c.fixed + c.lead for c in costs) + moved(op) * per_byte

    def matmul(self, op: Op, threads: int) -> float:
        """Seconds of an op's products."""
        seconds = 0.0
        for one in products(op):
            each = self._product(one.flops, 1 if one.within else threads)
            seconds += one.count * each / (self._threads(threads) if one.within else 1)
        return seconds

    def _product(self, flops: float, threads: int) -> float:
        """At the rate of a product of so many FLOPs, without what the smallest takes: a call, which is in `beside`."""
        curve = self._curve(threads)
        least, size = curve[0], max(flops, curve[0][0] * 8)
        seconds = along(curve, size) - least[1]
        return flops * seconds / (size - least[0])

    def lead(self, op: Op) -> float:
        """Seconds that a rank spends before the op."""
        if op.asynchronous or op.kind == "recv":
            return 0.0
        of_any = None if not op.part and op.kind in PASSES else ANY  # a layer's lead is not a stage's
        found = [self._cost(who, op.kind, class_of(op)) or self._cost(who, op.kind, of_any) for who in self.who]
        return max((c.lead + c.lead_per_byte * op.bytes for c in found if c), default=0.0)

    def communication(self, op: Op, ranks: int) -> tuple[float, float]:
        """(seconds, cores busy over all its ranks). One that is a copy within a process is measured as an op."""
        if ranks < 2:
            return 0.0, 0.0
        own = self._own(op.kind, part_class(op.part), 1)
        if own is not None and (own.fixed or own.per_byte):
            return _of(own, op.bytes), 1.0
        kind = SIMILAR.get(op.kind, op.kind)
        measured = self._measured(kind)
        nearest = min(measured, key=lambda n: (abs(n - ranks), n))
        seconds, busy = (along(measured[nearest], op.bytes, column) for column in (1, 2))
        # Rings: as many turns as there are ranks, less one.
        return seconds * (ranks - 1) / (nearest - 1), busy * ranks / nearest

    def _own(self, kind: str, part: str, threads: int) -> Cost | None:
        """The cost measured where it is run as here."""
        if self.who == (PLAIN,):
            return self._cost(f"{PLAIN}/{self._threads(threads)}", kind, part)
        return next((cost for who in self.who if (cost := self._cost(who, kind, part))), None)

    def _layer(self, kind: str, part: str, threads: int) -> Cost:
        """That of a layer within a stage: as it is sharded there, or alone."""
        like = ALIKE.get(kind, kind)
        sharded = next((cost for who in self.who if who in SHARDED and (cost := self._cost(who, like, part))), None)
        if sharded is None:
            return self._plain(kind, part, threads)._replace(lead=0.0, lead_per_byte=0.0)
        return Cost(*(HALVES.get(kind, 1.0) * value for value in sharded[:4]))

    def _plain(self, kind: str, part: str, threads: int) -> Cost:
        """That of the layer alone; of a part that is none there, that of any."""
        who, like, half = f"{PLAIN}/{self._threads(threads)}", ALIKE.get(kind, kind), HALVES.get(kind, 1.0)
        cost = (
            self._cost(who, like, part) or self._cost(who, like, part.partition(".")[0]) or self._cost(who, like, ANY)
        )
        return cost._replace(fixed=half * cost.fixed, per_byte=half * cost.per_byte) if cost else Cost()

    def _cost(self, who: str, kind: str, part: str | None) -> Cost | None:
        return self.calibration.ops.get(f"{who}/{kind}/{part}")

    @property
    def precisions(self) -> list[str]:
        """In which products were measured."""
        names = {key.split("/")[0] for key in self.calibration.curves}
        return [name for name in PRECISIONS if name in names]

    def _threads(self, threads: int) -> int:
        """The most that was measured and is no more than that."""
        measured = self._measured("fp32")
        return max((n for n in measured if n <= threads), default=min(measured))

    def _curve(self, threads: int) -> Curve:
        return self.calibration.curves[f"{self.precision}/{self._threads(threads)}"]

    def _measured(self, name: str) -> dict[int, Curve]:
        """Threads or ranks -> what was measured with so many."""
        pairs = ((*key.split("/"), curve) for key, curve in self.calibration.curves.items())
        return {int(number): curve for kind, number, curve in pairs if kind == name}


def _of(cost: Cost, size: float) -> float:
    return cost.fixed + cost.per_byte * size


def run_by(mode: str, degrees: dict[str, int]) -> tuple[str, ...]:
    """What runs a mode's ops. Of a mesh of several axes, what runs each, from the inside of a layer outwards: replicas
    are `fully_shard`'s, but where there is nothing else than replicas and experts."""
    if mode != "hybrid":
        return RUN_BY.get(mode, (mode,))
    more = any(degrees.get(axis, 1) > 1 for axis in ("tp", "cp", "fsdp", "pp"))
    replicas = "hsdp" if more else "ddp"
    by_axis = {"tp": "tensor", "ep": "expert", "cp": "context", "fsdp": "fsdp", "pp": "pipeline", "dp": replicas}
    return tuple(who for axis, who in by_axis.items() if degrees.get(axis, 1) > 1) or (PLAIN,)


def layers_of(plan: Plan, program: Program, op: Op) -> list[str]:
    """Names of the layers of the stage that an op is a pass through."""
    stages = program.stages or (op.stage,) * len(program.holds)
    return [plan.layers[i] for i, stage in zip(program.holds, stages, strict=False) if stage == op.stage]


def local_seconds(graph: Graph, local: Local, threads: Callable[[int], int]) -> list[float]:
    """Seconds of each template of a graph, were it alone; those of a receive are its send's."""
    plan, each = graph.plan, threads(graph.plan.world_size)
    seconds = []
    for op, (role, _) in zip(graph.templates, graph.lanes, strict=True):
        if op.is_compute:
            layers = layers_of(plan, plan.programs[role], op) if not op.part else ()
            seconds.append(local.compute(op, each, layers))
        elif op.kind == "recv":
            seconds.append(0.0)
        else:
            ranks = 2 if op.kind == "send" else plan.mesh.degree(op.axis)
            seconds.append(local.communication(op, ranks)[0])
    return seconds


def local_leads(graph: Graph, local: Local) -> list[float]:
    """Seconds that a rank spends before each template of a graph."""
    return [local.lead(op) for op in graph.templates]


def is_in_order(op: Op) -> bool:
    """Whether its rank does nothing else meanwhile."""
    return op.kind in COMPUTE or (op.kind in COLLECTIVES and not op.asynchronous)
