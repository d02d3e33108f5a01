"""A picture's info -> what stands still of it: devices, links, timeline and axis, as a Plotly figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from viz import theme
from viz.figures import words
from viz.figures.critical import outline
from viz.figures.picture import PictureInfo, digits_of, look_of, place_of, said
from viz.figures.places import WIDTH, Box, Cell, Places, segment
from viz.figures.rows import Bar

if TYPE_CHECKING:
    import plotly.graph_objects as go

TICK = 0.0012  # of the clock: a bar is at least so wide, so that an op that takes no time is still seen
HATCH = 9  # pixels between two lines of a layer that is not trained
MIN_SLOT = 5  # pixels: where an expert has less, those that are held are drawn as one
RADIUS, FLOOR = 12, 30  # of a box's corners; pixels between the devices and the timeline


def plot_picture(info: PictureInfo, text: words.Text) -> go.Figure:
    """The devices, the timeline and its axis; with labels and hover, for where there is no player."""
    import plotly.graph_objects as go

    data = [*still_traces(info, text), _bar_texts(info, text)]
    layout = still_layout(info, text)
    layout["annotations"] = [
        {
            "x": box.x0 + 10, "y": box.y1 - 17, "xanchor": "left", "showarrow": False, "xref": "x", "yref": "y",
            "text": words.rank_and_stage(text, box.rank, ()),
        }
        for box in info.places.boxes
    ]  # fmt: skip
    return go.Figure({"data": data, "layout": layout})


def still_traces(info: PictureInfo, text: words.Text) -> list[dict[str, Any]]:
    data = [*_frames(info.places), _devices(info.places)]
    for look in _looks(info):
        bars = [bar for bar in info.rows.bars if look_of(bar) == look]
        colour, ink, pattern, _ = theme.LOOKS[look]
        data.append(
            _shape(*_rectangles(info, bars), colour) | {"name": words.look_name(text, look), "showlegend": True}
        )
        if pattern:
            data[-1]["fillpattern"] = {
                "shape": pattern, "bgcolor": colour, "fgcolor": ink, "fgopacity": 0.28, "size": 7, "solidity": 0.22,
            }  # fmt: skip
    predicted = [bar for bar in info.rows.bars if info.view == "predicted" or bar.behind]
    if not info.rows.bars:  # Plotly leaves out axes that no trace is on
        data.append(_shape([0], [0], theme.GROUND))
    if predicted:  # a veil that leaves a rim: outlined is predicted, solid is measured
        data.append(_shape(*_rectangles(info, predicted, rim=True), theme.GROUND) | {"opacity": 0.62})
    if later := info.later_stages:
        x, y = _rectangles(info, [bar._replace(y0=bar.y1 - 4.5, y1=bar.y1 - 2.5) for bar in later])
        data.append(_shape(x, y, theme.INK if info.view == "predicted" else theme.GROUND) | {"name": "later stages"})
    if info.critical:
        data.append(outline(info.critical, info.unit[0], digits_of(info), text("figure.critical")))
    return data


def _frames(where: Places) -> list[dict[str, Any]]:
    """Round devices that belong together; not filled, since the links lie beneath the figure."""
    if not where.frames:
        return []
    x: list[float | None] = []
    y: list[float | None] = []
    for x0, x1, y0, y1 in where.frames:
        x += [*(round(v, 1) for v in (x0, x0, x1, x1, x0)), None]
        y += [*(round(v, 1) for v in (y0, y1, y1, y0, y0)), None]
    line = {"width": 1, "color": theme.LINE, "dash": "dot"}
    return [_shape(x, y, theme.GROUND, "") | {"line": line, "fill": "none", "name": "frames"}]


def _looks(info: PictureInfo) -> list[str]:
    """The looks that occur, in the order of the palette."""
    present = {look_of(bar) for bar in info.rows.bars}
    return [look for look in theme.LOOKS if look in present]


def _shape(x: list, y: list, colour: str, axis: str = "2") -> dict[str, Any]:
    return {
        "type": "scatter", "x": x, "y": y, "xaxis": f"x{axis}", "yaxis": f"y{axis}", "mode": "lines", "fill": "toself",
        "fillcolor": colour, "line": {"width": 0, "color": colour}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _rectangles(info: PictureInfo, bars: Iterable[Bar], *, rim: bool = False) -> tuple[list, list]:
    """One path for all bars, each at least a tick wide; with `rim`, a little smaller on all sides."""
    digits, unit = digits_of(info), info.unit[0]
    thin = TICK * info.end
    x: list[float | None] = []
    y: list[float | None] = []
    for bar in bars:
        start, end = bar.span.start, max(bar.span.end, bar.span.start + thin)
        y0, y1 = round(bar.y0, 1), round(bar.y1, 1)
        if rim:
            if end - start < 4 * thin:
                continue
            start, end, y0, y1 = start + thin, end - thin, round(y0 + 1.4, 1), round(y1 - 1.4, 1)
        elif end - start > 6 * thin:  # what follows it at once is seen to be another
            end -= thin / 2
        left, right = round(start / unit, digits), round(end / unit, digits)
        x += (left, right, right, left, None)
        y += (y0, y0, y1, y1, None)
    return x, y


def _devices(where: Places) -> dict[str, Any]:
    """All boxes, and in them the cells: run round the other way, a cell is a hole in its box."""
    x: list[float | None] = []
    y: list[float | None] = []
    for box in where.boxes:
        for cx, cy, turn in ((box.x1, box.y1, 0), (box.x0, box.y1, 1), (box.x0, box.y0, 2), (box.x1, box.y0, 3)):
            mx = cx + RADIUS * (1 if turn in (1, 2) else -1)
            my = cy + RADIUS * (1 if turn in (2, 3) else -1)
            for i in range(5):
                angle = math.pi / 2 * (turn + i / 4)
                x.append(round(mx + RADIUS * math.cos(angle), 1))
                y.append(round(my + RADIUS * math.sin(angle), 1))
        x += (x[-20], None)
        y += (y[-20], None)
        for cell in box.cells:
            corners = [
                (cell.x0, cell.y0),
                (cell.x0, cell.y1),
                (cell.x1, cell.y1),
                (cell.x1, cell.y0),
                (cell.x0, cell.y0),
            ]
            x += [*(round(px, 1) for px, _ in corners), None]
            y += [*(round(py, 1) for _, py in corners), None]
    return _shape(x, y, theme.SURFACE, "") | {"line": {"width": 1.5, "color": theme.LINE}, "name": "devices"}


def still_layout(info: PictureInfo, text: words.Text) -> dict[str, Any]:
    """Two pairs of axes, the devices' above the timeline's; both count pixels upwards and downwards."""
    where, lines = info.places, info.rows
    below = max(lines.height, 1.0)
    inner = where.height + FLOOR + below
    top, bottom = 1 - where.height / inner, below / inner
    still = {"visible": False, "fixedrange": True}
    base = theme.layout(
        xaxis={"range": [0, WIDTH], **still, "anchor": "y"},
        yaxis={"range": [0, where.height], **still, "domain": [top, 1], "anchor": "x"},
    )
    margin = base["margin"]
    return base | {
        "height": round(inner + margin["t"] + margin["b"]),
        "showlegend": False,
        "hovermode": "closest",
        "hoverdistance": -1,
        "dragmode": "zoom",
        "xaxis2": base["xaxis"] | {
            "visible": True, "fixedrange": False, "range": [0, round(info.end / info.unit[0], 6)], "anchor": "y2",
            "ticksuffix": " " + info.unit[1], "ticks": "outside", "ticklen": 5, "tickcolor": theme.LINE,
            "showline": True, "linecolor": theme.LINE,
        },
        "yaxis2": base["yaxis"] | {
            "visible": True, "range": [below, 0], "domain": [0, bottom], "anchor": "x2",
            "tickvals": [round((row.y0 + row.y1) / 2, 1) for row in lines.rows],
            "ticklabelstandoff": 8,
            "ticktext": [text("figure.rank", rank=row.rank) for row in lines.rows],
        },
        "shapes": [*_links(where), *(shape for box in where.boxes for shape in _inside(box, where))],
    }  # fmt: skip


def _links(where: Places) -> list[dict[str, Any]]:
    lines = []
    for source, target in where.links:
        x0, y0, x1, y1 = (round(v, 1) for v in segment(where, source, target))
        lines.append(
            {
                "type": "line",
                "x0": x0,
                "y0": y0,
                "x1": x1,
                "y1": y1,
                "line": {"width": 1.5, "color": theme.LINE},
                "layer": "below",
            }
        )
    return lines


def _inside(box: Box, where: Places) -> list[dict[str, Any]]:
    """The layers that a device holds, in the colours of their stages, and its share of the fullest device's memory."""
    shapes = []
    for cell in (cell for cell in box.cells if cell.held):
        colour = theme.FROZEN if cell.frozen else theme.stage_colour(cell.stage)
        shapes.append(_block(*cell.kept, cell.y0, cell.y1, colour))
        shapes += [*_slots(cell), *_hatching(cell)]
    most = max(other.memory for other in where.boxes)
    x0, x1, y = gauge(box)
    shapes.append(_block(x0, x1, y - 2.5, y + 2.5, theme.LINE))
    if most:
        shapes.append(_block(x0, x0 + (x1 - x0) * box.memory / most, y - 2.5, y + 2.5, theme.INK))
    return shapes


