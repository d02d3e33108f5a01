"""Published measurements beside their predictions -> a point each, on the line where both agree or off it; and set by
set how far off, beside a model that knows nothing but one constant.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.validate.kept import Row
from viz import theme
from viz.figures.words import Text, show_bytes, show_error, show_seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

QUANTITIES = ("time", "memory")
BAND = 0.1  # of a measurement, to both sides: within it lies what is predicted well
ROOM = 1.25  # beyond the least and the most
HEIGHT, LINE_HEIGHT = 580, 26
CLEAR = "rgba(0,0,0,0)"
FAR = 0.6  # errors beyond it stand at the edge


class Point(NamedTuple):
    """`look`: the device's, in `theme.GENERATIONS`. Seconds of a step, or bytes."""

    row: Row
    look: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class ValidatedInfo(NamedTuple):
    """`behind`: points of other sets than the one that was chosen."""

    quantity: str
    points: tuple[Point, ...]
    behind: tuple[Point, ...]
    low: float
    high: float


class SetError(NamedTuple):
    """`errors` of a set's rows, predicted / measured - 1; means of their sizes, and of the one-constant model's."""

    name: str
    points: tuple[Point, ...]
    mean: float
    floor: float | None


def validated_info(rows: Iterable[Row], quantity: str = "time", chosen: str | None = None) -> ValidatedInfo:
    """ValueError for a quantity that is none, or where no row has it."""
    if quantity not in QUANTITIES:
        raise ValueError(f"the quantity must be one of {', '.join(QUANTITIES)}; it is {quantity}")
    points = points_of(rows, quantity)
    if not points:
        raise ValueError(f"no row has a measured {quantity}")
    values = [value for point in points for value in (point.measured, point.predicted)]
    front = [point for point in points if chosen in (None, point.row.set)]
    behind = [point for point in points if chosen not in (None, point.row.set)]
    return ValidatedInfo(quantity, tuple(front), tuple(behind), min(values) / ROOM, max(values) * ROOM)


def points_of(rows: Iterable[Row], quantity: str) -> list[Point]:
    """Of rows in which it was measured, and predicted."""
    name = "seconds" if quantity == "time" else "memory"
    points = []
    for row in rows:
        measured, predicted = (getattr(row, f"{word}_{name}") for word in ("measured", "predicted"))
        if measured and predicted:
            points.append(Point(row, theme.generation(row.device), measured, predicted))
    return points


def set_errors(rows: Sequence[Row], sets: Iterable[Mapping[str, Any]]) -> tuple[SetError, ...]:
    """Of sets with times, the best first."""
    found = []
    for each in sets:
        if each["time"]:
            of = points_of((row for row in rows if row.set == each["set"]), "time")
            found.append(SetError(each["set"], tuple(of), each["time"]["mape"], each["time"]["floor_mape"]))
    return tuple(sorted(found, key=lambda one: one.mean))


def plot_validated(info: ValidatedInfo, text: Text) -> go.Figure:
    """A scatter on two logarithmic axes of one scale; hollow are points that constants were fitted on."""
    import plotly.graph_objects as go

    low, high = info.low, info.high
    band = [low * (1 - BAND), high * (1 - BAND), high * (1 + BAND), low * (1 + BAND)]
    line = {"mode": "lines", "hoverinfo": "skip", "type": "scatter"}
    data: list[dict[str, Any]] = [
        line | {
            "x": [low, high, high, low], "y": band,
            "fill": "toself", "fillcolor": theme.LINE, "line": {"width": 0}, "opacity": 0.28,
            "name": text("figure.validated.band", band=f"{BAND:.0%}"), "showlegend": False,
        },
        line | {
            "x": [low, high], "y": [low, high], "line": {"width": 1.5, "color": theme.INK, "dash": "dot"},
            "name": text("figure.validated.equal"), "showlegend": False,
        },
    ]  # fmt: skip
    if info.behind:
        data.append(_points(info.behind, theme.LINE, "circle", info.quantity, text) | {"showlegend": False})
        data[-1]["marker"] |= {"size": 6, "opacity": 0.35}
    for look in theme.GENERATIONS:
        colour, _, _, shape = theme.GENERATIONS[look]
        name = text(f"figure.generation.{look}")
        for fitted in (False, True):
            points = [point for point in info.points if point.look == look and point.row.fitted == fitted]
            if points:
                shown = _points(points, colour, f"{shape}-open" if fitted else shape, info.quantity, text)
                shown["name"] = text("figure.validated.fitted", device=name) if fitted else name
                data.append(shown)
    axis = {
        "type": "log", "range": [math.log10(low), math.log10(high)], "showgrid": True, "gridcolor": theme.LINE,
        "griddash": "dot", "showline": True, "linecolor": theme.LINE, "ticks": "outside", "ticklen": 5,
        "tickcolor": theme.LINE, **_ticks(info),
    }  # fmt: skip
    layout = theme.layout(
        height=HEIGHT,
        showlegend=True,
        margin={"l": 92, "t": 16, "b": 64},
        hovermode="closest",
        hoverlabel=theme.HOVER_LINES,
        xaxis=axis | {"title": {"text": text(f"figure.validated.{info.quantity}.measured"), "standoff": 12}},
        yaxis=axis | {"title": {"text": text(f"figure.validated.{info.quantity}.predicted"), "standoff": 12}},
    )
    return go.Figure({"data": data, "layout": layout})


