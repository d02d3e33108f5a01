"""Cells in rows, a row a rank, and places among them -> a few lines of text around those places, each with an arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

AROUND, MOST_RANKS = 3, 8  # cells shown on either side of an arrow; ranks shown


def show(rows: Sequence[Sequence[str]], arrows: Mapping[int, int]) -> str:
    """`arrows`: the place in its row of each rank that has one. Around a single arrow the other ranks are shown too,
    at the same place; of several arrows, only the ranks that have one."""
    if len(arrows) == 1:
        ((rank, place),) = arrows.items()
        first = max(0, min(rank - MOST_RANKS // 2, len(rows) - MOST_RANKS))
        shown = dict.fromkeys(range(first, min(first + MOST_RANKS, len(rows))), place)
    else:
        shown = dict(sorted(arrows.items())[:MOST_RANKS])
    lines = []
    for rank, place in shown.items():
        start, end = max(0, place - AROUND), place + AROUND + 1
        marks = ["> " if arrows.get(rank) == i else "  " for i in range(start, end)]
        cells = [*rows[rank][start:end], *[""] * (end - start)]
        lines.append([f"rank {rank}", "..." if start else "", *(m + c for m, c in zip(marks, cells, strict=False))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=False)]
    text = [" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    more = len(arrows) - len(shown)
    return "\n".join(text + [f"and {more} more ranks"] * (len(arrows) > 1 and more > 0))
