"""An op or what it moves -> its colour, its second cue and its shape; and the one layout that all figures start from.

Colours are those of Okabe & Ito (2008), "Color Universal Design", which are told apart with every kind of colour
vision; the halves of a backward pass have its orange, lighter and darker, and recomputing has forward's blue. A
compute op has the colour of its kind; a communication op that of what it moves, so that a packet and its span in the
timeline look alike.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from engine.plan import COMPUTE


class Look(NamedTuple):
    """`ink` is readable on `colour`. Second cues: `pattern` of a span (in Plotly's names), `shape` of a packet."""

    colour: str
    ink: str
    pattern: str = ""
    shape: str = "circle"


DARK, LIGHT = "#10151c", "#ffffff"

LOOKS = {
    "forward": Look("#0072B2", LIGHT),
    "backward": Look("#E69F00", DARK, "/"),
    "backward_input": Look("#F5C970", DARK, "-"),
    "backward_weight": Look("#946400", LIGHT, "|"),
    "optimizer": Look("#CC79A7", DARK, "x"),
    "recompute": Look("#5B8DB8", DARK, "\\"),
    "batch": Look("#56B4E9", DARK, "", "triangle"),
    "activation": Look("#009E73", DARK, "", "circle"),
    "gradient": Look("#D55E00", DARK, "", "diamond"),
    "weights": Look("#F0E442", DARK, "", "square"),
    "tokens": Look("#882255", LIGHT, "", "hexagon"),
    "other": Look("#8A949E", DARK, ".", "square"),
}

# Why a rank idles, by cause (`engine.analysis.idle`): quiet beside what computes, but for what somebody can mend.
WAITS = {
    "fill": Look("#C3CEDA", DARK, "/"),
    "imbalance": Look("#93A4B6", DARK, "x"),
    "drain": Look("#DCE3EA", DARK, "\\"),
    "straggler": Look("#C0392B", LIGHT, "+"),
    "communication": Look("#7FC8AE", DARK, "-"),
    "loading": Look("#B5DDF5", DARK, "."),
    "contention": Look("#A678B4", DARK, "|"),
    "overhead": Look("#CFC7B8", DARK, "."),
    "start": Look("#E8D9B5", DARK, "|"),
    "end": Look("#EEF1F4", DARK),
}

# GPUs by generation, in the order in which they came. Shapes are Plotly's.
GENERATIONS = {
    "volta": Look("#8A949E", DARK, "", "x"),
    "ampere": Look("#0072B2", LIGHT, "", "circle"),
    "hopper": Look("#E69F00", DARK, "", "diamond"),
    "blackwell": Look("#009E73", DARK, "", "square"),
    "others": Look("#CC79A7", DARK, "", "triangle-up"),
}
OF_GENERATION = {"v": "volta", "a": "ampere", "h": "hopper", "b": "blackwell", "gb": "blackwell"}

SAME = {"load": "batch"}  # loading looks like what it loads

# Layers of the model, by the stage that holds them: soft, so that a glow is seen on top, and from blue to violet, since
# green, orange and pink are what moves and what is computed. Used in turn.
STAGES = ("#8DB3D9", "#B9A7DC", "#9DB0C0", "#9BA4DE", "#CBB7D6", "#7FA9BD")
FROZEN = "#C3CCD6"  # and hatched: layers that are not trained

# Stand-ins for colours that the viewer's theme has: readable on white and on black as they are, and replaced by the
# player with the theme's own. No two are equal, so that each can be found in a figure's JSON.
INK, LINE, GROUND, SURFACE = "#7B8086", "#7B8087", "#7B8088", "#7B8089"
THEME = {
    INK: "--st-text-color",
    LINE: "--st-border-color",
    GROUND: "--st-background-color",
    SURFACE: "--st-secondary-background-color",
}
FONT_SIZE = 15
# As the player's: Plotly's own would be white on the colour of the point, whichever that is.
HOVER = {"bgcolor": INK, "bordercolor": INK, "font": {"size": FONT_SIZE, "color": GROUND}}
HOVER_LINES = {"align": "left", "font": HOVER["font"] | {"size": FONT_SIZE - 2}}  # of several lines


def look_of(kind: str, payload: str = "") -> str:
    """The name in LOOKS of an op: its kind when it computes, what it moves when it communicates."""
    name = SAME.get(kind, kind) if kind in COMPUTE else payload
    return name if name in LOOKS else "other"


def generation(device: str) -> str:
    """The name in GENERATIONS of a device of the catalogue, by the letters that its name begins with."""
    return OF_GENERATION.get(re.match("[a-z]*", device).group(), "others")


def stage_colour(stage: int) -> str:
    return STAGES[stage % len(STAGES)]


def layout(**changes: Any) -> dict[str, Any]:
    """The layout every figure starts from: transparent, without grid, in large type."""
    plain = {"showgrid": False, "zeroline": False, "automargin": False}
    base = {
        "template": {},  # a template is 7 kB of what is set here anyway
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": FONT_SIZE, "color": INK},
        "margin": {"l": 76, "r": 16, "t": 12, "b": 48},
        "hoverlabel": HOVER,
        "xaxis": plain,
        "yaxis": plain,
    }
    for name, value in changes.items():
        own = plain if re.fullmatch("[xy]axis[0-9]*", name) else base.get(name)
        base[name] = own | value if isinstance(value, dict) and isinstance(own, dict) else value
    return base
