"""This machine -> its Calibration: measured by real processes of a warm launcher, in half a minute, without torch here.

Products, collectives and small trainings of every mode are run and recorded (`engine.real.calibration`);
`engine.calibration.calibrated` makes costs of the trainings.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from engine import archive
from engine.asking.here import count_gpus
from engine.calibration.calibrated import Arrival, Sample, costs, of_training, unevenness
from engine.cost.calibration import MANY, ON_GPU, PROBING, Calibration, Cost, Curve, num_cores, this_machine
from engine.cost.local import PLAIN, Local
from engine.job import prepare
from engine.launch import Handle, Launcher
from engine.spec import Spec

OPTIONS = ("--worker", "engine.real.calibration:work", "--finish", "engine.real.calibration:finish")
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
LINKS = (*COLLECTIVE_KINDS, "send")
SIZES = (64, 16_384, 131_072, 1_048_576, 4_194_304)
GPU_SIZES = (64, 131_072, 4_194_304, 67_108_864, 268_435_456)
PASSES = 2  # over all sizes, so that what disturbs the machine for a moment is not all that is seen of one
ENOUGH = 24.0  # seconds: as long as no more would have gone by, what other programs disturbed is measured once more
AGAIN = 1.5  # seconds of a part for trainings that are done once more, since other programs took their cores
LIMIT = 600.0  # seconds after which a measurement is given up

_SMALL = {"gpt": {"layers": 2, "hidden": 16, "heads": 2, "context": 16}, "mlp": {"layers": 2, "hidden": 16}}
_LARGE = {"gpt": {"layers": 2, "hidden": 160, "heads": 4, "context": 64}, "mlp": {"layers": 2, "hidden": 512}}
_SMALL |= {"moe": _SMALL["gpt"] | {"experts": 8}, "cnn": {}}
_LARGE |= {"moe": _LARGE["gpt"] | {"experts": 8, "hidden": 96}, "cnn": {}}
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

    steps: int = 8
    budget: float = 0.02
    ranks: tuple[int, ...] = (2, 4)
    modes: tuple[str, ...] | None = None  # None: all


QUICK = Effort(steps=5, budget=0.004, ranks=(2,), modes=("ddp",))


class Part(NamedTuple):
    """One start of processes, and how many things it measures."""

    name: str
    processes: int
    asked: dict[str, Any]
    count: int


class Measured(NamedTuple):
    """A part that is done: what each rank found, and how many cores other programs kept busy for its `seconds`."""

    part: Part
    folder: Path
    ranks: list[dict[str, Any]]
    seconds: float
    others: float

    @classmethod
    def of(cls, part: Part, folder: Path) -> Measured:
        files = [archive.read_json(folder / f"rank{rank}.found.json") for rank in range(part.processes)]
        spent = [file["spent"] for file in files]
        seconds, busy = spent[0]["seconds"], spent[0]["busy"]
        others = 0.0 if busy is None else max(0.0, busy - sum(each["used"] for each in spent)) / seconds
        return cls(part, folder, [file["found"] for file in files], seconds, others)


@dataclass(slots=True)
class Measuring:
    """A calibration that goes on: `tell` may be called with (done, of) as things are measured."""

    effort: Effort = field(default_factory=Effort)
    tell: Callable[[int, int], None] = lambda done, of: None

    def run(self) -> Calibration:
        """Raises CalibrationError. Whatever ends it, its processes end with it."""
        began, cores = time.time(), num_cores()
        each_threads = sorted({1, cores})
        parts = [*self._parts(cores, each_threads)]
        total, done, found = sum(part.count for part in parts), 0, []
        with tempfile.TemporaryDirectory(prefix="lockstep-") as place, Launcher(OPTIONS) as launcher:
            launcher.warm()
            for part in parts:
                advance = partial(self._advance, done, total)
                one = self._measure(part, Path(place) / part.name, launcher, advance)
                if one.others > MANY * cores and time.time() - began + one.seconds < ENOUGH:
                    again = self._measure(part, Path(place) / f"{part.name}-again", launcher, advance)
                    one = min(one, again, key=lambda measured: measured.others)
                found.append(one)
                done += part.count
            return self._calibration(found, began)

    def _advance(self, done: int, total: int, more: int) -> None:
        self.tell(done + more, total)

    def _parts(self, cores: int, each_threads: Sequence[int]) -> Iterator[Part]:
        """Links first, on a machine whose caches and clocks are not yet warm with products."""
        effort = self.effort
        for ranks in effort.ranks:
            yield self._links("cpu", ranks, SIZES)
        each = sorted({1, cores, 2 * cores})
        asked = {"what": "together", "device": "cpu", "each": each, "budget": 10 * effort.budget}
        yield Part("together", max(2, each[-1]), asked, len(each))
        asked = {"what": "rates", "device": "cpu", "each_threads": each_threads, "budget": effort.budget}
        yield Part("rates", 1, asked, len(each_threads) * 8 + 1)
        for threads in each_threads:
            yield self._trainings(f"alone{threads}", 1, ALONE, {"threads": threads})
        yield self._trainings("shared", 2, SHARED, {})
        yield self._trainings("threads", 1, THREADS, {"threads": max(1, cores // 2)})
        if gpus := count_gpus():
            asked = {"what": "rates", "device": "cuda", "each_threads": [1], "budget": effort.budget}
            yield Part("gpu_rates", 1, asked, 11)
            for ranks in sorted({2, gpus}) if gpus > 1 else ():
                yield self._links("cuda", ranks, GPU_SIZES)

    def _links(self, device: str, ranks: int, sizes: Sequence[int]) -> Part:
        kinds = [*COLLECTIVE_KINDS, *(["send"] if ranks == 2 else [])]
        asked = {"what": "links", "device": device, "kinds": kinds, "sizes": sizes, "passes": PASSES}
        name = f"{'gpu_' if device == 'cuda' else ''}links{ranks}"
        return Part(name, ranks, asked | {"budget": self.effort.budget}, PASSES * len(kinds) * len(sizes))

    def _trainings(self, name: str, processes: int, wanted: Iterable[tuple], more: dict) -> Part:
        devices = 2 if name in ("shared", "threads") else 1
        jobs = []
        for mode, model, settings in wanted:
            if self.effort.modes is not None and mode not in (PLAIN, *self.effort.modes):
                continue
            jobs += [self._job(mode, model, devices, *size, settings) for size in ((_SMALL, 4), (_LARGE, 16))]
        asked = {
            "what": "trainings",
            "device": "cpu",
            "origin": time.time_ns(),
            "jobs": jobs,
            "budget": 5 * self.effort.budget,
            "again": AGAIN,
            **more,
        }
        return Part(name, processes, asked, len(jobs))

    def _job(self, mode: str, model: str, devices: int, sizes: dict, batch: int, settings: dict) -> dict[str, Any]:
        layers = {"layers": 4} if settings.get("schedule") == "zbv" else {}
        values = {
            "mode": mode, "model": model, "devices": devices, "dataset": "synthetic", "global_batch": batch,
            "steps": self.effort.steps, "parity_steps": 0, "device": "cpu",
            **sizes[model], **layers, **settings,
        }  # fmt: skip
        return prepare(Spec(**values)).spec.to_dict()

    def _measure(self, part: Part, folder: Path, launcher: Launcher, tell: Callable[[int], None]) -> Measured:
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
        return Measured.of(part, folder)

    def _calibration(self, found: Sequence[Measured], began: float) -> Calibration:
        by_name = {one.part.name: one for one in found}
        measured: dict[str, Curve] = {}
        for one in found:
            what, on = one.part.asked["what"], ON_GPU if one.part.asked["device"] == "cuda" else ""
            if what == "rates":
                measured |= {on + key: tuple(map(tuple, points)) for key, points in one.ranks[0].items()}
            elif what == "links":
                made = curves(one.ranks, ranks=one.part.processes)
                measured |= {on + key: curve for key, curve in made.items()}
        trained = [one for one in found if one.part.asked["what"] == "trainings"]
        probe = probes(by_name["together"].ranks, trained)
        together, crowded = speeds(by_name["together"].ranks, num_cores(), fmean(probe["1"]))
        calibration = Calibration(
            identity=this_machine(), made=began, seconds=0.0, together=together, crowded=crowded, uneven=0.0,
            probe=probe,
            disturbed=sum(one.others * one.seconds for one in found) / sum(one.seconds for one in found),
            curves=measured, ops={}, rates=rates_of(measured),
        )  # fmt: skip
        ops: dict[str, Cost] = {}
        arrived: list[Arrival] = []
        for part, folder, ranks, *_ in trained:
            samples: dict[str, list[Sample]] = defaultdict(list)
            for i, values in enumerate(part.asked["jobs"]):
                job = prepare(Spec.from_dict(values))
                who = f"{PLAIN}/{part.asked['threads']}" if job.spec.mode == PLAIN else job.spec.mode
                try:
                    recorded = of_training(folder / ranks[0]["folders"][i], job, part.asked.get("threads", 1))
                except ValueError as error:
                    raise CalibrationError(str(error)) from None
                samples[who] += recorded.samples
                arrived += recorded.arrivals
            speed = together if part.processes >= num_cores() > 1 else 1.0
            for who, each_op in samples.items():
                ops |= costs(who, each_op, Local(replace(calibration, ops=ops)), speed)
        return replace(calibration, ops=ops, uneven=unevenness(arrived), seconds=time.time() - began)


def speeds(found: Sequence[Mapping[str, float]], cores: int, alone: float) -> tuple[float, float]:
    """CPU seconds of a step of each process while some of them train -> how fast a core is while each has a process,
    and while each has two, beside one that is `alone`, in the mean over all this."""
    each = [[rank[str(n)] for rank in found if str(n) in rank] for n in (cores, 2 * cores)]
    busy, shared = (min(1.0, alone / fmean(steps)) for steps in each)
    return busy, min(busy, shared)


def probes(together: Sequence[Mapping[str, float]], trained: Iterable[Measured]) -> dict[str, tuple[float, ...]]:
    """`2`: CPU seconds of a step of the small training in each of two processes, whenever it was measured: alone, and
    before and after other trainings."""
    seconds = {n: [rank[str(n)] for rank in together if str(n) in rank] for n in range(1, PROBING + 1)}
    for part, _, ranks, *_ in trained:
        seconds[part.processes] += [one for rank in ranks for one in rank["step_seconds"]]
    return {str(processes): tuple(each) for processes, each in seconds.items()}


def rates_of(measured: Mapping[str, Curve]) -> dict[str, float]:
    """A few of the numbers, as people know them: FLOP/s and bytes/s of the largest size, seconds of the smallest."""
    rates = {}
    for key, curve in measured.items():
        name = key.replace("/", "_")
        rates[name if name != "memory_1" else "memory"] = curve[-1][0] / max(curve[-1][1], 1e-9)
        if key.removeprefix(ON_GPU).partition("/")[0] in LINKS:
            rates[f"{name}_latency"] = curve[0][1]
    return rates


# --- collectives ------------------------------------------------------------------------------------------------------


def curves(found: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, tuple[tuple[float, ...], ...]]:
    """What each rank saw of every call -> `all_reduce/2`: (bytes, seconds, cores busy), from when the last rank had
    begun to when the last had ended, in the mean of all calls."""
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
        made[f"{kind}/{ranks}"].append((float(size), fmean(seconds) / 1e9, busy, len(seconds)))
    return {key: _rising(sorted(points)) for key, points in made.items()}


def _rising(points: Sequence[tuple[float, ...]]) -> Curve:
    """Isotonic regression by pooling neighbours (Ayer et al. 1955, doi 10.1214/aoms/1177728423): where a smaller tensor
    took longer than a larger one, both take what all their calls did in the mean."""
    pools: list[tuple[float, int, int]] = []  # seconds, calls, points
    for _, seconds, _, calls in points:
        pools.append((seconds, calls, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (one, n, i), (other, m, j) = pools[-2:]
            pools[-2:] = [((one * n + other * m) / (n + m), n + m, i + j)]
    pooled = [seconds for seconds, _, count in pools for _ in range(count)]
    return tuple((size, seconds, busy) for (size, _, busy, _), seconds in zip(points, pooled, strict=True))


def _message(ends: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """There, from rank 0, which then receives: from its call, since a send is seen only once it is on its way, to the
    end of the receive of rank 1, which then sends."""
    (call, *_), (_, *received) = ends
    return [received[0][1] - call[0]] if len(received) == 2 else []
