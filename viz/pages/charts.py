"""Charts below the picture: memory; of a run that has ended its losses, its seconds by kind of op, experts' tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from engine.modes import FIRST_STEADY_STEP
from engine.timeline import Timeline
from viz import player
from viz.figures.compare import compare_info, plot_compare
from viz.figures.experts import experts_info, plot_experts
from viz.figures.losses import plot_losses, result_losses
from viz.figures.memory import memory_info, plot_memory
from viz.locales import Catalogue
from viz.pages.prediction import Shown

if TYPE_CHECKING:
    import plotly.graph_objects as go


def show_charts(result: Mapping[str, Any], shown: Shown, measured: Timeline | None, text: Catalogue) -> None:
    """`measured` is of a run with the settings of `shown`, or None."""
    key = (result["run_id"], text.language)
    with st.container(key="charts"):
        places = st.columns(1 if measured is None else 2, gap="large")
        with places[0]:
            _show(text("charts.losses"), _losses(key, result, text), "losses")
        if measured is not None:
            with places[1]:
                _show(text("charts.compare"), _compare(key, shown, measured, text), "compare")
        if result.get("expert_tokens"):
            _show(text("charts.experts"), _experts(key, result, text), "experts")


def show_memory(shown: Shown, measured: Sequence[Mapping[str, int]] | None, text: Catalogue) -> None:
    """What each rank holds, as predicted; beside it what was measured of a run with the same settings."""
    with st.container(key="memory"):
        figure = plot_memory(memory_info(shown.summary["memory"], measured), text)
        _show(text("charts.memory"), figure, "memory-chart")
        st.caption(text("charts.memory.both" if measured else "charts.memory.planned"))


def _show(title: str, figure: go.Figure, key: str) -> None:
    st.markdown(f"##### {title}")
    player.chart(figure, key=key, alt=title)


@st.cache_resource(max_entries=16, show_spinner=False)
def _losses(key: tuple[str, str], _result: Mapping[str, Any], _text: Catalogue) -> go.Figure:
    return plot_losses(result_losses(_result), _text)


@st.cache_resource(max_entries=16, show_spinner=False)
def _experts(key: tuple[str, str], _result: Mapping[str, Any], _text: Catalogue) -> go.Figure:
    return plot_experts(experts_info(_result["expert_tokens"]), _text)


@st.cache_resource(max_entries=16, show_spinner=False)
def _compare(key: tuple[str, str], _shown: Shown, _measured: Timeline, _text: Catalogue) -> go.Figure:
    steady = _measured.where(_measured["step"] >= FIRST_STEADY_STEP)
    return plot_compare(compare_info(_shown.prediction.timeline, steady if len(steady) else _measured), _text)
