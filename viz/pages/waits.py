"""A step that ran -> where its time went, in a figure; its largest waits in sentences; who kept others waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import streamlit as st

from engine import modes
from engine.analysis.critical_path import critical_path
from engine.analysis.idle import idle
from engine.analysis.ran import NotJoined, Ran, measured, simulated
from engine.analysis.summary import summary
from engine.timeline import Timeline
from viz import player
from viz.figures.critical import Key, path_keys
from viz.figures.where import WhereInfo, plot_where, where_info
from viz.figures.words import op_name
from viz.locales import Catalogue
from viz.locales.engine import phrase, waiting
from viz.pages.numbers import duration
from viz.pages.prediction import Shown
from viz.pages.settings import escape

SENTENCES = 6
KINDS = 5  # of op, by their part of the critical path


class Told(NamedTuple):
    """`reason`: why nothing is known, in English; else the rest is."""

    where: WhereInfo | None
    path: tuple[Key, ...]
    summary: Mapping[str, Any]
    reason: str = ""


@st.cache_resource(max_entries=16, show_spinner=False)
def told(key: tuple, _shown: Shown, _part: Timeline | None, crowded: bool) -> Told:
    """Of a step that was measured, or of the predicted one. `key` (settings, name, step) stands for these."""
    try:
        ran = _ran(key[-1], _shown, _part)
    except NotJoined as wrong:
        return Told(None, (), {}, str(wrong))
    found = idle(ran, crowded=crowded)
    return Told(where_info(ran, found), path_keys(ran, critical_path(ran)), summary([ran], crowded=crowded))


def _ran(step: int | None, shown: Shown, part: Timeline | None) -> Ran:
    if part is None:
        return simulated(shown.prediction.simulation)
    return measured(part, modes.plan(shown.prediction.job, step))


def show_waits(found: Told, text: Catalogue, key: str) -> None:
    """Below the picture, of the step that it shows. The picture has brought plotly.js."""
    with st.container(key="waits"):
        st.markdown(f"##### {text('waits.title')}")
        if found.where is None:
            st.caption(text("waits.unknown", reason=escape(phrase(text.language, found.reason))))
            return
        player.chart(plot_where(found.where, text), key=key, alt=text("waits.title"))
        for one in found.summary["stragglers"]:
            values = {name: one[name] for name in ("rank", "last", "calls")} | {"time": duration(one["seconds"])}
            badge = f":red-badge[:material/hourglass_bottom: {text('waits.straggler.badge')}]"
            st.markdown(f"{badge} {text('waits.straggler', **values)}")
        st.caption(_path(found.summary["critical_path"], text))
        gaps = found.summary["idle_causes"]["largest"][:SENTENCES]
        half = -(-len(gaps) // 2)
        for place, part in zip(st.columns(2, gap="large"), (gaps[:half], gaps[half:]), strict=True):
            place.markdown("\n".join(f"- {_sentence(gap, text)}" for gap in part))
        if not gaps:
            st.caption(text("waits.none"))


def _sentence(gap: Mapping[str, Any], text: Catalogue) -> str:
    words, more = escape(waiting(gap, duration(gap["seconds"]), text)), gap["ranks"] - 1
    return words + (f" :gray[{text('waits.alike', more=f'{more:,}')}]" if more else "")


def _path(path: Mapping[str, Any], text: Catalogue) -> str:
    """Its parts by kind of op, the largest first; what is less than a percent is left out."""
    whole = path["seconds"] or 1.0
    names = {
        kind: text(f"figure.cause.{kind}") if f"figure.cause.{kind}" in text else op_name(text, kind)
        for kind in path["by_kind"]
    }
    shares = [(names[kind], 100 * seconds / whole) for kind, seconds in list(path["by_kind"].items())[:KINDS]]
    parts = [f"{name} {share:.0f} %" for name, share in shares if share >= 1]
    return text("waits.path", parts=text("waits.comma").join(parts))
