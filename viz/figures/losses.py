"""Losses of the steps so far, of one run or several -> their curves, and a point for each look at validation; of a run
that goes on -> a curve that grows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from viz import theme
from viz.figures.words import Text

if TYPE_CHECKING:
    import plotly.graph_objects as go

CURVES = (("forward", "solid"), ("gradient", "dash"), ("activation", "dot"), ("optimizer", "dashdot"))
POINTS = 1000  # of a curve; more would lie closer together than pixels
MARKS = 4  # on the axis of a growing curve, at most
SIZE = (1000, 100)  # of its own coordinates, which are drawn as large as there is room


class LossesInfo(NamedTuple):
    """Steps of the training, from 0, and the loss of each. `skipped` ones are left out: no loss, or not a number."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    skipped: int
    validation: tuple[tuple[int, float, float], ...] = ()  # after so many steps: loss, accuracy


def losses_info(
    losses: Sequence[float | None], first: int = 0, evaluations: Sequence[Mapping[str, Any]] = ()
) -> LossesInfo:
    """`first` is the step of the first loss, where a run resumes. Thinned to at most POINTS, both ends kept."""
    known = [(step, loss) for step, loss in enumerate(losses, first) if loss is not None and math.isfinite(loss)]
    count = min(len(known), POINTS)
    kept = [known[round(i * (len(known) - 1) / max(1, count - 1))] for i in range(count)]
    steps, values = zip(*kept, strict=True) if kept else ((), ())
    seen = [(one["step"], one["loss"], one["accuracy"]) for one in evaluations if one["loss"] is not None]
    return LossesInfo(steps, values, len(losses) - len(known), tuple(seen))


def result_losses(result: Mapping[str, Any]) -> LossesInfo:
    """Of a run's result, also of one that was written before results had all of this."""
    return losses_info(result["losses"], result.get("first_step", 0), result.get("evaluations", ()))


class Growing(NamedTuple):
    """A path, as SVG has it, on axes that stay where they are; and the axis's marks: how far below the top, in percent,
    and what each says."""

    path: str
    marks: tuple[tuple[float, str], ...]


def growing(losses: Sequence[float | None], total: int) -> Growing:
    """From the left edge, where the first of `total` steps is, to the right one, where the last is."""
    info = losses_info(losses)
    top = 1.05 * max(info.losses, default=1.0) or 1.0
    wide, high = SIZE
    across, up = wide / max(1, total - 1), high / top
    path = "L".join(
        f"{step * across:.1f},{high - loss * up:.2f}" for step, loss in zip(info.steps, info.losses, strict=True)
    )
    power = 10.0 ** math.floor(math.log10(top / MARKS))
    apart = next(power * nice for nice in (1, 2, 5, 10) if top / (power * nice) <= MARKS)
    marks = [i * apart for i in range(MARKS + 1) if i * apart <= top]
    return Growing("M" + path if path else "", tuple((round(100 * (1 - mark / top), 2), f"{mark:g}") for mark in marks))


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
    # The weights after so many steps are those of which the curve has the next training loss.
    drawn += [
        {
            "type": "scatter",
            "x": [step for step, _, _ in info.validation],
            "y": [float(f"{loss:.5g}") for _, loss, _ in info.validation],
            "customdata": [accuracy for _, _, accuracy in info.validation],
            "mode": "markers",
            "marker": {"size": 11, "symbol": "diamond", "color": theme.LOOKS[look].colour},
            "hovertemplate": text(
                "figure.losses.validation", step="%{x}", loss="%{y:.4g}", accuracy="%{customdata:.1%}"
            )
            + "<extra></extra>",
            "name": text("figure.losses.validation_loss") + (f" · {name}" if len(named) > 1 else ""),
        }
        for (name, info), (look, _) in zip(named.items(), itertools.cycle(CURVES), strict=False)
        if info.validation
    ]
    axis = {"showline": True, "linecolor": theme.LINE, "ticks": "outside", "tickcolor": theme.LINE, "automargin": True}
    last = max((max(info.steps, default=0) for info in named.values()), default=0)
    ticks = {"dtick": 1} if last <= 8 else {"nticks": 8}  # there are no half steps
    layout = theme.layout(
        height=280,
        showlegend=len(drawn) > 1,
        xaxis=axis | {"title": {"text": text("figure.losses.axis_step")}, "rangemode": "tozero"} | ticks,
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
