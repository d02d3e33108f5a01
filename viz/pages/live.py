"""Run and Stop -> a real run in its folder, and the view of it while it goes on.

Nothing here waits: a click asks the launcher and returns, and one fragment reads the run's files twice a second until
the run has ended, then has the whole page drawn once more.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import streamlit as st

from engine import archive, launch
from engine.asking.rules import SpecError
from engine.launch import Handle, Launcher, LauncherError, Progress
from engine.spec import Spec
from viz.locales import Catalogue
from viz.pages.state import Asked

REFRESH = 0.5  # seconds
MAX_POINTS = 400  # of the loss curve
MAX_RANKS = 16
HEIGHT = 150  # pixels of the loss curve
COLOURS = {"failed": "red", "broken": "red", "finished": "green", "stopped": "orange", "running": "blue"}


@st.cache_resource(show_spinner=False)
def warm_launcher() -> Launcher:
    """The process that has torch imported, for all visitors; the first one's page starts it."""
    launcher = launch.default_launcher()
    threading.Thread(target=_warm, args=(launcher,), daemon=True).start()
    return launcher


def _warm(launcher: Launcher) -> None:
    # It has said why on standard error, and the next run's status will say that the launcher has ended.
    with contextlib.suppress(LauncherError):
        launcher.warm()


@st.cache_resource(max_entries=64, show_spinner=False)
def handle_of(run_dir: str) -> Handle:
    """One handle a run: it reads on where it stopped, whoever looks."""
    return Handle(run_dir)


def open_run(asked: Asked, runs_dir: Path) -> Handle | None:
    """The run that the URL names. Raises SpecError("bad_run_id" or "no_run")."""
    return None if asked.run is None else handle_of(str(archive.open_run(runs_dir, asked.run)))


def start_run(asked: Asked, runs_dir: Path) -> None:
    """One run a click: the second of two quick clicks finds the first one's run going on."""
    with contextlib.suppress(SpecError):
        handle = open_run(asked, runs_dir)
        if handle is not None and not handle.done:
            return
    try:
        started = launch.start(Spec.from_params(asked.settings), runs_dir, warm_launcher())
        asked.run = started.run_id
        asked.set("resume", archive.read_spec(started.run_dir).resume)  # the one checkpoint that was meant
    except SpecError as refused:
        st.session_state.refused = refused


def stop_run(asked: Asked, runs_dir: Path) -> None:
    with contextlib.suppress(SpecError):  # deleted meanwhile, so there is nothing to stop
        archive.ask_to_stop(archive.open_run(runs_dir, asked.run))


def show_live(handle: Handle, text: Catalogue) -> None:
    """The run while it goes on."""

    @st.fragment(run_every=REFRESH)
    def live() -> None:
        progress = handle.poll()
        if progress.state in archive.FINAL:
            st.rerun()
        _show_progress(progress, text)

    with st.container(border=True, key="live"):
        live()


def _show_progress(progress: Progress, text: Catalogue) -> None:
    left, right = st.columns([2, 3], gap="medium")
    with left:
        st.markdown(state_badge(progress.state, text))
        rate = progress.samples_per_second
        words = text("live.step", step=f"{progress.step:,}", total=f"{progress.total_steps:,}")
        if rate is not None:
            words += " · " + text("live.rate", rate=f"{rate:,.0f}")
        st.progress(min(1.0, progress.step / max(1, progress.total_steps)), text=words)
        st.markdown(" ".join(_rank_badge(rank, text) for rank in progress.ranks[:MAX_RANKS]))
        if len(progress.ranks) > MAX_RANKS:
            st.caption(text("live.more_ranks", count=len(progress.ranks) - MAX_RANKS))
    with right:
        _show_losses(progress, text)


def _show_losses(progress: Progress, text: Catalogue) -> None:
    """A curve that grows from the left edge to the right one, on axes that stay where they are."""
    losses = progress.losses
    stride = -(-len(losses) // MAX_POINTS)
    kept = [i for i in range(0, len(losses), stride or 1) if losses[i] is not None]
    points = {"x": kept, "y": [losses[i] for i in kept]}
    axis = {"grid": False, "tickMinStep": 1, "titlePadding": 6}
    spec = {
        "height": HEIGHT,
        "mark": {"type": "line", "interpolate": "linear", "strokeWidth": 2.5},
        "encoding": {
            "x": {
                "field": "x",
                "type": "quantitative",
                "scale": {"domain": [0, max(1, progress.total_steps - 1)], "nice": False},
                "axis": axis | {"title": text("live.axis_step")},
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": {"domain": [0, 1.05 * max(points["y"], default=1.0)]},
                "axis": {"grid": True, "tickCount": 4, "titlePadding": 6, "title": text("live.axis_loss")},
            },
        },
    }
    st.vega_lite_chart(points, spec, width="stretch", key="loss-curve", alt=text("live.axis_loss"))


def state_badge(state: str, text: Catalogue) -> str:
    return f":{COLOURS.get(state, 'gray')}-badge[{text(f'state.{state}')}]"


def _rank_badge(rank: launch.RankProgress, text: Catalogue) -> str:
    words = text("live.rank", rank=rank.rank, step=rank.step)
    return f":{COLOURS.get(rank.state, 'gray')}-badge[{words}]"
