"""Losses of the steps so far, of one run or several -> the curves of the loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from viz import theme
from viz.figures.words import Text

if TYPE_CHECKING:
    import plotly.graph_objects as go

CURVES = (("forward", "solid"), ("gradient", "dash"), ("activation", "dot"), ("optimizer", "dashdot"))
POINTS = 1000  # of a curve; more would lie closer together than pixels


class LossesInfo(NamedTuple):
    """Steps from 0, and the loss of each. `skipped` steps are left out: their loss is missing or not a number."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    skipped: int


def losses_info(losses: Sequence[float | None]) -> LossesInfo:
    """Thinned to at most POINTS, first and last step kept."""
    known = [(step, loss) for step, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    count = min(len(known), POINTS)
    kept = [known[round(i * (len(known) - 1) / max(1, count - 1))] for i in range(count)]
    steps, values = zip(*kept, strict=True) if kept else ((), ())
    return LossesInfo(steps, values, len(losses) - len(known))


def plot_losses(curves: LossesInfo | Mapping[str, LossesInfo], text: Text) -> go.Figure:
    """One curve, or several by name: each with its colour and its dashes."""
    import plotly.graph_objects as go

    named = {text("figure.losses.axis_loss"): curves} if isinstance(curves, LossesInfo) else curves
    drawn = [
        {
            "type": "scatter",
            "x": info.steps,
            "y": [float(f"{loss:.5g}") for loss in info.losses],
            "mode": "lines+markers" if len(info.steps) <= 60 else "lines",
            "line": {"color": theme.LOOKS[look].colour, "width": 3, "dash": dash},
            "marker": {"size": 7},
            "hovertemplate": text("figure.losses.hover", step="%{x}", loss="%{y:.4g}") + "<extra></extra>",
            "name": name,
        }
        for (name, info), (look, dash) in zip(named.items(), itertools.cycle(CURVES), strict=False)
    ]
    axis = {"showline": True, "linecolor": theme.LINE, "ticks": "outside", "tickcolor": theme.LINE, "automargin": True}
    layout = theme.layout(
        height=280,
        showlegend=len(named) > 1,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        xaxis=axis | {"title": {"text": text("figure.losses.axis_step")}, "rangemode": "tozero", "nticks": 8},
        yaxis=axis | {"title": {"text": text("figure.losses.axis_loss")}, "nticks": 6},
    )
    if not any(info.steps for info in named.values()):
        note = {
            "text": text("figure.losses.empty"),
            "showarrow": False,
            "xref": "paper",
            "yref": "paper",
            "x": 0.5,
            "y": 0.5,
        }
        layout |= {"annotations": [note], "xaxis": {"visible": False}, "yaxis": {"visible": False}}
    return go.Figure({"data": drawn, "layout": layout})
