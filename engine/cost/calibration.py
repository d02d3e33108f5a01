"""What was measured of a machine <-> a file: costs of ops, with the machine they are of; or why they do not hold here.

`python -m engine calibrate` measures (`engine.calibration.calibrate`) and stores. What is stored says which machine it
is of, and is refused on another one, with another torch, with another number of cores, or when it is old. Lockstep
ships one calibration, of a small cloud machine, for machines that have none of their own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from engine.asking.rules import SpecError

SHIPPED = Path(__file__).resolve().parents[1] / "data" / "calibration.json"
VARIABLE = "LOCKSTEP_CALIBRATION"  # a file to store in and to read from; `none`: what is shipped, wherever this runs
OLD = 90  # days
ON_GPU = "cuda:"  # before the name of a curve that is of GPUs, and of NCCL between them
PROBING = 2  # processes at most that train at once where it is measured how fast a machine is
STEADY, SURE = 0.03, 2.0  # a difference of speed that is worth no word, and how many standard deviations are
MANY = 0.1  # of the cores: other programs that keep so many busy are worth a word
VERSION = 5  # of what is stored
MEMORY_DIFFERS = 0.02  # of a machine's memory, that may be more or less after a restart
COMMAND = "python -m engine calibrate"
DIFFERS = ("host", "cpu", "cores", "memory", "gpus", "system", "torch")  # in the order in which they are told


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The machine and the torch that numbers are of. `host` is a hash, which tells machines apart and names none."""

    cpu: str
    cores: int
    memory: int  # bytes
    torch: str
    system: str
    host: str
    gpus: tuple[str, ...] = ()


@functools.cache
def this_machine() -> Identity:
    return Identity(
        cpu=_cpu_model(),
        cores=num_cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        torch=_torch_version(),
        system=f"{platform.system()} {platform.machine()}",
        host=hashlib.sha256(f"lockstep {platform.node()}".encode()).hexdigest()[:16],
        gpus=_gpu_names(),
    )


def num_cores() -> int:
    """Cores that a process started here may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    """proc(5): `model name` of /proc/cpuinfo, which Arm machines lack."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _gpu_names() -> tuple[str, ...]:
    """As the NVIDIA driver lists them, without loading it."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in found for line in path.read_text(errors="replace").splitlines()]
    return tuple(line.partition(":")[2].strip() for line in lines if line.startswith("Model"))


class Cost(NamedTuple):
    """Seconds of an op of one class: `lead` before it, in Python and in copies, and so many a byte; `fixed`, and so
    many a byte. What its matmuls take at this machine's rate is not in them. Of an op of a whole stage: `scale` times
    what its layers take alone."""

    lead: float = 0.0
    fixed: float = 0.0
    per_byte: float = 0.0
    lead_per_byte: float = 0.0
    scale: float = 1.0


Curve = tuple[tuple[float, ...], ...]  # (size, seconds, ...) in rising order of size


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`curves`: precision and threads (`fp32/2`) -> (FLOPs, seconds) of a product; `memory/1` -> (bytes read and
    written, seconds) of a sum; kind of communication and ranks (`all_reduce/4`) -> (bytes, seconds, cores busy
    meanwhile, over all ranks); the same of GPUs, where there are any, as `cuda:fp32/1`. `ops`: who runs it, its kind
    and part (`fsdp/forward/block`) -> Cost. `together`, `crowded` and `uneven`: see Machine. `probe`: in how many
    processes a small training went on at once -> CPU seconds of a step, each time that it was measured meanwhile
    (`engine.real.speed`). `disturbed`: cores that other programs kept busy meanwhile. `made`: Unix seconds; `seconds`:
    how long it took. `rates`: a few of the numbers as people know them."""

    identity: Identity
    made: float
    seconds: float
    together: float
    crowded: float
    uneven: float
    disturbed: float
    probe: Mapping[str, tuple[float, ...]]
    curves: Mapping[str, Curve]
    ops: Mapping[str, Cost]
    rates: Mapping[str, float]
    version: int = VERSION

    @property
    def was_disturbed(self) -> dict[str, Any] | None:
        """How many of the cores (`other`, `cores`) other programs kept busy, where that was more than a tenth."""
        many = self.disturbed > MANY * self.identity.cores
        return {"other": f"{self.disturbed:.1f}", "cores": self.identity.cores} if many else None

    def slower(self, processes: int, seconds: float) -> float | None:
        """How many times as long the same takes where a step of the probe in so many processes takes so long; None
        where that cannot be told from 1, since while all this was measured the probe itself differed by as much."""
        then = self.probe.get(str(min(processes, PROBING)), ())
        if len(then) < 2:
            return None
        apart = stdev(then) / fmean(then) * math.sqrt(1 + 1 / len(then))
        slower = seconds / fmean(then)
        return slower if abs(slower - 1) > max(STEADY, SURE * apart) else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ops": {name: list(cost) for name, cost in self.ops.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Raises KeyError, TypeError or ValueError where something is missing or is not a number."""
        if values["version"] != VERSION:
            raise ValueError(f"it is of version {values['version']}, and this Lockstep reads {VERSION}")
        who = dict(values["identity"])
        single = ("made", "seconds", "together", "crowded", "uneven", "disturbed")
        numbers = {name: _number(values[name]) for name in single}
        return cls(
            identity=Identity(**who | {"gpus": tuple(who["gpus"])}),
            ops={name: Cost(*map(_number, cost)) for name, cost in values["ops"].items()},
            rates={name: _number(rate) for name, rate in values["rates"].items()},
            probe={processes: tuple(map(_number, each)) for processes, each in values["probe"].items()},
            curves={name: _curve(points) for name, points in values["curves"].items()},
            **numbers,
        )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"a number of 0 or more is wanted, and {value!r} found")
    return float(value)


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    made = tuple(tuple(map(_number, point)) for point in points)
    if not made or any(a[0] >= b[0] for a, b in pairwise(made)):
        raise ValueError("a curve has points, in rising order of size")
    return made


