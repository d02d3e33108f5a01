"""What a search has found so far -> a point for the fastest layout of each mesh: its step's time against the memory of
its fullest device, with the line that no device can cross.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.search.space import AXES
from viz import theme
from viz.figures.words import Text, show_bytes, show_seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT = 420
FAR = 3.0  # times the fastest: what takes longer is not drawn
TIED, OTHER, FIRST = "activation", "forward", "gradient"  # in theme.LOOKS


class Found(NamedTuple):
    settings: Mapping[str, Any]
    step_time: float
    peak_memory: int


class SearchInfo(NamedTuple):
    """`tied`: as many of the first as cannot be told apart from the first; `left_out`: points that are too far off."""

    points: tuple[Found, ...]
    tied: int
    left_out: int
    capacity: int | None


def search_info(found: Iterable[Found], capacity: int | None, error: float | None) -> SearchInfo:
    """The fastest first; `error`: by which part of a step predictions are off."""
    points = sorted(found, key=lambda one: one.step_time)
    if not points:
        return SearchInfo((), 0, 0, capacity)
    near = [one for one in points if one.step_time <= FAR * points[0].step_time]
    tied = sum(one.step_time <= points[0].step_time * (1 + (error or 0.0)) for one in near)
    return SearchInfo(tuple(near), tied, len(points) - len(near), capacity)


def plot_search(info: SearchInfo, text: Text, picked: str | None = None) -> go.Figure:
    """`picked`: the name (`name_of`) of the point that a person looks at."""
    import plotly.graph_objects as go

    parts = {
        "first": (info.points[:1], FIRST, "square", 14),
        "tied": (info.points[1 : info.tied], TIED, "diamond", 11),
        "other": (info.points[max(1, info.tied) :], OTHER, "circle", 8),
    }
    data = [
        _points(points, theme.LOOKS[look].colour, shape, size, text(f"figure.search.{name}"), text)
        for name, (points, look, shape, size) in reversed(parts.items())
        if points
    ]
    data += [_ring(one) for one in info.points if name_of(one.settings) == picked]
    highest = max((one.peak_memory for one in info.points), default=0)
    right = 1.08 * max(highest, info.capacity or 0) or 1
    times = [one.step_time for one in info.points] or [0.0, 1.0]
    line = {
        "type": "line", "xref": "x", "yref": "paper", "x0": info.capacity, "x1": info.capacity, "y0": 0, "y1": 1,
        "line": {"color": theme.INK, "width": 1.5, "dash": "dot"},
    }  # fmt: skip
    note = {
        "x": info.capacity, "xref": "x", "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top", "xshift": -6,
        "showarrow": False, "text": text("figure.search.capacity", size=show_bytes(info.capacity or 0)),
    }  # fmt: skip
    grid = {"showgrid": True, "gridcolor": theme.LINE, "griddash": "dot", "nticks": 6, "rangemode": "tozero"}
    layout = theme.layout(
        height=HEIGHT,
        showlegend=True,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        margin={"l": 84, "t": 40, "b": 60},
        hovermode="closest",
        hoverlabel=theme.HOVER_LINES,
        xaxis=grid | {"range": [0, right], "title": {"text": text("figure.search.memory")}} | _ticks(right, show_bytes),
        yaxis=grid
        | {"range": [0.9 * min(times), 1.06 * max(times)], "title": {"text": text("figure.search.time")}}
        | {"rangemode": "normal", "tickformat": ".3~s", "ticksuffix": "s"},
        shapes=[line] if info.capacity else [],
        annotations=[note] if info.capacity else [],
    )
    return go.Figure({"data": data, "layout": layout})


def _ticks(most: float, show) -> dict[str, Any]:
    """Five round numbers of bytes."""
    step = 10.0 ** (len(str(int(most))) - 1)
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5) if most / (step * part) <= 6)
    values = [step * i for i in range(int(most / step) + 1)]
    return {"tickvals": values, "ticktext": [show(value) for value in values]}


def _points(points: Sequence[Found], colour: str, shape: str, size: int, name: str, text: Text) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [one.peak_memory for one in points], "y": [one.step_time for one in points],
        "marker": {"color": colour, "symbol": shape, "size": size, "line": {"width": 1, "color": theme.GROUND}},
        "hovertext": [_hover(one, text) for one in points], "hoverinfo": "text",
        "customdata": [name_of(one.settings) for one in points],
    }  # fmt: skip


def _ring(one: Found) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "x": [one.peak_memory], "y": [one.step_time], "showlegend": False,
        "hoverinfo": "skip",
        "marker": {"symbol": "circle-open", "size": 24, "color": theme.INK, "line": {"width": 2}},
    }  # fmt: skip


def name_of(settings: Mapping[str, Any]) -> str:
    """Of a layout, for a click to tell which."""
    return json.dumps(settings, sort_keys=True)


def _hover(one: Found, text: Text) -> str:
    lines = [f"<b>{html.escape(words(one.settings, text))}</b>"]
    lines.append(text("figure.search.hover", time=show_seconds(one.step_time), memory=show_bytes(one.peak_memory)))
    return "<br>".join(lines)


def words(settings: Mapping[str, Any], text: Text) -> str:
    """A layout in one line: `tp 8 · pp 4 · dp 16 · interleaved 1F1B, 5 stages a device · 16 microbatches`."""
    degrees = [f"{axis} {settings[axis]}" for axis in AXES if settings.get(axis, 1) > 1]
    mode = settings.get("mode", "hybrid")
    told = degrees if mode == "hybrid" and degrees else [text(f"mode.{mode}"), *degrees]
    if settings.get("schedule"):
        told.append(text(f"schedule.{settings['schedule']}"))
    for name in ("stages_per_rank", "microbatches", "accumulate"):
        if settings.get(name, 1) > 1:
            told.append(text(f"figure.search.{name}", number=settings[name]))
    if settings.get("sequence_parallel"):
        told.append(text("setting.sequence_parallel"))
    if settings.get("expert_tp") == 1:
        told.append(text("figure.search.expert_tp"))
    if settings.get("recompute", "none") != "none":
        told.append(text("figure.search.recompute", what=text(f"recompute.{settings['recompute']}")))
    return " · ".join(told)
