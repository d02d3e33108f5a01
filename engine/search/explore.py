"""Settings that are given -> the fastest layouts that fit, one of each mesh: best first, with bounds.

Layouts are looked at in the order of what they take at least (`engine.search.bounds`), and first in bunches: a mesh
with pieces of one size, before the orders of its pipeline. When the turn of a single layout comes it is bounded once
more, closer. What takes at least as long as the fastest of its own mesh, or of as many meshes as are wanted, is cut: it
cannot change the answer (Land & Doig 1960, doi 10.2307/1910129); and so is what may be faster by 1 % at most. What is
left is planned, and if it fits simulated.

Every layout is in one count: refused, by the rule that it breaks; too large; cut; or simulated. A mesh that breaks a
rule whatever else is chosen counts once.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engine import modes
from engine.asking import slow
from engine.asking.rules import SpecError
from engine.asking.settings import planned_only
from engine.cost.held import memory_of
from engine.cost.machine import Machine, machine
from engine.graph.matching import PlanError
from engine.job import Job, prepare, prepare_real
from engine.plan import Program
from engine.predict import Prediction, predict
from engine.scale_model.pictured import machine_of
from engine.search import space
from engine.search.bounds import Bound, Bounds
from engine.search.fits import room_of
from engine.search.pieces import Way
from engine.search.space import Settings
from engine.simulation import simulate
from engine.spec import Spec

MODEL, ACTIVATIONS = "model", "activations"  # what is too large: what stays, or what is kept beside it
CLOSE = 0.01  # of a step: who may be faster by less is not looked for, since predictions are several times further off
OBJECTS = 50_000  # that are made between two looks for garbage
TOP = 10  # meshes whose fastest layouts are sought
Mesh = tuple[Any, ...]  # its mode and degrees; how many replicas there are, and not which of them share their layers


class Layout(NamedTuple):
    """One that fits, simulated. `settings`: what was searched; `spec` has what was given beside it."""

    settings: Settings
    spec: Spec
    step_time: float
    peak_memory: int


class Bunch(NamedTuple):
    """Layouts that have some settings in common, on one mesh; or just one, where none is open."""

    seconds: float  # that each of them takes at least
    turn: int  # of those that take equally long, the first comes first
    mesh: Mesh
    job: Job  # checked, but for what is not of its mesh
    settings: Settings
    way: Way
    pieces: tuple[Settings, ...]  # into which a replica's part of a batch can be cut; none: it is chosen
    orders: int  # that its pipeline can have; 0: it is chosen, or there is none
    more: tuple[str | None, ...]  # what else may be computed again, and takes no less
    outlined: bool = False  # bounded pass by pass

    @property
    def size(self) -> int:
        return max(1, len(self.pieces)) * max(1, self.orders) * (1 + len(self.more))


class Seldom:
    """While any search goes on, in whichever thread, Python looks for garbage seldom: nearly all that is made is kept,
    and a look after every few hundred objects would take a fifth of the time."""

    def __init__(self):
        self._lock, self._inside, self._before = threading.Lock(), 0, gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = gc.get_threshold()
                gc.set_threshold(OBJECTS)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                gc.set_threshold(*self._before)


_SELDOM = Seldom()


@dataclass
class Search:
    """`held`: settings that are given; the others of `space.SEARCHED` are searched. `on`: a machine other than the one
    that is named. Without `prune` all that fits is simulated. What is found is slower than the fastest by no more than
    `close` of its step."""

    given: Spec
    held: Collection[str]
    top: int = TOP
    on: Machine | None = None
    prune: bool = True
    close: float = CLOSE
    total: int = 0
    cut: int = 0
    simulated: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by rule
    refusals: dict[str, SpecError] = field(default_factory=dict)  # of each rule one
    too_large: Counter[str] = field(default_factory=Counter)  # by what is too much for the fullest rank
    smallest: int | None = None  # bytes that its fullest rank needs at least, of what is too large by itself
    fastest: dict[Mesh, Layout] = field(default_factory=dict)
    done: bool = False

    def __post_init__(self) -> None:
        self.spec = space.base_of(self.given.with_(paced=None, dilation=None), self.held)
        self.machine = self.on or machine(self.spec.machine)
        # What ranks that share this machine's cores cannot run is no answer there.
        self._check = prepare_real if self.machine.cores and planned_only(self.spec) is None else prepare
        self._bounds = Bounds(self.on)
        self._turns = itertools.count()
        self._last = math.inf  # seconds of the last of the meshes that are wanted
        self._known: dict[tuple, Job | SpecError] = {}
        self._ways: dict[tuple, Way] = {}
        self._predictions: dict[Spec, Prediction] = {}

    @property
    def decided(self) -> int:
        """Of `total`, those that are in a count."""
        return self.cut + self.simulated + self.refused.total() + self.too_large.total()

    @property
    def best(self) -> list[Layout]:
        """One of each mesh, the fastest first."""
        return sorted(self.fastest.values(), key=lambda one: one.step_time)[: self.top]

    def prediction(self, layout: Layout) -> Prediction:
        """Those of the best are kept."""
        return self._predictions.get(layout.spec) or predict(layout.spec, on=self.on)

    def steps(self) -> Iterator[None]:
        """Looks at all of them, and lets its caller have a turn now and then, who may leave."""
        with _SELDOM:
            yield from self._steps()

    def _steps(self) -> Iterator[None]:
        queue: list[Bunch] = []
        for settings in space.meshes(self.spec, self.held):
            queue += self._on_mesh(settings)
            yield
        heapq.heapify(queue)
        while queue:
            bunch = heapq.heappop(queue)
            if self._is_slower(bunch):
                self.cut += bunch.size
            elif bunch.pieces or bunch.orders or bunch.more:
                for part in self._parts(bunch):
                    heapq.heappush(queue, part)
            elif not bunch.outlined:
                for one in self._alone(bunch):
                    heapq.heappush(queue, one)
            else:
                self._try(bunch)
            yield
        self.done = True

    def _is_slower(self, bunch: Bunch) -> bool:
        """Than the fastest of its mesh, or than one of each mesh that is wanted."""
        own = self.fastest.get(bunch.mesh)
        limit = min(self._last, own.step_time if own else math.inf)
        return self.prune and bunch.seconds * (1 + self.close) >= limit

    def _refuse(self, error: SpecError, number: int = 1) -> None:
        self.refused[error.code] += number
        self.refusals.setdefault(error.code, error)

    def _room(self, job: Job) -> float:
        return math.inf if self.machine.memory_size is None else room_of(job, self.machine)

    def _leave_out(self, job: Job, stays: int, number: int = 1, *, alone: int | None = None) -> None:
        """Of what is too large: is what a rank holds the whole step long so by itself? `alone`: bytes of one layout."""
        self.too_large[MODEL if stays > self._room(job) else ACTIVATIONS] += number
        if alone is not None:
            self.smallest = alone if self.smallest is None else min(self.smallest, alone)

    def _on_mesh(self, settings: Settings) -> list[Bunch]:
        """The layouts of a mesh, in one bunch; none where it is refused, or cannot hold its model."""
        try:
            job = self._meshed(settings)
        except SpecError as error:
            self.total += 1
            self._refuse(error)
            return []
        staged = space.is_staged(job.spec)
        mesh = (job.spec.mode, job.replicas, *(job.degree(axis) for axis in ("pp", "cp", "ep", "tp")))
        orders = len(space.orders(self.spec, self.held, job.degree("pp"), len(job.layers))) if staged else 0
        again, *more = space.recomputations(self.spec, self.held, self.machine)
        pieces = tuple(space.pieces(self.spec, self.held, staged, job.local_batch))
        bunch = Bunch(0.0, next(self._turns), mesh, job, settings, Way(0, again), pieces, orders, tuple(more))
        self.total += bunch.size
        return list(self._that_fit(bunch, self._bounds.of_mesh(job, again)))

    def _meshed(self, settings: Settings) -> Job:
        """Rules of a mesh know how many replicas there are, and not which of them share their layers. Those of a
        pipeline's order come later: GPipe runs any microbatches on any devices."""
        spec = self.spec.with_(**settings)
        both = spec.mode == "hybrid" and spec.dp is not None and spec.fsdp is not None
        shared = {"dp": spec.dp * spec.fsdp, "fsdp": 1} if both else {}
        key = tuple(sorted((settings | shared).items()))
        if key not in self._known:
            free = space.is_staged(spec) and "schedule" not in self.held and spec.schedule_file is None
            try:
                self._known[key] = prepare(spec.with_(**{"schedule": "gpipe"} if free else {}), suggest=False)
            except SpecError as error:
                self._known[key] = error
        if isinstance(found := self._known[key], SpecError):
            raise found
        return replace(found, spec=found.spec.with_(dp=spec.dp, fsdp=spec.fsdp)) if shared else found

    def _bounded(self, bunch: Bunch) -> Iterator[Bunch]:
        return self._that_fit(bunch, self._bounds.of(bunch.job, bunch.way))

    def _that_fit(self, bunch: Bunch, bound: Bound) -> Iterator[Bunch]:
        """The bunch with its bound, which is no less than that of what it is a part of; nothing of it where a rank
        would hold more than there is. (A bunch with pieces that are open is bounded by what stays, whatever else.)"""
        bunch = bunch._replace(seconds=max(bunch.seconds, bound.seconds), turn=next(self._turns))
        if bound.bytes <= self._room(bunch.job):
            yield bunch
            return
        if bunch.more and not bunch.pieces:  # they keep less
            yield from self._again(bunch)
            bunch = bunch._replace(more=())
        self._leave_out(bunch.job, bound.stays, bunch.size, alone=bound.bytes if bunch.size == 1 else None)

    def _again(self, bunch: Bunch) -> Iterator[Bunch]:
        """The same with more that is computed again."""
        again, *more = bunch.more
        settings, way = bunch.settings | {"recompute": again}, bunch.way._replace(recompute=again)
        yield from self._bounded(bunch._replace(settings=settings, way=way, more=tuple(more)))

    def _parts(self, bunch: Bunch) -> Iterator[Bunch]:
        """Pieces of each size; then those that compute more again, and each order by itself."""
        job = bunch.job
        if bunch.pieces:
            for pieces, finer in space.by_fewest(bunch.pieces):
                microbatches = pieces.get("microbatches", job.spec.microbatches) or 1
                way = bunch.way._replace(pieces=microbatches * pieces.get("accumulate", job.microsteps))
                one = bunch._replace(settings=bunch.settings | pieces, way=way, pieces=())
                bound = self._bounds.of(job, way)
                yield from self._that_fit(one, bound)
                if finer:  # which takes no less
                    seconds = max(bunch.seconds, bound.seconds)
                    yield bunch._replace(seconds=seconds, turn=next(self._turns), pieces=tuple(finer))
            return
        if bunch.more:
            yield from self._again(bunch)
        alone = bunch._replace(more=())
        if not bunch.orders:
            yield alone
            return
        ordered = []
        for order in space.orders(self.spec, self.held, job.degree("pp"), len(job.layers)):
            settings = bunch.settings | order
            try:
                way = self._staged(job, settings)._replace(pieces=bunch.way.pieces, recompute=bunch.way.recompute)
            except SpecError as error:
                self._refuse(error)
                continue
            ordered.append(alone._replace(settings=settings, way=way, orders=0))
        for one, seconds in zip(ordered, self._bounds.of_orders(job, [one.way for one in ordered]), strict=True):
            yield one._replace(seconds=max(one.seconds, seconds), turn=next(self._turns))

    def _alone(self, bunch: Bunch) -> Iterator[Bunch]:
        """A layout whose turn has come: held to the rules of its order, and bounded closer."""
        try:
            if bunch.way.schedule is not None:
                self._ordered(bunch.job, bunch.settings)
        except SpecError as error:
            self._refuse(error)
            return
        yield from self._that_fit(bunch._replace(outlined=True), self._bounds.outlined(bunch.job, bunch.way))

    def _staged(self, job: Job, settings: Settings) -> Way:
        """How an order cuts the model: alike whatever the microbatches are, some of which may break a rule."""
        key = ("staged", job.spec.mode, job.degree("pp"), job.layers[-1].output, *map(settings.get, space.ORDER))
        if key not in self._ways:
            self._ways[key] = Way.of(self._ordered(job, settings))
        return self._ways[key]

    def _ordered(self, job: Job, settings: Settings) -> Job:
        """A job with these settings; rules of an order ask for what is cut into stages and microbatches alone. What a
        larger batch can be cut into, a smaller one can."""
        names = (*space.ORDER, "microbatches")
        cut = (job.spec.mode, job.degree("pp"), job.layers[-1].output, *map(settings.get, names))
        found = self._known.get(cut)
        if found is not None and found.local_batch >= job.local_batch:
            return found
        key = (*cut, job.local_batch)
        if key not in self._known:
            try:
                spec = self.spec.with_(**{k: v for k, v in settings.items() if k != "recompute"})
                self._known[key] = self._known[cut] = self._check(spec, suggest=False)
            except SpecError as error:
                self._known[key] = error
        if isinstance(found := self._known[key], SpecError):
            raise found
        return found

    def _is_too_large(self, job: Job, programs: Sequence[Program]) -> bool:
        each = [memory_of(program)[0] for program in programs]
        peak, held = max(((sum(held.values()), held) for held in each), key=lambda one: one[0], default=(0, {}))
        if peak <= self._room(job):
            return False
        self._leave_out(job, peak - held["activations"], alone=peak)
        return True

    def _try(self, bunch: Bunch) -> None:
        spec = self.spec.with_(**bunch.settings)
        try:
            job = self._check(spec, suggest=False)
            plan = modes.plan(job)
            if self._is_too_large(job, plan.programs):
                return
            simulation = simulate(plan, machine_of(job, self.on), slow.of_spec(spec))
        except SpecError as error:
            self._refuse(error)
            return
        except PlanError as error:  # no rule foresees it: ranks that wait for each other
            self._refuse(SpecError("cannot_be_run", "schedule", str(error).partition("\n")[0]))
            return
        self.simulated += 1
        known = self.fastest.get(bunch.mesh)
        if known is None or simulation.makespan < known.step_time:
            peak = max(simulation.peak_memory)
            self.fastest[bunch.mesh] = Layout(bunch.settings, spec, simulation.makespan, peak)
            predictions = self._predictions | {spec: Prediction(job, simulation)}
            self._predictions = {one.spec: predictions[one.spec] for one in self.best if one.spec in predictions}
            self._last = self.best[-1].step_time if len(self.fastest) >= self.top else math.inf
