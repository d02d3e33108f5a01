"""Names of rows, a unit and what is not drawn -> the layout of figures that have a horizontal bar a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from viz import theme

HEAD = 62  # pixels: the legend above, the axis below
NOTE = 42  # and a line below that


def bars_layout(
    names: Sequence[str], *, thick: int, unit: str, note: str = "", barmode: str = "stack", **axis: Any
) -> dict[str, Any]:
    """Row 0 at the top, `thick` pixels each. `axis`: more of the axis along the bars."""
    count = max(1, len(names))
    below = {"text": note, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0, "y": 0}
    return theme.layout(
        height=HEAD + thick * count + (NOTE if note else 0),
        barmode=barmode,
        showlegend=True,
        margin={"b": 36 + (NOTE if note else 0)},
        xaxis={"ticksuffix": f" {unit}", "showline": True, "linecolor": theme.LINE} | axis,
        yaxis={
            "tickvals": list(range(len(names))),
            "ticktext": list(names),
            "range": [count - 0.5, -0.5],
            "automargin": True,
            "ticks": "outside",
            "ticklen": 8,
            "tickcolor": "rgba(0,0,0,0)",
        },
        annotations=[below | {"yshift": -58, "xanchor": "left"}] if note else [],
    )


def idle_marker(look: theme.Look) -> dict[str, Any]:
    """Fainter than work, on a light ground and on a dark one."""
    marker = {"color": look.colour, "line": {"color": theme.GROUND, "width": 1}, "opacity": 0.75}
    if look.pattern:
        pattern = {"shape": look.pattern, "bgcolor": look.colour, "fgcolor": look.ink, "fgopacity": 0.3}
        marker["pattern"] = pattern | {"size": 7, "solidity": 0.2}
    return marker
