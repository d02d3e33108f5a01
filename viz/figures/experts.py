"""The tokens that a run's routers gave to each expert -> a bar an expert, block by block, with a line where all would
be if all got the same: that is what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from viz import theme
from viz.figures.words import Text

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAX_BARS = 64  # as many blocks are drawn as have no more experts together; at least one
MAX_LABELS = 24  # bars that all have their number above them; of more, only those of experts without a token


class ExpertsInfo(NamedTuple):
    """One entry an expert, those of the first block first. Tokens of a step: `mean` of all steps, and in the `last`."""

    blocks: tuple[str, ...]
    experts: tuple[int, ...]
    mean: tuple[float, ...]
    last: tuple[int, ...]
    even: float
    hidden: int  # blocks that are not drawn


def experts_info(tokens: Mapping[str, Any]) -> ExpertsInfo:
    """`tokens`: `expert_tokens` of a result."""
    count = len(next(iter(tokens["mean"].values())))
    drawn = list(tokens["mean"])[: max(1, MAX_BARS // count)]
    return ExpertsInfo(
        tuple(block for block in drawn for _ in range(count)),
        tuple(range(count)) * len(drawn),
        tuple(value for block in drawn for value in tokens["mean"][block]),
        tuple(value for block in drawn for value in tokens["last"][block]),
        tokens["even"],
        len(tokens["mean"]) - len(drawn),
    )


def plot_experts(info: ExpertsInfo, text: Text) -> go.Figure:
    import plotly.graph_objects as go

    look = theme.LOOKS["tokens"]
    bars = {
        "type": "bar",
        "x": [info.blocks, [str(expert) for expert in info.experts]],
        "y": [_round(value) for value in info.mean],
        "marker": {"color": look.colour},
        "text": [_label(value) if len(info.mean) <= MAX_LABELS or not value else "" for value in info.mean],
        "textposition": "outside",
        "constraintext": "none",
        "cliponaxis": False,
        "hovertext": [
            text("figure.experts.hover", block=block, expert=expert, mean=_round(mean), last=last)
            for block, expert, mean, last in zip(info.blocks, info.experts, info.mean, info.last, strict=True)
        ],
        "hoverinfo": "text",
    }
    axis = {"showline": True, "linecolor": theme.LINE, "automargin": True}
    blocks = {"type": "multicategory", "tickangle": 0, "dividercolor": theme.LINE}
    line = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": info.even, "y1": info.even,
        "line": {"color": theme.INK, "width": 2, "dash": "dash"},
    }  # fmt: skip
    notes = [_note(text("figure.experts.even", tokens=f"{info.even:.4g}"), y=info.even, yref="y", yanchor="bottom")]
    if info.hidden:
        total = info.hidden + len(set(info.blocks))
        more = text("figure.experts.not_drawn", drawn=total - info.hidden, total=total)
        notes.append(_note(more, y=1, yref="paper", yanchor="top"))
    layout = theme.layout(
        height=300,
        showlegend=False,
        bargap=0.25,
        margin={"r": 150},
        xaxis=axis | blocks | {"title": {"text": text("figure.experts.axis")}},
        yaxis=axis | {"title": {"text": text("figure.experts.tokens")}, "rangemode": "tozero", "nticks": 5},
        shapes=[line],
        annotations=notes,
    )
    return go.Figure({"data": [bars], "layout": layout})


def _label(tokens: float) -> str:
    return f"{tokens:.0f}" if tokens >= 9.5 or not tokens else f"{tokens:.1f}"


def _note(words: str, **place: Any) -> dict[str, Any]:
    """To the right of the bars."""
    return {"text": words, "showarrow": False, "xref": "paper", "x": 1.01, "xanchor": "left", "align": "left"} | place


def _round(value: float) -> float:
    return float(f"{value:.4g}")
