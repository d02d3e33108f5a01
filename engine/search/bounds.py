"""A layout -> seconds that its step takes at least, and bytes that a rank holds at least, without planning it.

Both are sums of what one layer of each kind takes and keeps (`engine.search.pieces`), or, where the order of a pipeline
is known, are found pass by pass (`engine.search.outline`). They hold because of what is left out:

- All passes of a rank are part of its step, one after the other. Messages that are not between stages, and what travels
  in the background, are taken to be hidden, but for the multiprocessors that the latter has meanwhile.
- In a pipeline a rank cannot begin before the first microbatch has come through all stages before its first one, and
  where a backward is one op the step goes on, when the rank is through, until the gradient has gone back through them:
  FLOPs / rate + the ideal bubble of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2). Backwards in halves may end
  with what nobody waits for, so of these only the way there counts.
- What reduces gradients after the last backward, and the optimizer, come after all that.
- A rank holds its parameters, gradients and optimizer state, and what its layers keep of the microbatches that its
  schedule has in flight. What is gathered or received is left out. Pass by pass every rank of a pipeline is looked at;
  otherwise the first, which in most orders has most in flight.

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
from engine.asking.settings import SPLIT_BACKWARD
from engine.cost.contention import CHANNELS
from engine.cost.machine import Machine
from engine.job import Job
from engine.modes.fsdp.plan import overlaps
from engine.modes.pipeline.plan import ONE_STAGE
from engine.search.outline import Lengths, outline
from engine.search.pieces import Halves, Pieces, Way, Work

CHANGE = {"forward": 1, "backward": -1, "backward_input": -1}  # of microbatches in flight
ALL_AT_ONCE = ("gpipe", "looped_bfs")  # every forward before any backward
MOST_OUTLINED = 256  # microbatches; of more the bubble is a small part
ROUNDS = 4  # of a schedule, after which a rank has had as many microbatches in flight as it ever has


class Bound(NamedTuple):
    """`stays`: of the bytes, those that a rank holds the whole step long."""

    seconds: float = 0.0
    bytes: int = 0
    stays: int = 0


class Placed(NamedTuple):
    """How many layers of each kind a rank has (`own`), each of its stages at least (`least`), and are in stages before
    its first one (`before`), a row a rank; and all stages (`stages`), with the kinds of their first layers (`starts`)
    and of their last ones and those before (`ends`). `of_rank`: the stages of each rank."""

    own: np.ndarray
    least: np.ndarray
    before: np.ndarray
    stages: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    of_rank: np.ndarray


class AllPlaced(NamedTuple):
    """Of several orders, one each along the first axis: as in `Placed`, `last` being `own` or `least`; and whether
    backwards are in halves."""

    own: np.ndarray
    last: np.ndarray
    before: np.ndarray
    halves: np.ndarray


class Bounds:
    """For the layouts of one search, `on` a machine other than the one that they name."""

    def __init__(self, on: Machine | None = None):
        self._pieces = Pieces(on)
        self._most: dict[tuple, np.ndarray] = {}  # bytes that each rank keeps at most, of an order

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
        there, count = self._pieces.stays(job), np.bincount(self._pieces.kinds_of(job)) / job.degree("pp")
        stays = int(there.bytes @ count)
        if stays > (self._pieces.machine(job).memory_size or math.inf):
            return Bound(0.0, stays, stays)
        work = self._pieces.work(alone, Way(1, recompute), attends=alone is job)
        seconds = ((work.forward.seconds + work.backward.seconds) / job.degree("cp") + there.update) @ count
        return self._priced(job, Bound(float(seconds), stays, stays))

    def _priced(self, job: Job, bound: Bound) -> Bound:
        by_kernels = self._pieces.machine(job).sms and job.spec.slow_rank is None and job.spec.slow_link is None
        return bound if by_kernels else bound._replace(seconds=0.0)

    def _share(self, job: Job) -> float:
        """Of the multiprocessors, those that what travels in the background has (`engine.cost.contention`)."""
        sms = self._pieces.machine(job).sms
        return CHANNELS / sms if sms and overlaps(job) else 0.0

    def _of_passes(self, job: Job, way: Way) -> Bound:
        """Where every rank has all layers. The first one is gathered before anything is computed, and reduced after
        everything; and what is on one axis takes turns there. What is gathered in a piece is beside what is computed
        in it and in the next one."""
        waits = way.pieces > 1 and not job.spec.sync_every_microstep
        work, travels, share = self._pieces.work(job, way), self._pieces.travels(job), self._share(job)
        there, kinds = self._pieces.stays(job, waits=waits), self._pieces.kinds_of(job)
        count = np.bincount(kinds)
        gathers, both = 2 * travels.gather @ count, (work.forward.computes + work.backward.computes) @ count
        beside = share * min(gathers, both / (1 - share))
        passes = way.pieces * (work.forward.seconds + work.backward.seconds) @ count + (way.pieces - 1) * beside
        ends = travels.gather[0] + travels.reduce[0].max() + there.update @ count
        lanes = count @ travels.reduce
        lanes[0] += way.pieces * gathers
        again = np.minimum(work.again, self._pieces.halves(job, way).all_again)
        back = _while_it_goes_back(work, again, np.array([kinds[-1]]), np.array([kinds[-2:][0]]))[0]
        stays = int(there.bytes @ count + there.matrices.max())
        return Bound(max(float(passes + ends), float(lanes.max())), stays + int(work.kept @ count + back), stays)

    def _of_pipeline(self, job: Job, way: Way) -> Bound:
        """Of an order; or of any, whose fullest rank has as much as the mean one, and does. In whatever order, when a
        microbatch is in the last stage of a rank it is in all of them."""
        work, there = self._pieces.work(job, way), self._pieces.stays(job)
        kinds, both = self._pieces.kinds_of(job), work.forward.seconds + work.backward.seconds
        if way.schedule is None:
            count = np.bincount(kinds) / job.spec.pp
            seconds, stays = float((way.pieces * both + there.update) @ count), int(there.bytes @ count)
            return Bound(seconds, stays + (int(work.kept @ count) if job.spec.master_weights else 0), stays)
        return self.held(job, way)._replace(seconds=float(self._of_orders(job, [way])[0]))

    def held(self, job: Job, way: Way) -> Bound:
        """Bytes alone, of a pipeline whose order is known."""
        work, there, kinds = self._pieces.work(job, way), self._pieces.stays(job), self._pieces.kinds_of(job)
        placed = _placed(kinds, way.split, way.schedule, job.spec.pp, way.stages_per_rank)
        numbers = (job.spec.pp, way.pieces // job.microsteps, way.stages_per_rank)
        kept = (in_flight(way.schedule, *numbers) @ _kept(job, way, work, placed.stages[placed.of_rank[0]])).max()
        stays = placed.own @ there.bytes
        return Bound(0.0, int(max(stays.max(), stays[0] + kept)), int(stays.max()))

    def of_orders(self, job: Job, ways: Sequence[Way]) -> Sequence[float]:
        """Seconds of layouts that differ in nothing but the order of their pipeline."""
        if not ways or job.spec.mode != "hybrid" or job.spec.schedule_file is not None:
            return [0.0] * len(ways)
        return [self._priced(job, Bound(one)).seconds for one in self._of_orders(job, ways).tolist()]

    def _of_orders(self, job: Job, ways: Sequence[Way]) -> np.ndarray:
        work, there, travels = self._pieces.work(job, ways[0]), self._pieces.stays(job), self._pieces.travels(job)
        orders = tuple((way.split, way.schedule, way.stages_per_rank) for way in ways)
        placed = _all_placed(self._pieces.kinds_of(job), job.spec.pp, orders)
        both = work.forward.seconds + work.backward.seconds
        passes = placed.before @ work.forward.seconds + ways[0].pieces * (placed.own @ both)
        # In one stage gradients are reduced after all else; of several, at least those of the one that ends last.
        ends = (placed.last @ travels.reduce).max(axis=2) + placed.own @ there.update
        back = np.where(placed.halves, 0.0, placed.before @ work.backward.seconds + ends[:, :1])
        return (passes + np.maximum(ends, back)).max(axis=1)

    def outlined(self, job: Job, way: Way) -> Bound:
        """Of a layout whose order is known: closer, and dearer. Of a stage that was gathered the first layer is there
        before its first pass; its gradients are reduced after its last one, those on one axis one after the other."""
        known = job.spec.mode == "hybrid" and way.schedule is not None and job.spec.schedule_file is None
        if not known or way.pieces > MOST_OUTLINED or job.microsteps > 1:
            return self.of(job, way)
        capacity = self._pieces.machine(job).memory_size or math.inf
        if (bound := self.held(job, way)).bytes > capacity:
            return bound
        work, travels, there = self._pieces.work(job, way), self._pieces.travels(job), self._pieces.stays(job)
        placed = _placed(self._pieces.kinds_of(job), way.split, way.schedule, job.spec.pp, way.stages_per_rank)
        stays = (placed.own @ there.bytes + np.where(placed.own > 0, there.matrices, 0).max(axis=1)).astype(np.int64)
        bound = Bound(0.0, int((stays + self._most_of(job, way, work, placed)).max()), int(stays.max()))
        if bound.bytes > capacity:
            return bound
        halves, of_rank, gathers = self._pieces.halves(job, way), placed.of_rank, placed.stages @ travels.gather
        drawn = outline(way.schedule, job.spec.pp, way.pieces, way.stages_per_rank)
        ready = np.zeros(len(gathers))  # in the order in which a rank goes through its stages
        for stages in of_rank:
            turns = stages[np.argsort(drawn.first[stages])]
            ready[turns] = np.cumsum(gathers[turns]) - gathers[turns] + travels.gather[placed.starts[turns]]
        lengths = Lengths(
            *(_lengths(work, halves, placed, column, job.spec.master_weights) for column in range(2)),
            *(column.tolist() for column in (ready, gathers, placed.stages @ travels.reduce_all)),
        )
        through, ended = drawn.times(lengths, self._pieces.hop(job, way), self._share(job))
        ended = through[:, None] if way.schedule in ONE_STAGE else ended[of_rank]
        order = np.argsort(ended, axis=1)
        reduced = np.take_along_axis((placed.stages @ travels.reduce)[of_rank], order[:, :, None], axis=1)
        done = np.zeros((len(through), reduced.shape[2]))  # of each rank and axis
        for at, seconds in zip(np.take_along_axis(ended, order, axis=1).T, reduced.swapaxes(0, 1), strict=True):
            done = np.maximum(done, at[:, None]) + seconds
        seconds = np.maximum(through, done.max(axis=1)) + placed.own @ there.update
        return self._priced(job, bound._replace(seconds=float(seconds.max())))

    def _most_of(self, job: Job, way: Way, work: Work, placed: Placed) -> np.ndarray:
        """Beside what stays, the most that each rank keeps: whichever of its replicas share their layers."""
        key = (*self._pieces.key_of(job, way), job.spec.pp, *way)
        if key not in self._most:
            kept, stages, ends = _kept(job, way, work, placed.stages), placed.stages, placed.ends.T
            halves = self._pieces.halves(job, way)
            again = stages @ halves.all_again
            back = _while_it_goes_back(work, np.minimum(work.again, halves.all_again), *ends)
            left = np.minimum(kept + again, stages @ halves.operands)
            if not job.spec.master_weights:
                again, back = 0 * again, 0 * back
            change = np.concatenate([kept, -kept, left - kept, -left])
            meanwhile = np.concatenate([kept, back, np.maximum(again, back), 0 * kept])
            drawn = outline(way.schedule, job.spec.pp, way.pieces, way.stages_per_rank)
            self._most[key] = drawn.most(change, meanwhile).astype(np.int64)
        return self._most[key]


def _lengths(work: Work, halves: Halves, placed: Placed, column: int, master_weights: bool | None) -> list[float]:
    """Seconds of each pass of `engine.search.outline`. PyTorch leaves all of a first stage's backward to the half of
    the weights."""
    passes = (work.forward, work.backward, halves.inputs, halves.weights)
    forward, backward, inputs, weights = (placed.stages @ one[column] for one in passes)
    if not master_weights:
        inputs[0], weights[0] = 0.0, inputs[0] + weights[0]
    return np.concatenate([forward, backward, inputs, weights]).tolist()


def _kept(job: Job, way: Way, work: Work, stages: np.ndarray) -> np.ndarray:
    """Bytes of each of these stages, for a microbatch. What PyTorch's stages put out is counted elsewhere."""
    output = 0.0
    if not job.spec.master_weights:
        output = job.local_batch // way.pieces * max(layer.output_bytes for layer in job.layers[:-1])
    return np.maximum(0.0, stages @ work.kept - output)


