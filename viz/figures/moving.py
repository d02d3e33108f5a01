"""What a picture shows -> the payload of the player: the still figure, and in columns everything that moves.

Times are in the unit of the clock's axis, texts are indices into `strings`, so that a thousand spans stay small.
"""

from __future__ import annotations

from typing import Any

from viz import theme
from viz.figures import words
from viz.figures.moments import Told
from viz.figures.picture import PictureInfo, caption, digits_of, look_of, place_of, said
from viz.figures.places import Box, segment
from viz.figures.rows import Bar
from viz.figures.still import gauge, still_layout, still_traces

# Instead of the index of a cell: every layer that the device holds; none; and counting down, those of stage 0, 1, ...
WHOLE, NO_CELL, OF_STAGE = -1, -2, -3
MAX_LAYERS_NAMED = 8


class Strings(dict):
    """A text -> its place among the texts seen so far."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def moving_picture(
    info: PictureInfo, text: words.Text, id: str = "picture", seconds: float | None = None
) -> dict[str, Any]:
    """Plain JSON values. A payload with the `id` of the one before it keeps the clock where it is. `seconds`: how long
    it plays at normal speed."""
    looks = {look: i for i, look in enumerate(theme.LOOKS)}
    strings = Strings()
    figure = {"data": still_traces(info, text), "layout": still_layout(info, text)}
    figure["layout"]["hovermode"] = False  # the player finds the span under the mouse itself
    staged = len({stage for box in info.places.boxes for stage in box.stages}) > 1
    unit, digits = info.unit[0], digits_of(info)

    def clock(time: float) -> float:
        return round(time / unit, digits)

    return {
        "id": id,
        "figure": figure,
        "axes": ["xaxis", "yaxis", "xaxis2", "yaxis2"],
        "theme": dict(theme.THEME),
        "end": clock(info.end),
        "unit": [unit, info.unit[1]],
        "seconds": seconds or info.seconds,
        "fade": clock(info.fade),
        "stops": [clock(time) for time in info.stops],
        "pauses": [clock(time) for time in info.pauses],
        "looks": [[look.colour, look.ink, look.shape] for look in theme.LOOKS.values()],
        "legend": _legend(info, text, looks),
        "caption": caption(info, text),
        "lesson": [_step(told, looks, clock) for told in info.lesson if told.step.title],
        "boxes": [_box(box, text, staged) for box in info.places.boxes],
        "spans": _spans(info, text, looks, strings, clock),
        **_flights(info, looks, clock),
        "strings": list(strings),
        "text": _player_text(text),
    }


def _legend(info: PictureInfo, text: words.Text, looks: dict[str, int]) -> list[list]:
    """[look, travels, words] of what occurs: what is computed, then what travels."""
    computed = dict.fromkeys(look_of(bar) for bar in info.rows.bars if bar.computes and bar.span.kind != "load")
    payloads = {flight.payload for flight in info.flights}
    moved = {payload if payload in looks else "other" for payload in payloads}
    other = "control" if payloads - looks.keys() == {"control"} else "other"  # as the narration calls it
    order = [look for look in theme.LOOKS if look in computed], [look for look in theme.LOOKS if look in moved]
    name = {look: words.look_name(text, other if look == "other" else look) for look in looks}
    return [[looks[look], travels, name[look]] for travels, part in enumerate(order) for look in part]


def _step(told: Told, looks: dict[str, int], clock) -> dict[str, Any]:
    """`moments`: [from, to, when best seen]. `look`: of what the step begins with; -1 where it happened earlier.
    `earlier`: then 1, or 2 where it is seen in the batch."""
    first = told.first
    return {
        "title": told.step.title,
        "text": told.step.text,
        "earlier": 0 if told.step.kinds else 2 if "batch" in told.step.payload else 1,
        "look": -1 if first is None else looks[theme.look_of(first.kind, first.payload)],
        "moments": [[clock(time) for time in moment] for moment in told.moments],
    }


def _box(box: Box, text: words.Text, staged: bool) -> dict[str, Any]:
    _, x1, y = gauge(box)
    named = len(box.cells) <= MAX_LAYERS_NAMED
    return {
        "at": [round(v, 1) for v in (box.x0, box.x1, box.y0, box.y1)],
        "rank": box.rank,
        "name": text("figure.rank", rank=box.rank),
        "titles": _titles(box, text, staged),
        "memory": [round(x1 + 8, 1), round(y, 1), words.show_bytes(box.memory)],
        "cells": [[round(v, 1) for v in cell[3:7]] for cell in box.cells],
        "kept": [[round(v, 1) for v in cell.kept] for cell in box.cells],
        "updated": [[round(v, 1) for v in cell.updated] for cell in box.cells],
        "held": [1 + cell.stage for cell in box.cells],
        # What computes glows: a layer, gathered from others where it must be; of experts, those that are here.
        "glow": [[round(v, 1) for v in (cell.kept if cell.experts[2] else (cell.x0, cell.x1))] for cell in box.cells],
        "layers": [cell.name if named and not cell.experts[2] else "" for cell in box.cells],
    }


def _titles(box: Box, text: words.Text, staged: bool) -> list[str]:
    """From the longest to the shortest: the player takes the first that fits."""
    rank = text("figure.rank", rank=box.rank)
    longest = [words.rank_and_stage(text, box.rank, box.stages)] if staged else []
    if shared := [cell.experts for cell in box.cells if cell.experts[2]]:
        first, end, _ = shared[0]
        held = f"{first}–{end - 1}" if end > first + 1 else str(first)
        longest += [f"{rank} · {text('figure.experts', experts=held)}", f"{rank} · e{held}"]
    short = [f"{rank} · {', '.join(f's{stage}' for stage in box.stages)}"] if len(box.stages) > 1 else []
    titles = [(rank, box.loads), (box.rank, box.loads), (box.rank, box.loads.removeprefix("tokens "))]
    dealt = [f"{title} · {tokens}" for title, tokens in titles if tokens]
    return [*longest, *short, *dealt, rank, str(box.rank)]


def _spans(info: PictureInfo, text: words.Text, looks: dict[str, int], strings: Strings, clock) -> dict[str, list]:
    """Columns, one entry a bar, in order of start. `label`: texts from long to short, joined by tabs. `front`: 1 for an
    op that computes, 2 for one that talks, 0 for what is only beneath another timeline."""
    bars = info.rows.bars
    lanes = sorted({(round(bar.y0, 1), round(bar.y1, 1)) for bar in bars})
    lane = {at: i for i, at in enumerate(lanes)}
    return {
        "t0": [clock(bar.span.start) for bar in bars],
        "t1": [clock(bar.span.end) for bar in bars],
        "box": [bar.row for bar in bars],
        "lane": [lane[round(bar.y0, 1), round(bar.y1, 1)] for bar in bars],
        "lanes": lanes,
        "look": [looks[look_of(bar)] for bar in bars],
        "veiled": [int(bar.behind or info.view == "predicted") for bar in bars],
        "front": [0 if bar.behind else 1 if bar.computes else 2 for bar in bars],
        "cell": [_cell(info, bar) for bar in bars],
        "words": [strings[said(info, text, bar)] for bar in bars],
        "label": [strings["\t".join(words.labels(text, bar.span, numbered=info.numbered))] for bar in bars],
        "place": [strings[place_of(info, text, bar)] for bar in bars],
        "size": [strings[words.show_bytes(bar.span.bytes) if bar.span.bytes > 0 else ""] for bar in bars],
    }


def _cell(info: PictureInfo, bar: Bar) -> int:
    """Which of its device's cells lights up."""
    span, box = bar.span, info.places.boxes[bar.row]
    if not bar.computes or bar.behind or span.kind == "load":
        return NO_CELL
    if not span.part:
        return OF_STAGE - span.stage if len(box.stages) > 1 and span.stage >= 0 else WHOLE
    names = [cell.name for cell in box.cells]
    layer = span.part if span.part in names else span.part.split(".")[0]  # block1.attention is a piece of block1
    return names.index(layer) if layer in names else NO_CELL