def _slots(cell: Cell) -> list[dict[str, Any]]:
    """Lines between one expert and the next: those that the device holds, and those that it does not."""
    first, end, count = cell.experts
    step = (cell.x1 - cell.x0) / max(count, 1)
    if step < MIN_SLOT:
        return []
    edges = [(cell.x0 + i * step, theme.GROUND if first < i < end else theme.LINE) for i in range(1, count)]
    return [_block(x - 0.7, x + 0.7, cell.y0, cell.y1, colour) for x, colour in edges]


def _hatching(cell: Cell) -> list[dict[str, Any]]:
    """Lines that rise to the right through a layer that is not trained."""
    (x0, x1), y0, y1 = cell.kept, cell.y0, cell.y1
    high = y1 - y0
    if not cell.frozen or x1 - x0 < HATCH:
        return []
    ways = []
    for i in range(1, math.ceil((x1 - x0 + high) / HATCH)):
        foot = x0 - high + i * HATCH
        left, right = max(foot, x0), min(foot + high, x1)
        ways.append(f"M{left:.1f},{y0 + left - foot:.1f}L{right:.1f},{y0 + right - foot:.1f}")
    return [{"type": "path", "path": "".join(ways), "line": {"width": 1.5, "color": theme.GROUND}, "opacity": 0.6}]