def _while_it_goes_back(work: Work, again: np.ndarray, last: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Bytes beside what is kept, while the last layer of a stage goes back, or the one before, when that is gone; of
    stages whose last layers are of these kinds."""
    beside = again + work.scratch
    return np.maximum(beside[last], beside[before] - work.kept[last])


@functools.lru_cache(maxsize=4096)
def _placed(kinds: tuple[int, ...], split: tuple[int, ...], schedule: str, ranks: int, stages_per_rank: int) -> Placed:
    number, ends = max(kinds) + 1, np.cumsum(split)[:-1]
    stages = np.stack([np.bincount(part, minlength=number) for part in np.split(np.array(kinds), ends)])
    ahead = np.cumsum(stages, axis=0) - stages
    placement = schedules.placement(schedule, ranks, stages_per_rank)
    each = [(stages[list(own)], ahead[min(own)]) for own in placement]
    rows = [(own.sum(axis=0), own.min(axis=0), before) for own, before in each]
    parts = np.split(np.array(kinds), ends)
    starts, lasts = np.array([part[0] for part in parts]), np.array([[part[-1], part[-2:][0]] for part in parts])
    return Placed(*map(np.stack, zip(*rows, strict=True)), stages, starts, lasts, np.array(placement))


@functools.lru_cache(maxsize=256)
def _all_placed(kinds: tuple[int, ...], ranks: int, orders: tuple[tuple, ...]) -> AllPlaced:
    each = [_placed(kinds, split, schedule, ranks, count) for split, schedule, count in orders]
    names = [schedule for _, schedule, _ in orders]
    last = [one.own if name in ONE_STAGE else one.least for one, name in zip(each, names, strict=True)]
    halves = np.array([[name in SPLIT_BACKWARD] for name in names])
    own, before = (np.stack(column) for column in ([one.own for one in each], [one.before for one in each]))
    return AllPlaced(own, np.stack(last), before, halves)


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> np.ndarray:
    """How many microbatches are between a forward and its backward in each stage of rank 0: a row for each time at
    which that differs."""
    if schedule in ALL_AT_ONCE:
        return np.full((1, stages_per_rank), microbatches)
    if schedule == "zb_2p":  # its rank 0 goes ahead as far as its memory goes
        return np.full((1, 1), min(microbatches, 2 * ranks - 1))
    if microbatches % ranks == 0:  # rounds of one size, all alike from the first few on
        microbatches = min(microbatches, ROUNDS * ranks)
    own = schedules.placement(schedule, ranks, stages_per_rank)[0]
    row = schedules.order(schedule, ranks, microbatches, stages_per_rank)[0]
    changes, place = np.zeros((len(row), len(own)), dtype=np.int32), {stage: i for i, stage in enumerate(own)}
    for i, (kind, stage, *_) in enumerate(row):
        changes[i, place[stage]] = CHANGE.get(kind, 0)
    return np.unique(changes.cumsum(axis=0), axis=0)