def plot_set_errors(found: Sequence[SetError], text: Text) -> go.Figure:
    """A line a set: each row a stroke at its error; to both sides of 0 the mean size of errors, and that of the
    one-constant model."""
    import plotly.graph_objects as go

    data: list[dict[str, Any]] = []
    for key, colour, width in (("floor", theme.LINE, 0.72), ("mean", theme.LOOKS["forward"].colour, 0.3)):
        name, known = text(f"figure.validated.{key}"), [one for one in found if getattr(one, key) is not None]
        sizes = [_percent(getattr(one, key)) for one in known]
        data.append({
            "type": "bar", "orientation": "h", "y": [one.name for one in known], "x": [2 * size for size in sizes],
            "base": [-size for size in sizes], "width": width, "marker": {"color": colour}, "name": name,
            "hovertext": [f"{one.name} · {name}: {size:.1f} %" for one, size in zip(known, sizes, strict=True)],
            "hoverinfo": "text",
        })  # fmt: skip
    points = [point for one in found for point in one.points]
    data.append(_points(points, theme.INK, "line-ns-open", "time", text) | {
        "x": [_percent(max(-FAR, min(FAR, point.error))) for point in points], "y": [point.row.set for point in points],
        "name": text("figure.validated.rows"),
    })  # fmt: skip
    data[-1]["marker"] |= {"size": 9, "opacity": 0.75, "line": {"width": 1.5, "color": theme.INK}}
    layout = theme.layout(
        height=56 + LINE_HEIGHT * len(found),
        showlegend=True,
        barmode="overlay",
        margin={"l": 190, "t": 16, "b": 40},
        hovermode="closest",
        hoverlabel=theme.HOVER_LINES,
        xaxis={
            "ticksuffix": " %", "nticks": 9, "showgrid": True, "gridcolor": theme.LINE, "griddash": "dot",
            "zeroline": True, "zerolinecolor": theme.INK, "zerolinewidth": 1,
        },
        yaxis={"autorange": "reversed", "type": "category", "ticks": "outside", "ticklen": 8, "tickcolor": CLEAR},
    )  # fmt: skip
    return go.Figure({"data": data, "layout": layout})


def _points(points: Sequence[Point], colour: str, shape: str, quantity: str, text: Text) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "x": [point.measured for point in points],
        "y": [point.predicted for point in points],
        "marker": {"color": colour, "symbol": shape, "size": 9, "opacity": 0.8, "line": {"width": 1, "color": colour}},
        "hovertext": [_hover(point, quantity, text) for point in points], "hoverinfo": "text",
    }  # fmt: skip


def _hover(point: Point, quantity: str, text: Text) -> str:
    """Which training, on what, measured and predicted, and who measured it."""
    row, show = point.row, show_seconds if quantity == "time" else show_bytes
    shown = {"measured": show(point.measured), "predicted": show(point.predicted), "error": show_error(point.error, 1)}
    lines = [
        f"<b>{html.escape(row.id)}</b>",
        html.escape(f"{row.model} · {row.layout}"),
        f"{row.devices} × {html.escape(row.device)}" + (f" · {html.escape(row.precision)}" if row.precision else ""),
        text("figure.validated.hover", **shown),
        *(f"<i>{html.escape(line)}</i>" for line in _wrapped(row.source)),
    ]
    return "<br>".join(lines)


def _wrapped(source: str, width: int = 72) -> list[str]:
    return textwrap.wrap(source, width, max_lines=3, placeholder=" …")


def _ticks(info: ValidatedInfo) -> dict[str, Any]:
    """1, 10, 100 of the unit, in words; what spans less has some between them."""
    show = show_seconds if info.quantity == "time" else show_bytes
    span = math.log10(info.high / info.low)
    steps = (1,) if span > 1.5 else (1, 2, 5) if span > 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    decades = range(math.floor(math.log10(info.low)), math.ceil(math.log10(info.high)) + 1)
    values = [step * 10.0**decade for decade in decades for step in steps]
    values = [value for value in values if info.low <= value <= info.high]
    return {"tickvals": values, "ticktext": [show(value) for value in values]}


def _percent(value: float) -> float:
    return round(100 * value, 2)