def along(curve: Curve, size: float, column: int = 1) -> float:
    """The value at a size: on the line between the points beside it; before the first point that of the first; beyond
    the last one for `column` 1 (seconds) in proportion to the last two, for others that of the last."""
    if len(curve) == 1 or size <= curve[0][0]:
        return curve[0][column]
    if size >= curve[-1][0] and column != 1:
        return curve[-1][column]
    i = min(max(bisect_left(curve, size, key=lambda point: point[0]), 1), len(curve) - 1)
    before, after = curve[i - 1], curve[i]
    slope = (after[column] - before[column]) / (after[0] - before[0])
    return max(before[column] + slope * (size - before[0]), 0.0)


# --- where it is kept -------------------------------------------------------------------------------------------------


def place() -> Path | None:
    """The file: the one that is asked for, or one in the user's data folder (XDG base directory specification), so that
    every clone on a machine finds it. None: nothing is to be kept or read."""
    asked = os.environ.get(VARIABLE)
    if asked:
        return None if asked == "none" else Path(asked)
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "lockstep" / "calibration.json"


def store(calibration: Calibration, path: Path) -> None:
    """Replace the file at once. Raises SpecError("cannot_write")."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(json.dumps(calibration.to_dict(), allow_nan=False), encoding="utf-8")
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise SpecError("cannot_write", VARIABLE, f"{path}: {error.strerror}") from None


def load(path: Path) -> Calibration:
    """What is in a file, of whatever machine. Raises SpecError("bad_calibration")."""
    try:
        return Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise SpecError("bad_calibration", str(path), said, suggest=[COMMAND]) from None


def check(calibration: Calibration, here: Identity, now: float) -> None:
    """SpecError where it is of another machine ("foreign_calibration") or out of date ("stale_calibration")."""
    for name in DIFFERS:
        was, found = getattr(calibration.identity, name), getattr(here, name)
        same = abs(was - found) <= MEMORY_DIFFERS * found if name == "memory" else was == found
        if not same:
            code = "stale_calibration" if name in ("torch", "cores") else "foreign_calibration"
            raise SpecError(code, name, was, suggest=[COMMAND], here=found)
    days = (now - calibration.made) / 86_400
    if days > OLD:
        raise SpecError("old_calibration", "calibration", round(days), suggest=[COMMAND], high=OLD)


class Found(NamedTuple):
    """`source`: `calibrated` on this machine, or `shipped`. `refused`: why what is stored here does not hold."""

    calibration: Calibration
    source: str
    refused: SpecError | None


def find() -> Found:
    """What holds on this machine: its own calibration, or the shipped one. What is stored and does not hold is refused,
    and the reason kept. Raises it where the file was asked for by name."""
    path = place()
    if path is None or not path.exists():
        if path is not None and os.environ.get(VARIABLE):
            raise SpecError("no_file", VARIABLE, str(path), suggest=[COMMAND, "none"])
        return Found(_loaded(SHIPPED, SHIPPED.stat().st_mtime_ns), "shipped", None)
    try:
        calibration = _loaded(path, path.stat().st_mtime_ns)
        check(calibration, this_machine(), time.time())
    except SpecError as refused:
        if os.environ.get(VARIABLE):
            raise
        return Found(_loaded(SHIPPED, SHIPPED.stat().st_mtime_ns), "shipped", refused)
    return Found(calibration, "calibrated", None)


def told() -> dict[str, Any]:
    """What predictions for the machine `local` are made with, for a person."""
    found = find()
    made = found.calibration
    refused = None if found.refused is None else str(found.refused)
    disturbed = made.was_disturbed if found.source == "calibrated" else None
    of = {"cpu": made.identity.cpu, "cores": made.identity.cores, "torch": made.identity.torch}
    return {"source": found.source, "made": made.made, "refused": refused, "disturbed": disturbed, **of}


@functools.lru_cache(maxsize=4)
def _loaded(path: Path, _written: int) -> Calibration:
    return load(path)
