"""Spans -> flights: what travels from which device to which, when, and in which steps.

A message flies from the start of its send to the end of its receive. A collective moves in the rounds of its
algorithm, once its last member has joined: an all-reduce in 2(n-1) rounds round a ring, an all-gather or a
reduce-scatter in n-1, a broadcast down the ring; an all-to-all straight from each to each, in n-1 rounds; one that has
a root straight between it and the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import COLLECTIVES, COMPUTE, Mesh
from engine.timeline import NONE, Span
from viz.figures.places import OUTSIDE, is_rooted

SHORTEST = 0.03  # of the whole clock: what takes less is still seen to move


class Flight(NamedTuple):
    """`path`: the legs (from rank, to rank), each taking the same time. `number`: microbatch or bucket, or -1."""

    start: float
    end: float
    payload: str
    number: int
    path: tuple[tuple[int, int], ...]


def flights(spans: Sequence[Span], mesh: Mesh, end: float) -> tuple[Flight, ...]:
    """`spans` of the drawn ranks; `end` of the clock, in seconds. What has lost its other end flies all the same."""
    shortest = shortest_flight(spans, end)
    found = [*_loads(spans), *_messages(spans), *_collectives(spans, mesh, shortest)]
    numbered = {f.number for f in found if f.number >= 0}
    seen = [_visible(f, shortest, end) for f in found]
    return tuple(sorted(f if len(numbered) > 1 else f._replace(number=NONE) for f in seen))


def shortest_flight(spans: Iterable[Span], end: float) -> float:
    """Seconds that a flight takes at least: long enough to be seen, no longer than a usual op."""
    lengths = [s.end - s.start for s in spans if s.kind in COMPUTE and s.end > s.start]
    return min(SHORTEST * end, float(np.median(lengths)) if lengths else SHORTEST * end)


def _visible(flight: Flight, shortest: float, end: float) -> Flight:
    shortest *= max(1, len(flight.path) / 2)
    stop = min(max(flight.end, flight.start + shortest), end)
    return flight._replace(start=max(0.0, min(flight.start, stop - shortest)), end=stop)


def _loads(spans: Iterable[Span]) -> list[Flight]:
    return [Flight(s.start, s.end, "batch", NONE, ((OUTSIDE, s.rank),)) for s in spans if s.kind == "load"]


def _messages(spans: Iterable[Span]) -> list[Flight]:
    """The k-th send over a link in a step is the k-th receive: first in, first out."""
    sends, receives = defaultdict(list), defaultdict(list)
    for span in sorted(spans, key=lambda s: s.start):
        if span.kind == "send":
            sends[span.step, span.lane, span.rank, span.peer].append(span)
        elif span.kind == "recv":
            receives[span.step, span.lane, span.peer, span.rank].append(span)
    drawn = {span.rank for span in spans}
    found = []
    for link, starts in sends.items():
        ends = receives.get(link, [])
        for i, send in enumerate(starts):
            if send.peer in drawn:
                stop = ends[i].end if i < len(ends) else send.end
                found.append(Flight(send.start, stop, send.payload, send.microbatch, ((send.rank, send.peer),)))
    return found


def _collectives(spans: Sequence[Span], mesh: Mesh, shortest: float) -> list[Flight]:
    """The k-th collective of a rank over an axis in a step is the k-th one of every other member of its group."""
    calls: dict[tuple, list[Span]] = defaultdict(list)
    counts: dict[tuple, int] = defaultdict(int)
    kinds: dict[str, set[str]] = defaultdict(set)
    drawn = {span.rank for span in spans}
    groups: dict[tuple[int, str], tuple[int, ...]] = {}  # of a rank on an axis; its first member names it
    for span in sorted(spans, key=lambda s: s.start):
        if span.kind not in COLLECTIVES:
            continue
        if (mine := (span.rank, span.group)) not in groups:
            groups[mine] = mesh.group(*mine) if mesh.has(span.group) else tuple(sorted(drawn))
        place = (span.step, span.group, groups[mine][0])
        calls[(*place, counts[(*place, span.rank)])].append(span)
        counts[(*place, span.rank)] += 1
        kinds[span.group].add(span.kind)
    found = []
    for (_, axis, _, _), members in calls.items():
        first = members[0]
        group = groups[first.rank, axis]
        root = root_of(first.part)
        ring = [rank for rank in group[root:] + group[:root] if rank in drawn]
        start, stop = max(s.start for s in members), max(s.end for s in members)
        if first.kind == "all_to_all":
            found += _all_to_all(first, ring, start, max(stop, start + shortest * max(1, (len(ring) - 1) / 2)))
            continue
        for path in paths(first.kind, ring, rooted=is_rooted(kinds[axis])):
            found.append(Flight(start, stop, first.payload, bucket_of(first.part), path))
    return found


def _all_to_all(call: Span, ring: Sequence[int], start: float, stop: float) -> list[Flight]:
    """Everybody's pieces go straight to whom they are for: in round k, to the k-th rank after the sender."""
    rounds, found = len(ring) - 1, []
    for k in range(1, rounds + 1):
        begin, end = (start + (stop - start) * i / rounds for i in (k - 1, k))
        legs = [(rank, ring[(i + k) % len(ring)]) for i, rank in enumerate(ring)]
        found += [Flight(begin, end, call.payload, NONE, (leg,)) for leg in legs]
    return found


def paths(kind: str, ring: Sequence[int], *, rooted: bool) -> list[tuple[tuple[int, int], ...]]:
    """The way of each piece of a collective over the ranks of `ring`, whose first is the root where there is one."""
    n = len(ring)
    if n < 2:
        return []
    root, others = ring[0], ring[1:]
    if kind in ("gather", "reduce"):
        return [((rank, root),) for rank in others]
    if kind == "scatter" or (kind == "broadcast" and rooted):
        return [((root, rank),) for rank in others]
    hops = [(ring[i], ring[(i + 1) % n]) for i in range(n)]
    if kind == "broadcast":
        return [tuple(hops[:-1])]
    rounds = 2 * (n - 1) if kind == "all_reduce" else n - 1
    return [tuple(hops[(i + k) % n] for k in range(rounds)) for i in range(n)]


def root_of(part: str) -> int:
    """The place in its group of the rank that a collective starts from: owner2 -> 2; else the first."""
    found = re.fullmatch(r"owner(\d+)", part)
    return int(found[1]) if found else 0


def bucket_of(part: str) -> int:
    """The number at the end of a part's name: bucket3 -> 3; -1 where there is none."""
    found = re.search(r"bucket(\d+)$", part)
    return int(found[1]) if found else NONE
