"""This machine -> its Calibration: measured by real processes of a warm launcher, in half a minute, without torch here.

Products, collectives and small trainings of every mode are run and recorded (`engine.real.calibration`). Of a training
each op is joined to the planned one, as in any run; what its class takes at two sizes gives a fixed part and so much a
byte, and the time before it, in which its rank neither waits nor computes, its lead.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from engine import archive, modes
from engine.conform import conform
from engine.cost.calibration import Calibration, Cost, Curve, num_cores, this_machine
from engine.cost.local import ALIKE, ANY, PLAIN, Local, is_in_order, layers_of, matmul_flops, part_class
from engine.finish import read_spans, settle
from engine.job import Job, prepare
from engine.launch import Handle, Launcher
from engine.matching import match
from engine.plan import COLLECTIVES
from engine.settings import ONE_PROCESS_MODES
from engine.spec import Spec
from engine.timeline import Span

OPTIONS = ("--worker", "engine.real.calibration:work", "--finish", "engine.real.calibration:finish")
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
LINKS = (*COLLECTIVE_KINDS, "send")
SIZES = (64, 16_384, 262_144, 4_194_304)
FIRST = 3  # step of a training that counts: before it, things are made and found
COPIES = 8  # of an op's bytes, that its lead may take at most: a lead that grows with them is in and out of buffers
LIMIT = 600.0  # seconds after which a measurement is given up

_SMALL = {"gpt": {"layers": 2, "hidden": 16, "heads": 2, "context": 16}, "mlp": {"layers": 2, "hidden": 16}}
_MIDDLE = {"gpt": {"layers": 2, "hidden": 64, "heads": 4, "context": 64}, "mlp": {"layers": 2, "hidden": 256}}
_SMALL |= {"moe": _SMALL["gpt"] | {"experts": 4}, "cnn": {}}
_MIDDLE |= {"moe": _MIDDLE["gpt"] | {"experts": 8}, "cnn": {}}
# (mode, model, settings) of the trainings; each is run at both sizes.
ALONE = ((PLAIN, "cnn", {}), (PLAIN, "mlp", {}), (PLAIN, "gpt", {}), (PLAIN, "moe", {}))
SHARED = (
    ("ddp", "gpt", {}),
    ("ddp", "mlp", {}),
    ("zero1", "gpt", {}),
    ("zero2", "gpt", {}),
    ("fsdp", "gpt", {}),
    ("hsdp", "gpt", {"dp": 2, "fsdp": 1}),
    ("local_sgd", "gpt", {"sync_every": 2}),
    ("layer_split", "gpt", {}),
    ("pipeline", "gpt", {"microbatches": 2}),
    ("pipeline", "gpt", {"microbatches": 2, "schedule": "zbv"}),
    ("tensor", "gpt", {}),
    ("tensor", "mlp", {}),
    ("sequence", "gpt", {}),
    ("context", "gpt", {}),
    ("context", "gpt", {"attention": "ulysses"}),
    ("expert", "moe", {}),
)
THREADS = (("data_parallel", "mlp", {}), ("data_parallel", "gpt", {}))


class CalibrationError(RuntimeError):
    """A measurement ended without a result, with what its processes said."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look: `steps` of a training, `budget` seconds of a product or a collective, ranks to try."""

    steps: int = 7
    budget: float = 0.04
    ranks: tuple[int, ...] = (2, 4)
    modes: tuple[str, ...] | None = None  # None: all


QUICK = Effort(steps=6, budget=0.004, ranks=(2,), modes=("ddp",))


@dataclass(slots=True)
class Sample:
    """One planned op, as measured in the middle of its steps."""

    kind: str
    part: str
    bytes: int
    flops: int
    seconds: float
    lead: float
    layers: tuple[str, ...] = ()
    threads: int = 1


class Part(NamedTuple):
    """One start of processes, and how many things it measures."""

    name: str
    processes: int
    asked: dict[str, Any]
    count: int


