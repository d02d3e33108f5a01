"""A plan and its timelines -> the picture: devices with what travels between them, above a timeline of every rank.

This computes and checks, without Plotly. `viz.figures.still` draws what stands still; `viz.figures.moving` adds what
moves (glow, cursor, packets, narration) as plain data for the player, which draws it at the figure's own scale.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from engine.lessons import Step
from engine.model.shapes import num_experts
from engine.modes import FIRST_STEADY_STEP
from engine.plan import Plan
from engine.timeline import Timeline
from viz import theme
from viz.figures import words
from viz.figures.critical import Key, bars_of
from viz.figures.flights import Flight, flights, shortest_flight
from viz.figures.moments import Told, told
from viz.figures.places import Places, places
from viz.figures.rows import Bar, Rows, from_start, rows
from viz.figures.thinned import fewer_flights, thinned

VIEWS = ("predicted", "measured", "both")
SECONDS = (8.0, 12.0)  # that a step takes to play: with few ops, with many
MANY = 60  # compute ops on one rank
STOP_APART = 0.004  # of the clock: what starts closer together is one stop of the step buttons


class PictureInfo(NamedTuple):
    """All times in seconds. `end` of the clock; `unit`: (seconds, name) of its axis; `stops`: where the step buttons
    halt; `pauses`: where a training step ends; `seconds`: how long it plays; `fade`: how long a glow takes to go;
    `numbered`: there are several microbatches to tell apart; `lesson`: its steps, with their moments; `critical`: the
    bars of the critical path, where it is to be seen.
    """

    view: str
    places: Places
    rows: Rows
    flights: tuple[Flight, ...]
    end: float
    unit: tuple[float, str]
    stops: tuple[float, ...]
    pauses: tuple[float, ...]
    seconds: float
    fade: float
    numbered: bool
    lesson: tuple[Told, ...] = ()
    critical: tuple[Bar, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.rows.bars

    @property
    def later_stages(self) -> tuple[Bar, ...]:
        """Of ranks that hold several stages, the ops of all but the first: microbatches pass such a rank again."""
        first = [min(box.stages, default=0) for box in self.places.boxes]
        return tuple(b for b in self.rows.bars if b.computes and not b.behind and b.span.stage > first[b.row])

    @property
    def total(self) -> int:
        return len(self.places.boxes) + self.places.hidden


def picture_info(
    plan: Plan,
    layers: Sequence[Any],
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    view: str = "predicted",
    memory: Sequence[int] | None = None,
    steps: Sequence[Step] = (),
    critical: Sequence[Key] = (),
) -> PictureInfo:
    """`layers`: the model's, or their names. `memory`: bytes a rank; default: what the plan keeps the whole step long.
    `steps`: a lesson's, whose moments are looked for in the timeline in front. `critical`: of that one, the path.

    A timeline may hold one step or several, all of it or the part that a stopped run recorded. ValueError for a view
    whose timeline is not given.
    """
    if view not in VIEWS:
        raise ValueError(f"view must be one of {', '.join(VIEWS)}; it is {view}")
    for name, given in (("predicted", predicted), ("measured", measured)):
        if view in (name, "both") and given is None:
            raise ValueError(f"the view {view} needs a {name} timeline")
    names = [layer if isinstance(layer, str) else layer.name for layer in layers]
    experts = [0 if isinstance(layer, str) else num_experts(layer) for layer in layers]
    frozen = [i for i, layer in enumerate(layers) if not isinstance(layer, str) and layer.frozen]
    where = places(plan, names, memory, experts, frozen)
    ranks = [box.rank for box in where.boxes]
    front = from_start(predicted if view == "predicted" else measured, ranks)
    behind = from_start(predicted, ranks) if view == "both" else []
    end = max((span.end for span in front + behind), default=0.0) or 1.0  # a clock needs a length
    computing = [span for span in front if span.lane == "compute"]
    busiest = max((sum(s.rank == rank for s in computing) for rank in ranks), default=0)
    shortest = shortest_flight(front, end)
    ends: dict[int, float] = {}
    for span in front:
        ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    lines = rows(ranks, front, behind)
    bars = thinned(lines.bars, end)
    return PictureInfo(
        view=view,
        places=where,
        rows=lines._replace(bars=bars),
        flights=fewer_flights(flights(front, plan.mesh, end), end),
        end=end,
        unit=words.unit_of(end),
        stops=_apart([span.start for span in front] + [end], end),
        pauses=tuple(sorted(ends.values())),
        seconds=SECONDS[busiest > MANY] * max(1, len(ends)),
        fade=shortest / 2,
        numbered=len({span.microbatch for span in computing if span.microbatch >= 0}) > 1,
        lesson=told(steps, front, shortest, end),
        critical=bars_of(critical, lines.bars),
    )


def _apart(times: Iterable[float], end: float) -> tuple[float, ...]:
    """The times in order, without those that all but coincide with the one before."""
    kept: list[float] = []
    for time in sorted(times):
        if not kept or time - kept[-1] > STOP_APART * end:
            kept.append(time)
    return tuple(kept)


def typical_step(timeline: Timeline) -> int:
    """Of the steps after the warm-up, one whose duration is the median: neither luck nor mishap."""
    lengths = timeline.step_seconds()
    steady = [step for step in lengths if step >= FIRST_STEADY_STEP] or list(lengths)
    middle = statistics.median(lengths[step] for step in steady)
    return min(steady, key=lambda step: (abs(lengths[step] - middle), step))


def caption(info: PictureInfo, text: words.Text) -> str:
    """What must be said about the picture: that it is empty, what marks mean, how few devices are drawn."""
    if info.is_empty:
        return text("figure.empty")
    told = [text("figure.frozen")] if any(cell.frozen for box in info.places.boxes for cell in box.cells) else []
    if info.later_stages:
        told.append(text("figure.later_stages"))
    if info.places.hidden:
        told.append(text("figure.not_drawn", drawn=len(info.places.boxes), total=f"{info.total:,}"))
    return " ".join(told)


def look_of(bar: Bar) -> str:
    return theme.look_of(bar.span.kind, bar.span.payload)


def digits_of(info: PictureInfo) -> int:
    """Decimals that are finer than a pixel: of the clock's axis, which a figure holds thousands of numbers of."""
    return max(0, 4 - math.floor(math.log10(info.end / info.unit[0])))


def place_of(info: PictureInfo, text: words.Text, bar: Bar) -> str:
    """Which rank and stage, and in a view of both, whether it was predicted or measured."""
    stages = (bar.span.stage,) if bar.span.stage >= 0 else ()
    source = text("figure.predicted") if bar.behind else text("figure.measured")
    return words.rank_and_stage(text, bar.span.rank, stages) + (f" · {source}" if info.view == "both" else "")


def said(info: PictureInfo, text: words.Text, bar: Bar) -> str:
    """What a bar is; of one that stands for several ops, how many."""
    told = words.describe(text, bar.span, numbered=info.numbered)
    return told if bar.count == 1 else f"{told} · {text('figure.ops', count=f'{bar.count:,}')}"