def _flights(info: PictureInfo, looks: dict[str, int], clock) -> dict[str, Any]:
    """`paths` are places in `links`: a packet enters a device with one leg and leaves it with the next."""
    numbers: dict[tuple, int] = {}
    for flight in info.flights:
        numbers.setdefault(flight.path, len(numbers))
    legs = {leg: i for i, leg in enumerate(dict.fromkeys(leg for path in numbers for leg in path))}
    return {
        "links": [[round(v, 1) for v in segment(info.places, *leg)] for leg in legs],
        "paths": [[legs[leg] for leg in path] for path in numbers],
        "flights": {
            "t0": [clock(f.start) for f in info.flights],
            "t1": [clock(f.end) for f in info.flights],
            "look": [looks[f.payload if f.payload in looks else "other"] for f in info.flights],
            "number": [f.number for f in info.flights],
            "path": [numbers[f.path] for f in info.flights],
        },
    }


def _player_text(text: words.Text) -> dict[str, str]:
    """What the player says itself; names in braces are filled in while it plays."""
    return {
        "play": text("player.play"),
        "pause": text("player.pause"),
        "back": text("player.back"),
        "forward": text("player.forward"),
        "repeat": text("player.repeat"),
        "full": text("player.full"),
        "speed": text("player.speed"),
        "time": text("player.time"),
        "label": text("player.label"),
        "ranks": text("figure.ranks", ranks="{ranks}"),
        "all": text("figure.all_ranks"),
        "counted": text("figure.counted", count="{count}", all="{all}"),
        "doing": text("figure.doing", ranks="{ranks}", what="{what}"),
        "idle": text("figure.idle", ranks="{ranks}"),
        "starts": text("figure.starts", time="{time}"),
        "lesson": text("player.lesson"),
        "absent": text("player.absent"),
    }