@dataclass(slots=True)
class Measuring:
    """A calibration that goes on: `advance` may be called with (done, of) as things are measured."""

    effort: Effort = field(default_factory=Effort)
    tell: Callable[[int, int], None] = lambda done, of: None

    def run(self) -> Calibration:
        """Raises CalibrationError. Whatever ends it, its processes end with it."""
        began, cores = time.time(), num_cores()
        each_threads = sorted({1, cores})
        parts = [*self._parts(cores, each_threads)]
        total, done, found = sum(part.count for part in parts), 0, {}
        with tempfile.TemporaryDirectory(prefix="lockstep-") as place, Launcher(OPTIONS) as launcher:
            launcher.warm()
            for part in parts:
                folder = Path(place) / part.name
                self._measure(part, folder, launcher, lambda n, done=done: self.tell(done + n, total))
                found[part.name] = [archive.read_json(folder / f"rank{r}.found.json") for r in range(part.processes)]
                done += part.count
            return self._calibration(Path(place), parts, found, began, each_threads)

    def _parts(self, cores: int, each_threads: Sequence[int]) -> Iterator[Part]:
        """Links first, on a machine whose caches and clocks are not yet warm with products."""
        effort = self.effort
        for ranks in effort.ranks:
            kinds = [*COLLECTIVE_KINDS, *(["send"] if ranks == 2 else [])]
            asked = {"what": "links", "kinds": kinds, "sizes": SIZES, "budget": effort.budget}
            yield Part(f"links{ranks}", ranks, asked, len(kinds) * len(SIZES))
        yield Part("together", cores, {"what": "together", "budget": 4 * effort.budget}, 2)
        asked = {"what": "rates", "each_threads": each_threads, "budget": effort.budget}
        yield Part("rates", 1, asked, len(each_threads) * 8 + 1)
        for threads in each_threads:
            yield self._trainings(f"alone{threads}", 1, ALONE, {"threads": threads})
        yield self._trainings("shared", 2, SHARED, {})
        yield self._trainings("threads", 1, THREADS, {"threads": max(1, cores // 2)})

    def _trainings(self, name: str, processes: int, wanted: Iterable[tuple], more: dict) -> Part:
        devices = 2 if name in ("shared", "threads") else 1
        jobs = []
        for mode, model, settings in wanted:
            if self.effort.modes is not None and mode not in (PLAIN, *self.effort.modes):
                continue
            for sizes, batch in ((_SMALL, 4), (_MIDDLE, 16)):
                layers = {"layers": 4} if settings.get("schedule") == "zbv" else {}
                values = {
                    "mode": mode, "model": model, "devices": devices, "dataset": "synthetic", "global_batch": batch,
                    "steps": self.effort.steps, "parity_steps": 0, "device": "cpu",
                    **sizes[model], **layers, **settings,
                }  # fmt: skip
                jobs.append(prepare(Spec(**values)).spec.to_dict())
        return Part(name, processes, {"what": "trainings", "origin": time.time_ns(), "jobs": jobs, **more}, len(jobs))

    def _measure(self, part: Part, folder: Path, launcher: Launcher, tell: Callable[[int], None]) -> None:
        folder.mkdir()
        archive.write_json(folder / "calibration.json", part.asked)
        archive.write_json(folder / "status.json", archive.first_status(folder.name, processes=part.processes))
        launcher.begin(folder)
        handle, progress, deadline = Handle(folder), folder / "progress", time.monotonic() + LIMIT
        while not handle.done:
            tell(progress.stat().st_size if progress.exists() else 0)
            if time.monotonic() > deadline:
                raise CalibrationError(f"{part.name} took more than {LIMIT:.0f} s")
            time.sleep(0.05)
        status = archive.read_status(folder)
        if status["state"] != "finished":
            raise CalibrationError(f"{part.name} {status['state']}: {(status['error'] or {}).get('message')}")
        tell(part.count)

    def _calibration(
        self, place: Path, parts: Sequence[Part], found: Mapping[str, list], began: float, each
    ) -> Calibration:
        measured = {key: tuple(map(tuple, points)) for key, points in found["rates"][0].items()}
        for name in (part.name for part in parts if part.asked["what"] == "links"):
            measured |= curves(found[name], ranks=len(found[name]))
        alone = found["together"][0]["alone"]
        together = min(1.0, alone / max(rank.get("together", alone) for rank in found["together"]))
        calibration = Calibration(
            identity=this_machine(), made=began, seconds=0.0, together=together, curves=measured,
            ops={}, rates=rates_of(measured),
        )  # fmt: skip
        ops: dict[str, Cost] = {}
        for part in (part for part in parts if part.asked["what"] == "trainings"):
            samples: dict[str, list[Sample]] = defaultdict(list)
            for i, values in enumerate(part.asked["jobs"]):
                job = prepare(Spec.from_dict(values))
                who = f"{PLAIN}/{part.asked['threads']}" if job.spec.mode == PLAIN else job.spec.mode
                samples[who] += of_training(place / part.name / f"job{i}", job, part.asked.get("threads", 1))
            speed = together if part.processes >= num_cores() > 1 else 1.0
            for who, each_op in samples.items():
                ops |= costs(who, each_op, Local(replace(calibration, ops=ops)), speed)
        return replace(calibration, ops=ops, seconds=time.time() - began)


def rates_of(measured: Mapping[str, Curve]) -> dict[str, float]:
    """A few of the numbers, as people know them: FLOP/s and bytes/s of the largest size, seconds of the smallest."""
    rates = {}
    for key, curve in measured.items():
        name = key.replace("/", "_")
        rates[name if name != "memory_1" else "memory"] = curve[-1][0] / max(curve[-1][1], 1e-9)
        if key.partition("/")[0] in LINKS:
            rates[f"{name}_latency"] = curve[0][1]
    return rates


# --- collectives ------------------------------------------------------------------------------------------------------


def curves(found: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, tuple[tuple[float, ...], ...]]:
    """What each rank saw of every call -> `all_reduce/2`: (bytes, seconds, cores busy), from when the last rank had
    begun to when the last had ended; the median over calls. Where a smaller tensor took longer than a larger one,
    something else ran: it takes no longer than that."""
    made: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for key in found[0]:
        kind, size = key.split("/")
        seconds = []
        for one in zip(*(rank[key]["calls"] for rank in found), strict=True):
            if kind == "send":
                seconds += _message(one[:2])
            elif all(len(ops) > 1 for ops in one):
                seconds.append(max(ops[-1][1] for ops in one) - max(ops[1][0] for ops in one))
        if not seconds:
            raise CalibrationError(f"no {kind} of {size} bytes was seen")
        busy = sum(rank[key]["busy"] for rank in found[: 2 if kind == "send" else None])
        made[f"{kind}/{ranks}"].append((float(size), median(seconds) / 1e9, busy))
    return {key: _rising(sorted(points)) for key, points in made.items()}


def _rising(points: Sequence[tuple[float, ...]]) -> Curve:
    least = itertools.accumulate((seconds for _, seconds, _ in reversed(points)), min)
    kept = zip(points, reversed([*least]), strict=True)
    return tuple((size, seconds, busy) for (size, _, busy), seconds in kept)


def _message(ends: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """There, from rank 0, which then receives: from its call, since a send is seen only once it is on its way, to the
    end of the receive of rank 1, which then sends."""
    (call, *_), (_, *received) = ends
    return [received[0][1] - call[0]] if len(received) == 2 else []


# --- trainings --------------------------------------------------------------------------------------------------------


def of_training(folder: Path, job: Job, threads: int) -> list[Sample]:
    """A recorded training -> every planned op of its steady steps, in the median over these."""
    steps = [archive.read_steps(folder, rank) for rank in range(job.processes)]
    routed = [tuple(rows[s].get("routed", {}) for rows in steps) for s in range(job.steps)]

    def plan_of(step: int):
        return modes.plan(replace(job, routed=routed[step] if any(routed[step]) else None), step)

    report, joined = conform(list(read_spans(folder, job.processes)), plan_of, range(job.steps))
    if not report["ok"]:
        raise CalibrationError(
            f"{job.spec.mode}: a small training did not do what is planned: {report['first_difference']}"
        )
    lanes: dict[tuple[int, int, str], list[Span]] = defaultdict(list)
    for span in settle(joined):
        lanes[span.step, span.rank, span.lane].append(span)
    found: dict[tuple[int, int, int], list[tuple[Any, float, float, tuple[str, ...]]]] = defaultdict(list)
    period = max(1, job.spec.sync_every or 1)
    for step in range(FIRST, job.steps):
        plan = plan_of(step)
        graph = match(plan)
        # Where one process does it all, its first device's program says when.
        for rank in range(1 if job.processes < plan.world_size else plan.world_size):
            before = _last_end(lanes, step - 1, rank)
            program = graph.plan.program(rank)
            base = graph.first[graph.plan.roles[rank]]
            for i, (op, seconds, lead) in enumerate(_in_turn(graph, base, program.ops, rank, lanes, step, before)):
                layers = tuple(layers_of(plan, plan.program(rank), op)) if not op.part else ()
                found[step % period, rank, i].append((op, seconds, lead, layers))
    samples = []
    for each in found.values():
        op, _, _, layers = each[0]
        seconds, lead = (median(one[column] for one in each) for column in (1, 2))
        samples.append(Sample(op.kind, op.part, op.bytes, matmul_flops(op), seconds, lead, layers, threads))
    return samples


def _last_end(lanes: Mapping[tuple[int, int, str], list[Span]], step: int, rank: int) -> float:
    return max(span.end for (s, r, _), spans in lanes.items() if (s, r) == (step, rank) for span in spans)


def _in_turn(graph, base: int, ops, rank: int, lanes, step: int, ready: float) -> Iterator[tuple[Any, float, float]]:
    """(op, its seconds, seconds before it in which its rank did not wait) of what holds up its rank."""
    seen: dict[str, int] = defaultdict(int)
    spans: list[Span] = []
    for op in ops:
        lane = graph.plan.lane(rank, op)
        spans.append(lanes[step, rank, lane][seen[lane]])
        seen[lane] += 1
    for i, (op, span) in enumerate(zip(ops, spans, strict=True)):
        for node in graph.waits.get(base + i, ()):
            ready = max(ready, spans[node - base].end)
        if op.kind == "recv" and not op.asynchronous:
            ready = max(ready, span.end)
        elif is_in_order(op):
            yield op, span.duration, max(0.0, span.start - ready)
            ready = max(ready, span.end)


def costs(who: str, samples: Sequence[Sample], alone: Local, speed: float) -> dict[str, Cost]:
    """`who/kind/part` -> Cost, by class of op, and of any part of a kind. `speed`: of a core while all are busy, as
    they were, beside one that is alone, as costs are given."""
    classes: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    in_process = who in ONE_PROCESS_MODES
    for one in samples:
        for part in {part_class(one.part), ANY}:
            classes[one.kind, part].append(one)
    made = {}
    for (kind, part), each in classes.items():
        own: list[tuple[float, float]] = []
        of_stage: list[tuple[float, float]] = []  # what its layers take alone, what it takes
        for one in each:
            if kind in COLLECTIVES and not in_process:
                continue
            beside = one.seconds * speed - alone.matmul(one.flops, one.threads)
            if not one.part and kind in (*ALIKE, "forward", "backward"):
                of_stage.append((alone.stage(_Op(one), one.threads, one.layers), beside))
            else:
                own.append((one.bytes, beside))
        fixed, per_byte = line(own)
        lead, lead_per_byte = line([(one.bytes, one.lead * speed) for one in each], COPIES / alone.memory_rate)
        made[f"{who}/{kind}/{part}"] = Cost(lead, fixed, per_byte, lead_per_byte, scale(of_stage))
    return made


def scale(pairs: Sequence[tuple[float, float]]) -> float:
    """How many times as long the second ones are, with the least squares of relative errors; 1 where there is none."""
    weights = [1 / (max(y, 0.0) + 2e-5) ** 2 for _, y in pairs]
    total = sum(w * x * x for w, (x, _) in zip(weights, pairs, strict=True))
    return max(0.0, sum(w * x * y for w, (x, y) in zip(weights, pairs, strict=True)) / total) if total else 1.0


class _Op:
    """What Local.stage looks at."""

    def __init__(self, sample: Sample):
        self.kind, self.part, self.bytes = sample.kind, sample.part, sample.bytes


def line(points: Sequence[tuple[float, float]], steepest: float = math.inf) -> tuple[float, float]:
    """(a, b) >= 0 of a + b size, with the least squares of relative errors; a few us count as nothing."""
    if not points:
        return 0.0, 0.0
    weights = [1 / (max(y, 0.0) + 2e-5) ** 2 for _, y in points]
    total = sum(weights)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
    spread = sum(w * (p[0] - x) ** 2 for w, p in zip(weights, points, strict=True))
    slope = sum(w * (p[0] - x) * (p[1] - y) for w, p in zip(weights, points, strict=True)) / spread if spread else 0.0
    slope = min(slope, steepest)
    if slope <= 0:
        return max(y, 0.0), 0.0
    if y - slope * x >= 0:
        return y - slope * x, slope
    through = sum(w * p[0] * p[1] for w, p in zip(weights, points, strict=True))
    return 0.0, min(steepest, max(0.0, through / sum(w * p[0] ** 2 for w, p in zip(weights, points, strict=True))))
