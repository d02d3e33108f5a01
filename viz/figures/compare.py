"""A predicted and a measured step -> seconds by kind of op, side by side, each with the error of the prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.plan import KINDS
from engine.timeline import Timeline
from viz import theme
from viz.figures.words import Text, op_name, show_error, show_seconds, unit_of

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Pair(NamedTuple):
    """Mean seconds of a rank in one step; None where the timeline has no such op. `error`: predicted / measured - 1."""

    kind: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


class CompareInfo(NamedTuple):
    pairs: tuple[Pair, ...]  # in the order in which kinds are listed in engine.plan


def compare_info(predicted: Timeline, measured: Timeline) -> CompareInfo:
    """Timelines of one step or more. A receive lasts as long as it is waited for, so it is left to its send."""
    seconds = [_seconds(timeline) for timeline in (predicted, measured)]
    kinds = [kind for kind in KINDS if kind != "recv" and any(kind in of for of in seconds)]
    return CompareInfo(tuple(Pair(kind, *(of.get(kind) for of in seconds)) for kind in kinds))


def _seconds(timeline: Timeline) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    columns = (timeline[name].tolist() for name in ("kind", "start", "end"))
    weights = timeline.weights[timeline["rank"]].tolist()
    for kind, start, end, ranks in zip(*columns, weights, strict=True):
        total[kind] += (end - start) * ranks
    return {kind: value / timeline.world_size / max(1, len(timeline.steps)) for kind, value in total.items()}


def accuracy_info(accuracy: Mapping[str, Any]) -> CompareInfo:
    """What a run's result holds of its accuracy: the step, and its kinds of op, collectives without any waiting."""
    rows = (accuracy["step"], *accuracy["ops"])
    return CompareInfo(tuple(Pair(row["kind"], row["predicted"], row["measured"]) for row in rows))


def plot_compare(info: CompareInfo, text: Text) -> go.Figure:
    """A row a kind: hatched as long as predicted, solid as long as measured, and the error behind both."""
    import plotly.graph_objects as go

    most = max((value for pair in info.pairs for value in pair[1:] if value is not None), default=0.0)
    size, unit = unit_of(most)
    names = [_name(pair.kind, text) for pair in info.pairs]
    looks = [theme.LOOKS[theme.look_of(pair.kind)] for pair in info.pairs]
    data = []
    for source, name in (("predicted", text("figure.predicted")), ("measured", text("figure.measured"))):
        values = [getattr(pair, source) for pair in info.pairs]
        hatched = {"shape": "/", "fillmode": "replace", "size": 7, "solidity": 0.35} if source == "predicted" else {}
        errors = ["" if pair.error is None else show_error(pair.error) for pair in info.pairs]
        data.append({
            "type": "bar", "orientation": "h", "name": name,
            "x": [None if value is None else _round(value / size) for value in values], "y": names,
            "marker": {"color": [look.colour for look in looks], "pattern": hatched},
            "text": errors if source == "measured" else None, "textposition": "outside", "cliponaxis": False,
            "textfont": {"size": theme.FONT_SIZE - 1},
            "hovertext": [_hover(pair, text) for pair in info.pairs], "hoverinfo": "text",
        })  # fmt: skip
    layout = theme.layout(
        height=48 + 44 * max(1, len(names)),
        showlegend=True,
        barmode="group",
        bargap=0.3,
        bargroupgap=0.05,
        margin={"b": 36},
        xaxis={"rangemode": "tozero", "ticksuffix": f" {unit}", "showline": True, "linecolor": theme.LINE},
        # Unseen ticks keep the names clear of the bars.
        yaxis={
            "autorange": "reversed",
            "automargin": True,
            "type": "category",
            "ticks": "outside",
            "ticklen": 8,
            "tickcolor": "rgba(0,0,0,0)",
        },
    )
    return go.Figure({"data": data, "layout": layout})


def _name(kind: str, text: Text) -> str:
    return text("figure.compare.step") if kind == "step" else op_name(text, kind)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _hover(pair: Pair, text: Text) -> str:
    name = _name(pair.kind, text)
    if pair.error is not None:
        shown = {"predicted": show_seconds(pair.predicted), "measured": show_seconds(pair.measured)}
        return text("figure.compare.hover", op=name, error=show_error(pair.error), **shown)
    known = [
        (word, value) for word, value in zip(("predicted", "measured"), pair[1:], strict=True) if value is not None
    ]
    sources = {"predicted": text("figure.predicted"), "measured": text("figure.measured")}
    return " · ".join(text("figure.compare.only", op=name, source=sources[w], time=show_seconds(v)) for w, v in known)
