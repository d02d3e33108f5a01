"""Small trainings, recorded -> what each class of ops costs beside its matmuls, and how uneven ranks are at one work.

Each op is joined to the planned one, as in any run. What its class takes at several sizes gives a fixed part and so
much a byte, and the time before it, in which its rank neither waits nor computes, its lead. All of them are means: a
step is a sum of many ops, and what rarely takes long counts in it too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from engine import archive, modes
from engine.asking.settings import ONE_PROCESS_MODES
from engine.cost.calibration import Cost
from engine.cost.local import ANY, PASSES, Local, is_in_order, layers_of, moved, part_class
from engine.graph.matching import Graph, match
from engine.job import Job
from engine.outcome.conform import conform
from engine.outcome.finish import read_spans, settle
from engine.plan import COLLECTIVES, Op
from engine.timeline import Span

FIRST = 3  # step of a training that counts: before it, things are made and found
COPIES = 8  # of an op's bytes, that its lead may take at most: a lead that grows with them is in and out of buffers

Lanes = Mapping[tuple[int, int, str], list[Span]]  # of a step, a rank and a lane, in order


@dataclass(slots=True)
class Sample:
    """One planned op, as measured in the mean of its steps."""

    op: Op
    seconds: float
    lead: float
    layers: tuple[str, ...] = ()
    threads: int = 1


class Arrival(NamedTuple):
    """Two ranks at a collective: seconds from when the first called to when the last did, and seconds for which they
    had computed since they last waited for each other, in the mean."""

    apart: float
    since: float


class Turn(NamedTuple):
    """An op that holds up its rank: its seconds, and those before it in which its rank did not wait."""

    op: Op
    seconds: float
    lead: float


class Call(NamedTuple):
    """A rank calls a collective: its lane, when, and for how long it has computed since it last waited for others."""

    lane: str
    start: float
    since: float


@dataclass(slots=True)
class Recorded:
    samples: list[Sample] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)


def of_training(folder: Path, job: Job, threads: int) -> Recorded:
    """A recorded training -> every planned op of its steady steps, and how ranks came to its collectives. Raises
    ValueError where it did something else than planned."""
    steps = [archive.read_steps(folder, rank) for rank in range(job.processes)]
    routed = [tuple(rows[s].get("routed", {}) for rows in steps) for s in range(job.steps)]

    def plan_of(step: int):
        return modes.plan(replace(job, routed=routed[step] if any(routed[step]) else None), step)

    report, joined = conform(list(read_spans(folder, job.processes)), plan_of, range(job.steps))
    if not report["ok"]:
        raise ValueError(f"{job.spec.mode}: a small training did not do what is planned: {report['first_difference']}")
    lanes: dict[tuple[int, int, str], list[Span]] = defaultdict(list)
    for span in settle(joined):
        lanes[span.step, span.rank, span.lane].append(span)
    found: dict[tuple[int, int, int], list[tuple[Turn, tuple[str, ...]]]] = defaultdict(list)
    period = max(1, job.spec.sync_every or 1)
    recorded = Recorded()
    for step in range(FIRST, job.steps):
        plan = plan_of(step)
        graph = match(plan)
        calls: list[list[Call]] = []
        # Where one process does it all, its first device's program says when.
        for rank in range(1 if job.processes < plan.world_size else plan.world_size):
            turns, called = in_turn(graph, rank, lanes, step, _last_end(lanes, step - 1, rank))
            for i, turn in enumerate(turns):
                layers = tuple(layers_of(plan, plan.program(rank), turn.op)) if not turn.op.part else ()
                found[step % period, rank, i].append((turn, layers))
            calls.append(called)
        recorded.arrivals += arrivals(calls)
    for each in found.values():
        (op, _, _), layers = each[0]
        seconds, lead = (fmean(turn[column] for turn, _ in each) for column in (1, 2))
        recorded.samples.append(Sample(op, seconds, lead, layers, threads))
    return recorded


def _last_end(lanes: Lanes, step: int, rank: int) -> float:
    return max(span.end for (s, r, _), spans in lanes.items() if (s, r) == (step, rank) for span in spans)


def in_turn(graph: Graph, rank: int, lanes: Lanes, step: int, ready: float) -> tuple[list[Turn], list[Call]]:
    """What holds up a rank in a step, in order, and the collectives that it calls."""
    base = graph.first[graph.plan.roles[rank]]
    seen: dict[str, int] = defaultdict(int)
    spans: list[Span] = []
    turns, calls, since = [], [], 0.0
    ops = graph.plan.program(rank).ops
    for op in ops:
        lane = graph.plan.lane(rank, op)
        spans.append(lanes[step, rank, lane][seen[lane]])
        seen[lane] += 1
    for i, (op, span) in enumerate(zip(ops, spans, strict=True)):
        for node in graph.waits.get(base + i, ()):
            ready, since = max(ready, spans[node - base].end), 0.0
        if op.kind == "recv" and not op.asynchronous:
            ready = max(ready, span.end)
        elif is_in_order(op):
            turns.append(Turn(op, span.duration, max(0.0, span.start - ready)))
            since += turns[-1].lead
        if op.kind in COLLECTIVES and graph.plan.mesh.degree(op.axis) > 1:
            calls.append(Call(span.lane, span.start, since))
        if is_in_order(op):
            since = 0.0 if op.kind in COLLECTIVES else since + span.duration
            ready = max(ready, span.end)
    return turns, calls


def arrivals(calls: Sequence[Sequence[Call]]) -> Iterator[Arrival]:
    """Of two ranks that make the same calls in the same order; of one rank none."""
    if len(calls) == 2:
        for one, other in zip(*(sorted(each, key=lambda c: c.lane) for each in calls), strict=True):
            yield Arrival(abs(one.start - other.start), (one.since + other.since) / 2)


def unevenness(arrived: Sequence[Arrival]) -> float:
    """Seconds of variance that a second of computing adds to when a rank is done with it. Of two ranks, each of
    variance v t after t seconds, the last comes 2 sqrt(v t / pi) after the first in the mean (normal distribution)."""
    expected = sum(2 * math.sqrt(one.since / math.pi) for one in arrived)
    return (sum(one.apart for one in arrived) / expected) ** 2 if expected else 0.0


def costs(who: str, samples: Sequence[Sample], alone: Local, speed: float) -> dict[str, Cost]:
    """`who/kind/part` -> Cost, by class of op, and of any part of a kind. `speed`: of a core while all are busy, as
    they were, beside one that is alone, as costs are given."""
    classes: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    in_process = who in ONE_PROCESS_MODES
    for one in samples:
        for part in {part_class(one.op.part), ANY}:
            classes[one.op.kind, part].append(one)
    made = {}
    for (kind, part), each in classes.items():
        own: list[tuple[float, float]] = []
        of_stage: list[tuple[float, float]] = []  # what its layers take alone, what it takes
        for one in each:
            if kind in COLLECTIVES and not in_process:
                continue
            beside = one.seconds * speed - alone.matmul(one.op, one.threads)
            if not one.op.part and kind in PASSES:
                of_stage.append((alone.stage(one.op, one.threads, one.layers), beside))
            else:
                own.append((moved(one.op), beside))
        fixed, per_byte = line(own)
        lead, lead_per_byte = line([(one.op.bytes, one.lead * speed) for one in each], COPIES / alone.memory_rate)
        made[f"{who}/{kind}/{part}"] = Cost(lead, fixed, per_byte, lead_per_byte, scale(of_stage))
    return made


class _Point(NamedTuple):
    """The mean of what was measured at one size, and what its relative error weighs."""

    x: float
    y: float
    weight: float


def _points(pairs: Sequence[tuple[float, float]]) -> list[_Point]:
    """Weights go by means, and not by what they are of: of two measurements of one thing, the smaller one is no more
    right. A few us count as nothing."""
    at: dict[float, list[float]] = defaultdict(list)
    for x, y in pairs:
        at[x].append(y)
    means = {x: fmean(ys) for x, ys in at.items()}
    return [_Point(x, means[x], len(ys) / (max(means[x], 0.0) + 2e-5) ** 2) for x, ys in at.items()]


def scale(pairs: Sequence[tuple[float, float]]) -> float:
    """How many times as long the second ones are, with the least squares of relative errors; 1 where there is none."""
    points = _points(pairs)
    total = sum(p.weight * p.x * p.x for p in points)
    return max(0.0, sum(p.weight * p.x * p.y for p in points) / total) if total else 1.0


def line(pairs: Sequence[tuple[float, float]], steepest: float = math.inf) -> tuple[float, float]:
    """(a, b) >= 0 of a + b size, with the least squares of relative errors."""
    if not pairs:
        return 0.0, 0.0
    points = _points(pairs)
    total = sum(p.weight for p in points)
    x = sum(p.weight * p.x for p in points) / total
    y = sum(p.weight * p.y for p in points) / total
    spread = sum(p.weight * (p.x - x) ** 2 for p in points)
    slope = sum(p.weight * (p.x - x) * (p.y - y) for p in points) / spread if spread else 0.0
    slope = min(slope, steepest)
    if slope <= 0:
        return max(y, 0.0), 0.0
    if y - slope * x >= 0:
        return y - slope * x, slope
    through = sum(p.weight * p.x * p.y for p in points)
    return 0.0, min(steepest, max(0.0, through / sum(p.weight * p.x**2 for p in points)))
