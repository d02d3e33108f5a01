"""Seconds that ranks spent in collectives and messages -> a bar a rank: waiting for the last to come, transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.analysis.stragglers import Inside
from viz import theme
from viz.figures.bars import bars_layout, idle_marker
from viz.figures.words import Text, show_seconds, unit_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROWS = 32  # bars that fit
LOOKS = {"waiting": "straggler", "transfer": "communication"}


def plot_late(inside: Sequence[Inside], text: Text) -> go.Figure:
    """Where ranks are more than fit, those that waited least and most: the late are among the former."""
    import plotly.graph_objects as go

    drawn = list(inside)
    if len(drawn) > ROWS:
        order = sorted(drawn, key=lambda one: one.waiting)
        drawn = sorted(order[: ROWS // 2] + order[-ROWS // 2 :])
    size, unit = unit_of(max(one.waiting + one.transfer for one in drawn))
    places, data = list(range(len(drawn))), []
    for part, cause in LOOKS.items():
        look, name = theme.WAITS[cause], text(f"figure.late.{part}")
        seconds = [getattr(one, part) for one in drawn]
        data.append({
            "type": "bar", "orientation": "h", "name": name, "width": 0.66, "y": places,
            "x": [float(f"{value / size:.5g}") for value in seconds],
            "marker": idle_marker(look),
            "hovertext": [
                f"{text('figure.rank', rank=one.rank)} · {name}: {show_seconds(value)}"
                for one, value in zip(drawn, seconds, strict=True)
            ],
            "hoverinfo": "text",
        })  # fmt: skip
    note = text("figure.not_drawn", drawn=len(drawn), total=len(inside)) if len(drawn) < len(inside) else ""
    names = [text("figure.rank", rank=one.rank) for one in drawn]
    layout = bars_layout(names, thick=28, unit=unit, note=note, rangemode="tozero")
    return go.Figure({"data": data, "layout": layout})
