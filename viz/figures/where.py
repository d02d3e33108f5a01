"""A step that ran -> where each rank's time went: a bar a rank, as long as the step: what it computed, why it idled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.analysis.idle import CAUSES, Idle, seconds_by_cause
from engine.analysis.ran import Ran
from engine.plan import COMPUTE
from viz import theme
from viz.figures.bars import bars_layout, idle_marker
from viz.figures.words import Text, op_name, ranks_alike, show_seconds, unit_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROWS = 12  # bars that fit


class WhereRow(NamedTuple):
    """Seconds of one rank, an entry a column; `ranks`: how many play the same role."""

    rank: int
    ranks: int
    seconds: tuple[float, ...]


class WhereInfo(NamedTuple):
    """`columns`: kinds of op that compute, then causes of idle time; those that occur. `makespan` in seconds."""

    rows: tuple[WhereRow, ...]
    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    makespan: float
    total: int  # ranks, drawn or not


def where_info(ran: Ran, found: Idle) -> WhereInfo:
    """`found`: all pieces of its gaps."""
    roles, plan = len(ran.graph.plan.programs), ran.graph.plan
    place = {kind: i for i, kind in enumerate(COMPUTE)}
    kind = np.array([place.get(op.kind, -1) for op in ran.graph.templates], dtype=np.int64)[ran.graph.which]
    mine = kind >= 0
    computing = np.bincount(
        ran.role[mine] * len(COMPUTE) + kind[mine],
        weights=(ran.end - ran.start)[mine],
        minlength=roles * len(COMPUTE),
    ).reshape(roles, len(COMPUTE))
    idle = seconds_by_cause(ran, found)
    kinds = [i for i in range(len(COMPUTE)) if computing[:, i].any()]
    causes = [i for i in range(len(CAUSES)) if idle[:, i].any()]
    rows = [
        WhereRow(rank, int(ran.ranks[role]), (*computing[role, kinds].tolist(), *idle[role, causes].tolist()))
        for role, rank in enumerate(ran.graph.representative[:ROWS])
    ]
    names = tuple(COMPUTE[i] for i in kinds), tuple(CAUSES[i] for i in causes)
    return WhereInfo(tuple(rows), *names, ran.makespan, plan.world_size)


def plot_where(info: WhereInfo, text: Text) -> go.Figure:
    """Compute solid, idle time patterned, in the order of the legend."""
    import plotly.graph_objects as go

    size, unit = unit_of(info.makespan)
    places = list(range(len(info.rows)))
    looks = [(op_name(text, kind), theme.LOOKS[theme.look_of(kind)], False) for kind in info.kinds]
    looks += [(text(f"figure.cause.{cause}"), theme.WAITS[cause], True) for cause in info.causes]
    data = []
    for column, (name, look, idle) in enumerate(looks):
        seconds = [row.seconds[column] for row in info.rows]
        work = {"color": look.colour, "line": {"color": theme.GROUND, "width": 1}}
        marker = idle_marker(look) if idle else work
        data.append({
            "type": "bar", "orientation": "h", "name": name, "width": 0.66, "marker": marker,
            "x": [_round(value / size) for value in seconds], "y": places,
            "hovertext": [_hover(row, name, value, info, text) for row, value in zip(info.rows, seconds, strict=True)],
            "hoverinfo": "text",
        })  # fmt: skip
    drawn = sum(row.ranks for row in info.rows)
    note = text("figure.not_drawn", drawn=f"{drawn:,}", total=f"{info.total:,}") if drawn < info.total else ""
    names = [ranks_alike(text, row.rank, row.ranks, info.total) for row in info.rows]
    longest = _round(info.makespan / size) or 1
    layout = bars_layout(names, thick=40, unit=unit, note=note, range=[0, longest])
    return go.Figure({"data": data, "layout": layout})


def _hover(row: WhereRow, name: str, seconds: float, info: WhereInfo, text: Text) -> str:
    ranks = ranks_alike(text, row.rank, row.ranks, info.total)
    share = f"{100 * seconds / (info.makespan or 1):.1f} %"
    return text("figure.where.hover", ranks=ranks, what=name, time=show_seconds(seconds), share=share)


def _round(value: float) -> float:
    return float(f"{value:.5g}")
