"""A Timeline -> texts that other programs read: a trace for Perfetto and chrome://tracing, a CSV of its spans.

The trace is the Trace Event Format (JSON object form): a process a rank, a thread a lane, a complete event ("X") a
span, in microseconds from the first start; an arrow ("s" to "f") a message; a counter ("C") a memory category.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.plan import COMPUTE
from engine.timeline import NONE, Span, Timeline

MICRO = 1e6  # microseconds in a second


def to_perfetto(timeline: Timeline) -> str:
    """JSON. ValueError for a time that is not finite: JSON has no number for it."""
    spans = list(timeline.spans())
    times = np.concatenate([timeline["start"], timeline["end"], [time for _, time, _, _ in timeline.memory]])
    if not np.isfinite(times).all():
        raise ValueError("a trace holds finite times only; a span or a memory sample of this timeline has another")
    origin = float(times.min(initial=np.inf)) if len(times) else 0.0
    threads = _threads(spans)
    events = [
        *_names(threads, timeline.weights.tolist()),
        *(_complete(span, threads[span.rank][span.lane], origin) for span in spans),
        *_arrows(spans, threads, origin),
        *_counters(timeline, origin),
    ]
    about = {"source": timeline.source, "world_size": timeline.world_size}
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def to_csv(timeline: Timeline) -> str:
    """A header, then a line a span: times in seconds, sizes in bytes, -1 where a number does not apply."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(Span._fields)
    writer.writerows(timeline.spans())
    return out.getvalue()


def pair_messages(spans: list[Span]) -> Iterator[tuple[Span, Span]]:
    """(send, its receive): first in, first out in each step for each source, target and axis. Others are left out."""
    sends: dict[tuple, list[Span]] = defaultdict(list)
    recvs: dict[tuple, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "send":
            sends[span.step, span.rank, span.peer, span.group].append(span)
        elif span.kind == "recv":
            recvs[span.step, span.peer, span.rank, span.group].append(span)
    for channel, out in sends.items():
        ends = (sorted(spans, key=lambda span: span.start) for spans in (out, recvs.get(channel, ())))
        yield from zip(*ends, strict=False)


def _threads(spans: list[Span]) -> dict[int, dict[str, int]]:
    """A thread number for each lane of each rank: compute first, then the others by name."""
    lanes: dict[int, set[str]] = defaultdict(set)
    for span in spans:
        lanes[span.rank].add(span.lane)
    in_order = {rank: sorted(names, key=lambda name: (name != "compute", name)) for rank, names in lanes.items()}
    return {rank: {name: i for i, name in enumerate(names)} for rank, names in in_order.items()}


def _names(threads: dict[int, dict[str, int]], weights: list[int]) -> Iterator[dict[str, Any]]:
    """Metadata events that name and order processes and threads. `weights`: how many ranks each rank stands for."""
    for rank, alike in enumerate(weights):
        if not alike:
            continue
        name = f"rank {rank}" + (f" and {alike - 1} like it" if alike > 1 else "")
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for lane, thread in threads.get(rank, {}).items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _complete(span: Span, thread: int, origin: float) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step, "bytes": span.bytes}
    args |= {name: getattr(span, name) for name in ("stage", "microbatch", "peer") if getattr(span, name) != NONE}
    args |= {name: getattr(span, name) for name in ("part", "payload", "group") if getattr(span, name)}
    words = [span.kind, span.part, f"m{span.microbatch}" if span.microbatch != NONE else ""]
    return {
        "ph": "X",
        "name": " ".join(word for word in words if word),
        "cat": "compute" if span.kind in COMPUTE else "communication",
        "pid": span.rank,
        "tid": thread,
        "ts": (span.start - origin) * MICRO,
        "dur": span.duration * MICRO,
        "args": args,
    }


def _arrows(spans: list[Span], threads: dict[int, dict[str, int]], origin: float) -> Iterator[dict[str, Any]]:
    """A viewer ties each end to the event that is open there, so the head is in the middle of its receive."""
    for number, (send, recv) in enumerate(pair_messages(spans)):
        head = min(max((recv.start + recv.end) / 2, send.start), recv.end)
        for phase, span, time in (("s", send, send.start), ("f", recv, head)):
            event = {"ph": phase, "id": number, "name": send.payload or "message", "cat": "message", "pid": span.rank}
            event |= {"tid": threads[span.rank][span.lane], "ts": (time - origin) * MICRO}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _counters(timeline: Timeline, origin: float) -> Iterator[dict[str, Any]]:
    for rank, time, category, size in timeline.memory:
        name, place = f"memory: {category}", float(time - origin) * MICRO
        yield {"ph": "C", "name": name, "pid": rank, "ts": place, "args": {"bytes": int(size)}}
