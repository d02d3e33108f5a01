"""Steps of bytes of some ranks -> what they hold over a step, stacked by category, below the line of their memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.cost.held import OVER_TIME, OverTime
from engine.simulation import Simulation
from viz import theme
from viz.figures.words import Text, ranks_alike, show_bytes, size_unit, unit_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

RANKS = 3  # that are drawn at most: they stand for all of their role
POINTS = 400  # of one rank; where there are more, of each part of the step the moment at which most is held
HEIGHT = 190
LOOKS = {
    "parameters": "weights",
    "optimizer": "optimizer",
    "gradients": "gradient",
    "gathered": "batch",
    "buffers": "other",
    "activations": "activation",
    "logits": "tokens",
    "at_work": "backward",
}


class RankOverTime(NamedTuple):
    rank: int
    stands_for: int  # ranks that do the same
    held: OverTime

    @property
    def peak(self) -> tuple[float, int]:
        """Seconds and bytes at which most is held."""
        at = int(self.held.total.argmax())
        return float(self.held.seconds[at]), int(self.held.total[at])


class OverTimeInfo(NamedTuple):
    ranks: tuple[RankOverTime, ...]  # the fullest first
    capacity: int | None
    seconds: float
    total: int  # ranks, drawn or not


def over_time_info(simulation: Simulation, capacity: int | None) -> OverTimeInfo:
    """The fullest rank, the emptiest, and one between them, one a role: it costs what roles cost."""
    peaks = simulation.peak_memory
    order = sorted(range(len(peaks)), key=lambda role: (-peaks[role], role))
    several = [role for i, role in enumerate(order) if i == 0 or peaks[role] < peaks[order[i - 1]]]
    chosen = dict.fromkeys((several[0], several[len(several) // 2], several[-1]))
    graph = simulation.graph
    ranks = tuple(
        RankOverTime(int(graph.representative[role]), int(graph.num_ranks[role]), simulation.memory_over_time(role))
        for role in [*chosen][:RANKS]
    )
    return OverTimeInfo(ranks, capacity, simulation.makespan, sum(graph.num_ranks))


def thinned(held: OverTime, points: int = POINTS) -> OverTime:
    """At most about so many moments, the fullest of each part of the step, so that no peak is lost."""
    if len(held.seconds) <= points:
        return held
    total = held.total
    bounds = np.linspace(0, len(total), points + 1).astype(np.int64)
    kept = np.unique([0, *(a + int(total[a:b].argmax()) for a, b in itertools.pairwise(bounds))])
    return OverTime(held.seconds[kept], {name: values[kept] for name, values in held.bytes.items()})


def plot_over_time(info: OverTimeInfo, text: Text) -> go.Figure:
    import plotly.graph_objects as go

    unit, unit_name = unit_of(info.seconds)
    most = max(rank.peak[1] for rank in info.ranks)
    # A capacity that is far above would press everything down: then it is told, not drawn.
    shown = info.capacity is not None and info.capacity <= 4 * most
    size, size_name = size_unit(max(most, info.capacity) if shown else most)
    # Room for a peak's words, below the rank's name.
    top = max(1.4 * most, 1.12 * info.capacity if shown else 0) / size
    gap, number = 0.1, len(info.ranks)
    each = (1 - gap * (number - 1)) / number
    data, axes, notes, shapes = [], {}, [], []
    for row, rank in enumerate(info.ranks):
        axis = "" if row == 0 else str(row + 1)
        low = 1 - (row + 1) * each - row * gap
        held = thinned(rank.held)
        seconds = [_round(value / unit) for value in held.seconds]
        used = [name for name in OVER_TIME if held.bytes[name].any()]
        for name in used:
            colour, *_ = theme.LOOKS[LOOKS[name]]
            data.append({
                "type": "scatter", "mode": "lines", "stackgroup": f"held{row}", "name": text(f"figure.memory.{name}"),
                "legendgroup": name, "showlegend": not any(trace["legendgroup"] == name for trace in data),
                "x": seconds, "y": [_round(value / size) for value in held.bytes[name]], "yaxis": f"y{axis}",
                "line": {"shape": "hv", "width": 0.5, "color": colour}, "fillcolor": colour,
                "hovertemplate": f"{text(f'figure.memory.{name}')}: %{{y:.4g}} {size_name}<extra></extra>",
            })  # fmt: skip
        axes[f"yaxis{axis}"] = {
            "domain": [max(0.0, low), low + each], "range": [0, top], "ticksuffix": f" {size_name}", "nticks": 4,
            "automargin": True, "showline": True, "linecolor": theme.LINE,
        }  # fmt: skip
        if shown:
            line = {"color": theme.LOOKS["gradient"][0], "width": 2, "dash": "dash"}
            at = info.capacity / size
            where = {"yref": f"y{axis}", "xref": "paper", "x0": 0, "x1": 1}
            shapes.append({"type": "line", "y0": at, "y1": at, "line": line, **where})
        moment, peak = rank.peak
        words = ranks_alike(text, rank.rank, rank.stands_for, info.total)
        told = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "xref": "paper", "yref": "paper"}
        notes.append({"text": words, "x": 0, "y": low + each, **told})
        notes.append({
            "text": text("figure.memory.peak", size=show_bytes(peak)), "x": _round(moment / unit), "y": peak / size,
            "xref": "x", "yref": f"y{axis}", "showarrow": True, "arrowhead": 2, "arrowcolor": theme.INK,
            "ax": 0, "ay": -18,
        })  # fmt: skip
    x = {"range": [0, info.seconds / unit], "ticksuffix": f" {unit_name}", "anchor": f"y{axis}"}
    x |= {"ticks": "outside", "ticklen": 8, "tickcolor": "rgba(0,0,0,0)"}  # clear of the lowest size
    layout = theme.layout(
        height=42 + HEIGHT * number,
        showlegend=True,
        margin={"t": 32, "b": 36},
        hovermode="x unified",
        xaxis=x,
        shapes=shapes,
        annotations=notes,
        **axes,
    )
    return go.Figure({"data": data, "layout": layout})


def _round(value: float) -> float:
    return float(f"{value:.5g}")
