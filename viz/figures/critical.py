"""A critical path -> its ops' bars in the timeline, outlined one after another and joined by a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.analysis.critical_path import UNEXPLAINED, Piece
from engine.analysis.ran import Ran
from viz import theme
from viz.figures.rows import Bar

MOST = 3000  # ops of the path that are outlined
Key = tuple[int, str, str, float]  # rank, lane, kind, start


def path_keys(ran: Ran, path: Sequence[Piece]) -> tuple[Key, ...]:
    """What tells the spans of the path from others, in order. Ops that take no time are no part of it."""
    nodes = [piece.node for piece in path if piece.kind not in UNEXPLAINED and piece.duration > 0][:MOST]
    lanes = [ran.graph.lanes[ran.graph.which[node]][1] for node in nodes]
    return tuple((ran.rank(n), lane, ran.kind(n), float(ran.start[n])) for n, lane in zip(nodes, lanes, strict=True))


def bars_of(keys: Iterable[Key], bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """Those that are drawn, in the order of the path."""
    place = {(b.span.rank, b.span.lane, b.span.kind, b.span.start): b for b in bars if not b.behind}
    return tuple(place[key] for key in keys if key in place)


def outline(bars: Sequence[Bar], unit: float, digits: int, name: str) -> dict[str, Any]:
    """One trace: round every bar, and from its end to the beginning of the next."""
    x: list[float | None] = []
    y: list[float | None] = []
    for i, bar in enumerate(bars):
        left, right = (round(time / unit, digits) for time in (bar.span.start, bar.span.end))
        y0, y1, middle = (round(value, 1) for value in (bar.y0 - 1, bar.y1 + 1, (bar.y0 + bar.y1) / 2))
        x += [left, right, right, left, left, None]
        y += [y0, y0, y1, y1, y0, None]
        if i + 1 < len(bars) and bars[i + 1].row != bar.row:
            following = bars[i + 1]
            x += [right, round(following.span.start / unit, digits), None]
            y += [middle, round((following.y0 + following.y1) / 2, 1), None]
    return {
        "type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "name": name, "showlegend": False,
        "hoverinfo": "skip", "x": x, "y": y, "line": {"color": theme.INK, "width": 2.5},
    }  # fmt: skip
