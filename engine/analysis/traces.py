"""Traces of PyTorch's profiler, one file a rank -> when each rank came to each communication.

On GPUs a communication is a kernel of NCCL or RCCL, which starts when its rank comes and ends when all are through; on
the CPU it is gloo's own mark. Where the profiler noted whose a kernel is (its process group's ranks, or the two ends of
a message), the k-th of a group on one rank is the k-th of that group on every other; where it did not, all ranks are
taken to have called the same.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.analysis.stragglers import Calls
from engine.asking.rules import SpecError

KERNELS, MARKS = ("nccl", "rccl"), "gloo:"
MESSAGE = "message"
MICROSECOND = 1e-6  # the unit of a trace, whatever its displayTimeUnit says
MOST_BYTES = 2_000_000_000  # of a trace, unpacked


class Found(NamedTuple):
    """`names`: what each call was; `ends`: sender and receiver of one that is a message, else None. `unmatched`: parts
    of calls of which no other rank's is there, or that do not say whose they are, as several messages in one kernel."""

    calls: Calls
    names: list[str]
    ends: list[tuple[int, int] | None]
    unmatched: int


class Seen(NamedTuple):
    """One communication of a rank, in microseconds. `group`: the ranks it is between, as the trace tells them; empty
    where it does not; None of several messages in one kernel."""

    start: float
    duration: float
    name: str
    group: tuple | None = ()


def communications(paths: Sequence[str | Path]) -> Found:
    """Times in seconds from the first. SpecError for files that are no traces, that are of one rank, or whose ranks did
    not do the same."""
    found: dict[int, list[Seen]] = {}
    for path in paths:
        trace = _read(Path(path))
        info = trace.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        if not isinstance(rank, int):
            raise SpecError("trace_of_no_rank", "traces", str(path))
        if rank in found:
            raise SpecError("trace_twice", "traces", str(path), rank=rank)
        found[rank] = sorted(_communication(trace["traceEvents"]), key=lambda seen: seen.start)
    if not any(found.values()):
        raise SpecError("trace_silent", "traces")
    calls = _matched(found)
    unmatched = sum(map(len, found.values())) - sum(len(members) for _, members in calls)
    rows = [
        (i, rank, seen.start, seen.duration) for i, (_, members) in enumerate(calls) for rank, seen in members.items()
    ]
    call, of_rank, came, took = (np.array(column) for column in zip(*rows, strict=True))
    if not (np.isfinite(came) & np.isfinite(took) & (took >= 0)).all():
        raise SpecError("trace_times", "traces", int(of_rank[~(np.isfinite(came + took) & (took >= 0))][0]))
    first = came.min()  # taken away first: microseconds of Unix time are too large to multiply without loss
    came = came - first
    return Found(
        Calls(call, of_rank, came * MICROSECOND, (came + took) * MICROSECOND),
        [next(iter(members.values())).name for _, members in calls],
        [group[1:] if group[:1] == (MESSAGE,) else None for group, _ in calls],
        unmatched,
    )


def _matched(found: dict[int, list[Seen]]) -> list[tuple[tuple, dict[int, Seen]]]:
    """(group, each member's part) of every communication of which two ranks or more are there, in order of time."""
    told = any(seen.group != () for each in found.values() for seen in each)
    groups: dict[tuple, dict[int, list[Seen]]] = defaultdict(dict)
    for rank, each in sorted(found.items()):
        if not told:
            groups[()][rank] = each
        for seen in each if told else ():
            if seen.group:
                groups[seen.group].setdefault(rank, []).append(seen)
    calls = []
    for group, members in groups.items():
        counts = {rank: len(each) for rank, each in members.items()}
        if len(set(counts.values())) > 1:
            raise SpecError("trace_counts", "traces", counts, among=_ranks(group, members))
        if len(members) > 1:
            calls += [(group, dict(zip(members, same, strict=True))) for same in zip(*members.values(), strict=True)]
    if not calls:
        raise SpecError("trace_alone", "traces")
    return sorted(calls, key=lambda call: min(seen.start for seen in call[1].values()))


def _ranks(group: tuple, members: dict[int, list[Seen]]) -> str:
    """The ends of a message, or the ranks of a group as its processes called it; where nothing is told, all ranks."""
    return f"{group[1]} → {group[2]}" if group[:1] == (MESSAGE,) else str(group[1] if group else sorted(members))


def _read(path: Path) -> dict:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise SpecError("trace_too_large", "traces", str(path), most=f"{MOST_BYTES / 1e9:.0f} GB")
        trace = json.loads(text)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecError("trace_unreadable", "traces", str(path), error=str(error)) from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise SpecError("no_trace", "traces", str(path))
    return trace


def _communication(events: list) -> Iterator[Seen]:
    whole = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and isinstance(e.get("name"), str)]
    kernels = [e for e in whole if e.get("cat") == "kernel" and any(word in e["name"].lower() for word in KERNELS)]
    for event in kernels or [e for e in whole if e["name"].startswith(MARKS)]:
        start, duration, args = event.get("ts"), event.get("dur"), event.get("args")
        if isinstance(start, (int, float)) and isinstance(duration, (int, float)):
            group = _group(args if isinstance(args, dict) else {})
            yield Seen(start, duration, event["name"].partition("(")[0], group)


def _group(args: dict) -> tuple | None:
    """Whose a kernel is, of what PyTorch notes at it (torch/csrc/profiler/util.h)."""
    ends = args.get("Src Rank"), args.get("Dst Rank")
    if all(isinstance(rank, int) and rank >= 0 for rank in ends):
        return (MESSAGE, *ends)
    if "coalesced" in str(args.get("Collective name", "")).lower():
        return None
    ranks = args.get("Process Group Ranks")
    return ("ranks", str(ranks), str(args.get("Process Group Name", ""))) if ranks else ()
