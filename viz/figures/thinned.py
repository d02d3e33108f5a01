"""A timeline's bars, more than can be seen -> fewer that look the same: what is narrower than a pixel joins its like.

A bar then stands for several ops (`count`). First pieces of one microbatch join, then microbatches after each other;
if that is not enough, what takes turns (1F1B's forward and backward) joins too, in stripes that are as many of each
colour as its part of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from engine.timeline import NONE
from viz.figures.flights import Flight
from viz.figures.rows import Bar

MOST_BARS, MOST_FLIGHTS = 4000, 3000  # that are drawn one by one
NARROW = 0.0012  # of the clock: about a pixel
STRIPE = 0.004  # and of a stripe
ROOM = 0.4  # of a leg, between two packets
APART = 0.004  # flights along one path start at least so much of the clock after each other


def thinned(bars: Sequence[Bar], end: float, most: int = MOST_BARS) -> tuple[Bar, ...]:
    """The bars themselves unless there are more than `most`. `end` of the clock, in seconds."""
    if len(bars) <= most:
        return tuple(bars)
    lanes: dict[tuple, list[Bar]] = defaultdict(list)
    for bar in bars:
        lanes[bar.row, bar.y0, bar.behind].append(bar)
    joining: list[Callable[[list[Bar]], Iterator[Bar]]] = [
        lambda lane: _joined(lane, lambda bar: (*_look(bar), bar.span.microbatch), NARROW * end),
        lambda lane: _joined(lane, _look, NARROW * end),
        lambda lane: _striped(lane, STRIPE * end),
    ]
    for join in joining:
        if sum(map(len, lanes.values())) > most:
            lanes = {place: list(join(lane)) for place, lane in lanes.items()}
    return tuple(sorted((bar for lane in lanes.values() for bar in lane), key=lambda bar: (bar.span.start, bar.row)))


def fewer_flights(flights: Sequence[Flight], end: float, most: int = MOST_FLIGHTS) -> tuple[Flight, ...]:
    """Of those that follow each other so closely along one path that they lie on each other, the first; where there are
    more than `most`, of those that start less than APART after each other."""
    kept, last, apart = [], {}, APART * end * (len(flights) > most)
    for flight in flights:  # in order of start
        way, leg = (flight.path, flight.payload), (flight.end - flight.start) / len(flight.path)
        if flight.start - last.get(way, -end) >= max(apart, ROOM * leg):
            last[way] = flight.start
            kept.append(flight)
    return tuple(kept)


def _look(bar: Bar) -> tuple:
    return bar.span.kind, bar.span.payload, bar.span.stage


def _joined(bars: Sequence[Bar], like: Callable[[Bar], tuple], narrow: float) -> Iterator[Bar]:
    """Runs of narrow bars that are alike, with no gap between them that could be seen."""
    run: list[Bar] = []
    for bar in bars:
        fits = run and like(run[-1]) == like(bar) and bar.span.start - run[-1].span.end <= narrow
        if run and not (fits and _width(bar) <= narrow):
            yield _one(run, run[0])
            run = []
        if _width(bar) <= narrow:
            run.append(bar)
        else:
            yield bar
    if run:
        yield _one(run, run[0])


def _striped(bars: Sequence[Bar], stripe: float) -> Iterator[Bar]:
    """Narrow bars that begin within one stripe as one, in the look that is owed most of the time so far."""
    owed: dict[tuple, float] = defaultdict(float)
    run: list[Bar] = []
    for bar in [*bars, None]:
        if run and (bar is None or _width(bar) > stripe or bar.span.start // stripe != run[0].span.start // stripe):
            for each in run:
                owed[_look(each)] += _width(each)
            chosen = max(run, key=lambda each: owed[_look(each)])
            owed[_look(chosen)] -= sum(map(_width, run))
            yield _one(run, chosen)
            run = []
        if bar is not None and _width(bar) > stripe:
            yield bar
        elif bar is not None:
            run.append(bar)


def _width(bar: Bar) -> float:
    return bar.span.end - bar.span.start


def _one(run: Sequence[Bar], look: Bar) -> Bar:
    """A bar in the place of several, named as far as they agree."""
    if len(run) == 1:
        return run[0]
    parts, microbatches = {bar.span.part for bar in run}, {bar.span.microbatch for bar in run}
    span = look.span._replace(
        start=run[0].span.start,
        end=max(bar.span.end for bar in run),
        part=parts.pop() if len(parts) == 1 else "",
        microbatch=microbatches.pop() if len(microbatches) == 1 else NONE,
        bytes=sum(bar.span.bytes for bar in run),
    )
    return look._replace(span=span, count=sum(bar.count for bar in run))
