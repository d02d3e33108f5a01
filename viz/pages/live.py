"""Run and Stop -> a real run in its folder, and the view of it while it goes on.

Nothing here waits: a click asks the launcher and returns. Twice a second the page then asks this server, past
Streamlit, what the run has come to, and when it has ended has itself drawn once more.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import streamlit as st

from engine import archive, launch
from engine.asking.rules import SpecError
from engine.launch import Handle, Launcher, LauncherError, Progress
from engine.spec import Spec
from viz import locales, player
from viz.figures.losses import growing
from viz.locales import Catalogue
from viz.pages.state import Asked

ADDRESS = "progress"  # below the app's
MAX_RANKS = 16
COLOURS = {
    "starting": "gray", "running": "blue", "finishing": "gray", "finished": "green", "stopped": "orange",
    "failed": "red", "broken": "red",
}  # fmt: skip


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


def show_live(handle: Handle, text: Catalogue, *, sparing: bool) -> None:
    """The run while it goes on. `sparing`: its ranks need all cores, so that what moves on the page moves less."""
    with st.container(border=True, key="live"):
        address, why = f"{ADDRESS}/{handle.run_id}?lang={text.language}", text("live.sparing") if sparing else ""
        player.live(address, key="live-run", sparing=why)


def answer(runs_dir: Path, run_id: str, language: str) -> dict[str, Any]:
    """What the page asks for twice a second: what the run has come to, in words, and the curve of its losses. Raises
    SpecError("bad_run_id" or "no_run")."""
    return tell(handle_of(str(archive.open_run(runs_dir, run_id))).poll(), locales.text(language))


def tell(progress: Progress, text: Catalogue) -> dict[str, Any]:
    """Badges are a colour and its words."""
    known = [loss for loss in progress.losses if loss is not None]
    words = [text("live.step", step=f"{progress.step:,}", total=f"{progress.total_steps:,}")]
    if progress.samples_per_second is not None:
        words.append(text("live.rate", rate=f"{progress.samples_per_second:,.0f}"))
    if known:
        words.append(text("live.loss", loss=f"{known[-1]:.3g}"))
    more = len(progress.ranks) - MAX_RANKS
    path, marks = growing(progress.losses, progress.total_steps)
    return {
        "ended": progress.state in archive.FINAL,
        "state": [COLOURS[progress.state], text(f"state.{progress.state}")],
        "count": " · ".join(words),
        "done": progress.step / max(1, progress.total_steps),
        "ranks": [
            [COLOURS[rank.state], text("live.rank", rank=rank.rank, step=f"{rank.step:,}")]
            for rank in progress.ranks[:MAX_RANKS]
        ],
        "more": text("live.more_ranks", count=more) if more > 0 else "",
        "losses": {"title": text("live.axis_loss"), "path": path, "marks": marks},
        "steps": ["0", text("live.axis_step"), f"{max(1, progress.total_steps - 1):,}"],
    }


def state_badge(state: str, text: Catalogue) -> str:
    return f":{COLOURS[state]}-badge[{text(f'state.{state}')}]"
