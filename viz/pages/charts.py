"""Charts below the picture: memory; of a run that has ended its losses, its seconds by kind of op, experts' tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from engine.cost import calibration
from engine.modes import FIRST_STEADY_STEP
from engine.outcome import accuracy
from engine.spec import Spec
from engine.timeline import Timeline
from viz import player
from viz.figures.compare import accuracy_info, compare_info, plot_compare
from viz.figures.experts import experts_info, plot_experts
from viz.figures.losses import plot_losses, result_losses
from viz.figures.memory import memory_info, plot_memory
from viz.figures.memory_time import over_time_info, plot_over_time
from viz.figures.words import op_name, show_bytes, show_error, show_seconds
from viz.locales import Catalogue
from viz.locales.engine import explain, reasons
from viz.pages.prediction import Shown
from viz.pages.settings import escape
from viz.pages.state import Asked, act, param, write

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
                _show(text("charts.compare"), _compare(key, result, shown, measured, text), "compare")
                _say_why(result, shown, text)
        if result.get("expert_tokens"):
            _show(text("charts.experts"), _experts(key, result, text), "experts")


def show_memory(shown: Shown, measured: Sequence[Mapping[str, int]] | None, text: Catalogue) -> None:
    """What each rank holds, as predicted; beside it what was measured of a run with the same settings."""
    with st.container(key="memory"):
        figure = plot_memory(memory_info(shown.summary["memory"], measured), text)
        _show(text("charts.memory"), figure, "memory-chart")
        st.caption(text("charts.memory.both" if measured else "charts.memory.planned"))
        prediction = shown.prediction
        capacity, runtime = (shown.summary["fits"][name] for name in ("capacity", "runtime"))
        over_time = plot_over_time(over_time_info(prediction.simulation, capacity), text)
        _show(text("charts.memory_time"), over_time, "memory-time-chart")
        words = {} if capacity is None else {"capacity": show_bytes(capacity), "runtime": show_bytes(runtime)}
        st.caption(text("charts.memory_time.known" if words else "charts.memory_time.open", **words))


def show_fit(shown: Shown, text: Catalogue) -> None:
    """That a model does not fit, and what would: an answer, and no error."""
    found = shown.summary["fits"]
    if found["fits"] is not False:
        return
    sizes = {name: show_bytes(found[name]) for name in ("peak", "over", "capacity")}
    category = text(f"figure.memory.{found['category']}")
    told = text("fits.no", rank=found["rank"], ranks=f"{found['ranks_over']:,}", category=category, **sizes)
    st.info(f"{told} {text('fits.try' if found['would_fit'] else 'fits.none')}", icon=":material/memory:")
    with st.container(horizontal=True, gap="xsmall", key="would-fit"):
        for i, one in enumerate(found["would_fit"]):
            given = {name: write(value) for name, value in one["settings"].items() if value is not None}
            settings = ", ".join(f"`{param(name)} {value}`" for name, value in given.items())
            seconds, peak = show_seconds(one["step_time"]), show_bytes(one["peak_memory"])
            label = text("fits.one", settings=settings, peak=peak, time=seconds)
            st.button(label, key=f"fit-{i}", on_click=act(partial(_take, one["settings"])))


def _take(settings: Mapping[str, Any], asked: Asked) -> None:
    asked.set_all(Spec.from_params(asked.settings).with_(**settings))


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
def _compare(
    key: tuple[str, str], _result: Mapping[str, Any], _shown: Shown, _measured: Timeline, _text: Catalogue
) -> go.Figure:
    if found := _accuracy(_result, _shown):
        return plot_compare(accuracy_info(found), _text)
    steady = _measured.where(_measured["step"] >= FIRST_STEADY_STEP)
    return plot_compare(compare_info(_shown.prediction.simulation.by_role, steady if len(steady) else _measured), _text)


def _accuracy(result: Mapping[str, Any], shown: Shown) -> Mapping[str, Any] | None:
    """What the result holds of it, where that is of the machine shown; runs of earlier days hold none."""
    found = result.get("accuracy")
    same = found and found["step"]["measured"] and found["machine"] == shown.prediction.job.spec.machine
    return found if same else None


def _say_why(result: Mapping[str, Any], shown: Shown, text: Catalogue) -> None:
    """The reason found for the difference, and what was predicted with."""
    if not (found := _accuracy(result, shown)):
        return
    why, words = found["reason"], reasons(text.language)
    told = why and accuracy.explain(why, show_seconds, words, lambda kind: op_name(text, kind))
    st.caption(escape(text("accuracy.reason", reason=told) if told else text("accuracy.as_predicted")))
    if at := found.get("at_speed"):  # runs of earlier days hold none
        values = {"predicted": show_seconds(at["predicted"]), "error": show_error(at["error"])}
        words = text("accuracy.speed", factor=f"{found['slower']:.2f}", **values, command=calibration.COMMAND)
        st.caption(words)
    if other := accuracy.shared_with(found):
        st.caption(f":material/warning: {text('accuracy.other', **other)}")
    if found["calibration"] == "shipped":
        show_calibration(text)


def show_calibration(text: Catalogue) -> None:
    """That predictions for this machine are made with another's numbers, or with some that others disturbed, where they
    are."""
    told = calibration.find()
    if told.source == "shipped":
        who = told.calibration.identity
        words = text("accuracy.shipped", cpu=escape(who.cpu), cores=who.cores, command=calibration.COMMAND)
        if told.refused is not None:
            words += " " + text("accuracy.refused", refused=escape(explain(text.language, told.refused)))
        st.caption(f":material/info: {words}")
    elif disturbed := told.calibration.was_disturbed:
        words = text("accuracy.disturbed", **disturbed, command=calibration.COMMAND)
        st.caption(f":material/warning: {words}")
