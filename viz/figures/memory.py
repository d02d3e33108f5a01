"""Bytes by category, planned and maybe measured -> a stacked bar for each rank; equal ranks share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from engine.cost.held import OVER_TIME
from engine.cost.memory import CATEGORIES
from viz import theme
from viz.figures.bars import bars_layout
from viz.figures.words import Text, ranks_alike, show_bytes, size_unit

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROWS = 12  # bars that fit; more ranks that differ are left out, and the figure says so
# What fills the memory looks like what computes it, or moves.
LOOKS = {
    "parameters": "weights",
    "gradients": "gradient",
    "optimizer": "optimizer",
    "activations": "activation",
    "buffers": "other",
}
HATCHED = {"shape": "/", "fgopacity": 0.45, "size": 8, "solidity": 0.25}


class Row(NamedTuple):
    """Ranks that hold the same. `measured` is None where there is none."""

    first: int
    last: int
    planned: Mapping[str, int]
    measured: Mapping[str, int] | None


class MemoryInfo(NamedTuple):
    rows: tuple[Row, ...]
    categories: tuple[str, ...]  # those of which any rank holds something, in the order of the figure over time
    hidden: int  # ranks that are not drawn

    @property
    def ranks(self) -> int:
        return (self.rows[-1].last + 1 if self.rows else 0) + self.hidden


def memory_info(planned: Sequence[Mapping[str, int]], measured: Sequence[Mapping[str, int]] | None) -> MemoryInfo:
    """One entry a rank."""
    pairs = list(zip(planned, measured or [None] * len(planned), strict=True))
    rows: list[Row] = []
    rank = 0
    for (plan, real), alike in groupby(pairs):
        count = len(list(alike))
        rows.append(Row(rank, rank + count - 1, plan, real))
        rank += count
    held = [each for pair in pairs for each in pair if each]
    categories = tuple(name for name in OVER_TIME if name in CATEGORIES and any(each[name] for each in held))
    hidden = rank - rows[ROWS].first if len(rows) > ROWS else 0
    return MemoryInfo(tuple(rows[:ROWS]), categories, hidden)


def plot_memory(info: MemoryInfo, text: Text) -> go.Figure:
    """Planned hatched, measured solid below it, one colour a category."""
    import plotly.graph_objects as go

    both = any(row.measured for row in info.rows)
    sources = [("predicted", "planned", -0.21 if both else 0.0)] + ([("measured", "measured", 0.21)] if both else [])
    thick = 0.36 if both else 0.6
    size, unit = size_unit(max((sum(row.planned.values()) for row in info.rows), default=0))
    data = []
    for source, field, shift in sources:
        below = [0] * len(info.rows)
        for category in info.categories:
            held = [(getattr(row, field) or {}).get(category, 0) for row in info.rows]
            colour, ink, *_ = theme.LOOKS[LOOKS[category]]
            name = text(f"figure.memory.{category}")
            data.append({
                "type": "bar", "orientation": "h", "name": name, "legendgroup": category,
                "showlegend": source == sources[-1][0],
                "x": [_round(value / size) for value in held], "base": [_round(value / size) for value in below],
                "y": [i + shift for i in range(len(info.rows))], "width": thick,
                "marker": {
                    "color": colour, "line": {"color": theme.GROUND, "width": 1},
                    **({"pattern": HATCHED | {"bgcolor": colour, "fgcolor": ink}} if source == "predicted" else {}),
                },
                "hovertext": [_hover(row, category, text) for row in info.rows], "hoverinfo": "text",
            })  # fmt: skip
            below = [a + b for a, b in zip(below, held, strict=True)]
    names = [_ranks(row, info.ranks, text) for row in info.rows]
    numbers = {"drawn": f"{info.ranks - info.hidden:,}", "total": f"{info.ranks:,}"}
    note = text("figure.not_drawn", **numbers) if info.hidden else ""
    layout = bars_layout(names, thick=64 if both else 44, unit=unit, note=note, barmode="overlay", rangemode="tozero")
    return go.Figure({"data": data, "layout": layout})


def _ranks(row: Row, total: int, text: Text) -> str:
    if row.first == row.last or row.last - row.first + 1 == total:
        return ranks_alike(text, row.first, row.last - row.first + 1, total)
    return text("figure.ranks", ranks=f"{row.first}–{row.last}")


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _hover(row: Row, category: str, text: Text) -> str:
    values = {"category": text(f"figure.memory.{category}"), "predicted": show_bytes(row.planned[category])}
    if row.measured is None:
        return text("figure.memory.planned", **values)
    return text("figure.memory.hover", **values, measured=show_bytes(row.measured[category]))
