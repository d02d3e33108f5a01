"""Traces of PyTorch's profiler, one file a rank -> when each rank came to each collective.

On GPUs a collective is a kernel of NCCL or RCCL, which starts when its rank comes and ends when all are through; on the
CPU it is gloo's own mark. The k-th collective of one rank is the k-th of every other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.analysis.stragglers import Calls

KERNELS, MARKS = ("nccl", "rccl"), "gloo:"
MICROSECOND = 1e-6  # the unit of a trace, whatever its displayTimeUnit says
MOST_BYTES = 2_000_000_000  # of a trace, unpacked


def collectives(paths: Sequence[str | Path]) -> tuple[Calls, list[str]]:
    """(calls, the name of each call), in seconds from the first. ValueError, in a sentence, for files that are no
    traces, that are of one rank, or whose ranks did not do the same."""
    found: dict[int, list[tuple[float, float, str]]] = {}
    for path in paths:
        trace = _read(Path(path))
        info = trace.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        if not isinstance(rank, int):
            raise ValueError(f"{path} does not say of which rank it is (distributedInfo)")
        if rank in found:
            raise ValueError(f"{path} is a second file of rank {rank}")
        found[rank] = sorted(_communication(trace["traceEvents"]))
    counts = {rank: len(each) for rank, each in sorted(found.items())}
    if len(set(counts.values())) > 1:
        raise ValueError(f"ranks have different numbers of collectives, so they cannot be matched: {counts}")
    names = [name for *_, name in next(iter(found.values()), [])]
    if not names:
        raise ValueError("there are no collectives in these files")
    rows = [(i, rank, *times) for rank, each in found.items() for i, (*times, _) in enumerate(each)]
    call, of_rank, came, took = (np.array(column) for column in zip(*rows, strict=True))
    first = came.min()  # taken away first: microseconds of Unix time are too large to multiply without loss
    came = came - first
    return Calls(call, of_rank, came * MICROSECOND, (came + took) * MICROSECOND), names


def _read(path: Path) -> dict:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"{path} holds more than {MOST_BYTES / 1e9:.0f} GB")
        trace = json.loads(text)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is no trace: it has no list traceEvents")
    return trace


def _communication(events: list) -> list[tuple[float, float, str]]:
    """(start, duration, name) of every collective, in microseconds."""
    whole = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and isinstance(e.get("name"), str)]
    kernels = [e for e in whole if e.get("cat") == "kernel" and any(word in e["name"].lower() for word in KERNELS)]
    chosen = kernels or [e for e in whole if e["name"].startswith(MARKS)]
    times = [(e.get("ts"), e.get("dur"), e["name"].partition("(")[0]) for e in chosen]
    return [
        (ts, dur, name) for ts, dur, name in times if isinstance(ts, (int, float)) and isinstance(dur, (int, float))
    ]