def gauge(box: Box) -> tuple[float, float, float]:
    """x0, x1 and the middle y of a device's memory gauge; its number stands to the right."""
    return box.x0 + 10, box.x0 + 10 + 0.45 * (box.x1 - box.x0), box.y0 + 13


def _block(x0: float, x1: float, y0: float, y1: float, colour: str) -> dict[str, Any]:
    corners = {name: round(value, 1) for name, value in (("x0", x0), ("x1", x1), ("y0", y0), ("y1", y1))}
    return {"type": "rect", **corners, "fillcolor": colour, "line": {"width": 0}}


def _bar_texts(info: PictureInfo, text: words.Text) -> dict[str, Any]:
    """Labels of the bars that are wide enough at full width, and what each says under the mouse."""
    shown, hover = [], []
    for bar in info.rows.bars:
        wide = (bar.span.end - bar.span.start) / info.end * 900
        fits = [label for label in words.labels(text, bar.span, numbered=info.numbered) if 9 * len(label) + 6 < wide]
        shown.append(fits[0] if fits and bar.y1 - bar.y0 >= 13 else "")
        hover.append("<br>".join(hover_lines(info, text, bar)))
    digits, unit = digits_of(info), info.unit[0]
    return {
        "type": "scatter", "mode": "text", "xaxis": "x2", "yaxis": "y2", "name": "spans", "showlegend": False,
        "x": [round((bar.span.start + bar.span.end) / 2 / unit, digits) for bar in info.rows.bars],
        "y": [round((bar.y0 + bar.y1) / 2, 1) for bar in info.rows.bars],
        "text": shown, "hovertext": hover, "hoverinfo": "text", "textfont": {"size": 12},
    }  # fmt: skip


def hover_lines(info: PictureInfo, text: words.Text, bar: Bar) -> list[str]:
    span = bar.span
    lines = [f"<b>{said(info, text, bar)}</b>", place_of(info, text, bar)]
    lines += [words.show_bytes(span.bytes)] if span.bytes > 0 else []
    return [
        *lines,
        f"{words.show_seconds(span.duration)} · {text('figure.starts', time=words.show_seconds(span.start))}",
    ]
