"""A prediction, and a measured run where there is one -> the picture, moving; and its files to take away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from engine.timeline import Timeline
from viz import player
from viz.figures.critical import Key
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info, typical_step
from viz.figures.places import drawn
from viz.locales import Catalogue
from viz.locales.engine import lesson
from viz.pages.downloads import show_downloads
from viz.pages.prediction import Shown
from viz.pages.waits import Told, told

MUCH = 0.02  # of the step
VIEWS = ("predicted", "measured", "both")


@st.cache_resource(max_entries=16, show_spinner=False)
def load_timeline(run_dir: str, written: float) -> Timeline:
    """What a run measured; `written`, the file's time, tells a rewritten file from the one that is remembered."""
    return Timeline.load(Path(run_dir) / "timeline.parquet")


def measured_timeline(run_dir: Path) -> Timeline | None:
    """None where nothing was recorded."""
    path = run_dir / "timeline.parquet"
    if not path.exists():
        return None
    timeline = load_timeline(str(run_dir), path.stat().st_mtime)
    return timeline if len(timeline) else None


def show_picture(shown: Shown, measured: Timeline | None, text: Catalogue, name: str, *, crowded: bool = False) -> Told:
    """The moving picture and its files; with a measured run, the switch between it and the prediction, and the step.
    Returns where the time went in the step that it shows.

    `name` is the run's id, or begins the files' names where there is none. `crowded`: the run's ranks shared cores.
    """
    spec = shown.prediction.job.spec
    view, step = "predicted", None
    if measured is not None:
        view, step = _show_switch(measured, name, text)
    part = None if measured is None or view == "predicted" else measured.step(step)
    settings = tuple(spec.to_params().items())
    found = told((settings, name, None if part is None else step), shown, part, crowded and part is not None)
    critical = found.path if st.session_state.get("critical") else ()
    payload = _payload((settings, name, step, view, text.language), shown, part, text, critical)
    player.show(payload, key="picture")
    if part is not None:
        _say_ahead(measured.ahead(step), part.makespan, text)
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        exported = shown.prediction.short_timeline if part is None else measured
        show_downloads(name, spec, exported, payload, text)
        if found.path:  # below what it changes, so that the picture stays above the fold
            st.toggle(text("picture.critical"), key="critical", help=text("picture.critical.help"))
    return found


def _say_ahead(ahead: Mapping[int, float], makespan: float, text: Catalogue) -> None:
    """Which ranks computed much of the step before it began, which is not drawn."""
    much = sorted(rank for rank, seconds in ahead.items() if seconds > MUCH * makespan)
    if much:
        ranks = text("figure.rank", rank=much[0]) if len(much) == 1 else text(
            "figure.ranks", ranks=", ".join(map(str, much))
        )  # fmt: skip
        st.caption(f":material/info: {text('picture.ahead', ranks=ranks)}")


def _show_switch(measured: Timeline, name: str, text: Catalogue) -> tuple[str, int]:
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        view = st.segmented_control(
            text("picture.view"),
            VIEWS,
            default="measured",
            required=True,
            format_func=lambda v: text(f"picture.view.{v}"),
            key="view",
            label_visibility="collapsed",
        )
    steps = measured.steps
    typical = typical_step(measured)
    with right:
        step = st.selectbox(
            text("picture.step"),
            steps,
            index=steps.index(typical),
            format_func=lambda s: text("picture.step.typical" if s == typical else "picture.step.one", step=s),
            key=f"step-{name}",
            label_visibility="collapsed",
            filter_mode=None,
        )
    return view or "measured", step


@st.cache_resource(max_entries=24, show_spinner=False)
def _payload(
    key: tuple, _shown: Shown, _measured: Timeline | None, _text: Catalogue, critical: tuple[Key, ...] = ()
) -> dict[str, Any]:
    """What the player gets. `key` (settings, name, step, view, language) stands for what is too large to compare."""
    prediction, (*moment, view, _) = _shown.prediction, key
    info = picture_info(
        prediction.plan,
        prediction.job.layers,
        prediction.simulation.of_ranks(drawn(prediction.plan)),
        _measured,
        view,
        memory=_shown.summary["peak_memory"],
        steps=lesson(_text.language, prediction.job.spec.mode).steps,
        critical=critical,
    )
    # In another view or language the clock goes on where it is.
    return moving_picture(info, _text, id=repr(moment))
