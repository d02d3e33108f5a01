"""Settings -> the predicted picture at once; a click -> the same training for real, its picture and what it proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st

from engine import archive, checkpoints
from engine.asking.rules import SpecError
from engine.job import prepare_real
from engine.launch import Handle
from engine.schedules import given
from engine.spec import Spec
from engine.timeline import Timeline
from viz import locales
from viz.locales import Catalogue
from viz.locales.engine import explain, lesson
from viz.pages.charts import show_calibration, show_charts, show_fit, show_memory
from viz.pages.lesson import show_lesson
from viz.pages.live import open_run, show_live, start_run, state_badge, stop_run
from viz.pages.numbers import show_numbers
from viz.pages.picture import measured_timeline, show_picture
from viz.pages.prediction import Shown, predict_asked
from viz.pages.settings import escape, show_language, show_settings
from viz.pages.state import Asked, act, filled, read_url, write_url
from viz.pages.verdict import notices, oversubscribed, resumed, scale_model, show_failure, show_verdict, takes_all_cores
from viz.pages.waits import show_waits

BUTTON = 190  # pixels


class Opened(NamedTuple):
    """The run in the URL, and the spec that it was started with, filled in."""

    handle: Handle
    spec: Spec

    @property
    def run_dir(self) -> Path:
        return self.handle.run_dir

    @property
    def elsewhere(self) -> bool:
        """Whether it came with Lockstep, from another machine."""
        return self.run_dir.parent.name == archive.GALLERY


def show(runs_dir: Path) -> None:
    asked = read_url("lab")
    run, wrong_run = _open(asked, runs_dir)
    write_url(asked)
    text = locales.text(asked.language)
    with st.spinner(text("lab.predicting")):
        shown = predict_asked(asked)
    with st.sidebar:
        show_language(asked)
        show_settings(asked, shown.prediction.job, shown.error, text)
    _show_head(asked, shown, run, runs_dir, text)
    if wrong_run is not None:
        _show_wrong_run(wrong_run, text)
    if run is None:
        _show_other_run(runs_dir, text)
        show_numbers(shown, text)
        show_fit(shown, text)
        _show_picture(shown, None, text)
        if shown.prediction.job.spec.machine == "local":
            show_calibration(text)
        show_memory(shown, None, text)
    else:
        _show_run(asked, shown, run, text)


def _show_picture(shown: Shown, measured: Timeline | None, text: Catalogue, name: str = "", **how: bool) -> None:
    """What happens, what it means, and where its time goes."""
    found = show_picture(shown, measured, text, name or _name(shown), **how)
    show_lesson(shown.prediction.job.spec.mode, text)
    show_waits(found, text, key="waits-chart")


def _open(asked: Asked, runs_dir: Path) -> tuple[Opened | None, SpecError | None]:
    """The run in the URL. A link to a run alone brings the run's settings."""
    try:
        handle = open_run(asked, runs_dir)
        if handle is None:
            return None, None
        spec = filled(archive.read_spec(handle.run_dir))
    except SpecError as wrong:
        return None, wrong
    if asked.bare:
        asked.set_all(spec)
        asked.bare = False
    return Opened(handle, spec), None


def _show_head(asked: Asked, shown: Shown, run: Opened | None, runs_dir: Path, text: Catalogue) -> None:
    spec = shown.prediction.job.spec
    told = lesson(text.language, spec.mode)
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", gap="large", key="head"):
        with st.container(gap="xxsmall"):
            st.markdown(f"## {told.title}")
            st.caption(told.idea)
        with st.container(width=BUTTON, gap="xxsmall"):
            _show_buttons(asked, shown, run, runs_dir, text)
    if shown.error is not None:
        wrong = escape(explain(text.language, shown.error))
        works = {"mode": text(f"mode.{spec.mode}"), "devices": spec.devices}
        st.warning(text("lab.last_good", error=wrong, **works), icon=":material/history:")
    if run is None and shown.error is None and ":" in (spec.resume or ""):
        st.caption(f":material/info: {resumed(spec, text)}")
    if run is None and spec.paced is not None:
        st.caption(f":material/info: {scale_model(spec, text)}")
    order = spec.schedule_file
    if order is not None and (stuck := given.blocked(order)):
        st.caption(f":material/info: {text('lab.blocked_on_gpus')}")
        st.code(stuck.partition("\n")[2], language=None)
    refused = st.session_state.pop("refused", None)
    if refused is not None:
        st.error(escape(explain(text.language, refused)), icon=":material/error:")


def _show_buttons(asked: Asked, shown: Shown, run: Opened | None, runs_dir: Path, text: Catalogue) -> None:
    if run is not None and not run.handle.done:
        stopping = (run.run_dir / "stop").exists()
        st.button(
            text("lab.stopping" if stopping else "lab.stop"),
            key="stop",
            type="primary",
            icon=":material/stop:",
            width="stretch",
            disabled=stopping,
            on_click=act(stop_run, runs_dir),
        )
        return
    reason = None
    if shown.error is not None:
        reason = text("lab.run.settings")
    else:
        try:
            prepare_real(shown.prediction.job.spec)
        except SpecError as refused:
            reason = explain(text.language, refused)
    st.button(
        text("lab.run"),
        key="run",
        type="primary",
        icon=":material/play_arrow:",
        width="stretch",
        disabled=reason is not None,
        help=reason or text("lab.run.help"),
        on_click=act(start_run, runs_dir),
    )
    if run is None:
        _show_recorded(shown.prediction.job.spec.mode, runs_dir, text)


def _show_recorded(mode: str, runs_dir: Path, text: Catalogue) -> None:
    """The way to a recorded run of this mode, where one came with Lockstep."""
    for status in archive.list_runs(runs_dir / archive.GALLERY):
        if status["mode"] == mode and status["state"] in archive.FINAL:
            st.button(
                text("lab.recorded"),
                key="recorded",
                type="tertiary",
                icon=":material/history:",
                width="stretch",
                help=text("lab.recorded.help", devices=status["devices"]),
                on_click=act(_watch, status["run_id"]),
            )
            return


def _clear(asked: Asked) -> None:
    asked.run = None


def _result(run_dir: Path, text: Catalogue) -> dict[str, Any] | None:
    """None while there is none, and where it cannot be read, which is said."""
    try:
        return archive.read_whole_result(run_dir)
    except SpecError as error:
        st.error(escape(explain(text.language, error)), icon=":material/error:")
        return None


def _measured(run_dir: Path, text: Catalogue) -> Timeline | None:
    """None where nothing was recorded, or where it cannot be read; either is said."""
    try:
        measured = measured_timeline(run_dir)
    except SpecError as error:
        st.error(escape(explain(text.language, error)), icon=":material/error:")
        return None
    if measured is None:
        st.caption(text("picture.unrecorded"))
    return measured


def _resume(asked: Asked, spec: Spec, checkpoint: str) -> None:
    """The settings of the run, to go on with for as many steps as a run has by default."""
    asked.set_all(spec.with_(resume=checkpoint, steps=None, epochs=None, fault=None))
    asked.run = None


def _show_wrong_run(wrong: SpecError, text: Catalogue) -> None:
    with st.container(key="wrong-run"):
        st.error(escape(explain(text.language, wrong)), icon=":material/error:")
        st.button(text("lab.wrong_run.clear"), key="clear", on_click=act(_clear))


def _show_other_run(runs_dir: Path, text: Catalogue) -> None:
    """That somebody else's run is going on here, and the way to it."""
    going_on = [status["run_id"] for status in archive.list_runs(runs_dir) if status["state"] not in archive.FINAL]
    if going_on:
        with st.container(horizontal=True, vertical_alignment="center", key="other-run"):
            st.caption(text("lab.other_run", run=going_on[0]))
            st.button(text("lab.show_run"), key="show-run", on_click=act(_watch, going_on[0]))


def _watch(asked: Asked, run_id: str) -> None:
    asked.run, asked.bare = run_id, True


def _show_run(asked: Asked, shown: Shown, run: Opened, text: Catalogue) -> None:
    """The run in the URL: live while it goes on, then what it came to."""
    status = archive.read_status(run.run_dir)
    done = status["state"] in archive.FINAL
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="run-line"):
        if done:
            st.markdown(state_badge(status["state"], text), width="content")
        st.markdown(f":gray[{run.handle.run_id}]", width="content")
        if done:
            st.button(
                text("lab.new_run"),
                key="clear",
                type="tertiary",
                icon=":material/close:",
                help=text("lab.new_run.help"),
                on_click=act(_clear),
            )
        saved = checkpoints.steps_of(run.run_dir) if done else []
        if saved:
            st.button(
                text("lab.resume"),
                key="resume",
                type="tertiary",
                icon=":material/resume:",
                help=text("lab.resume.help", step=saved[-1]),
                on_click=act(_resume, run.spec, f"{run.handle.run_id}:{saved[-1]}"),
            )
    told = [f":material/info: {notice}" for notice in notices(run.spec, text, run.elsewhere)]
    if told:
        st.caption("  \n".join(told))
    # "auto" became a device when the run was started.
    same = shown.error is None and shown.prediction.job.spec.with_(device=run.spec.device) == run.spec
    if not same:
        with st.container(horizontal=True, vertical_alignment="center", key="other-settings"):
            st.caption(text("lab.other_settings", run=run.handle.run_id))
            st.button(text("lab.its_settings"), key="its-settings", on_click=act(Asked.set_all, run.spec))
    if not done:
        show_live(run.handle, text, sparing=takes_all_cores(run.spec))
        _show_picture(shown, None, text)
        show_memory(shown, None, text)
        return
    if status["state"] in ("failed", "broken"):
        show_failure(status, run.run_dir, text)
    elif status["state"] == "stopped":
        st.info(text("lab.stopped"), icon=":material/stop_circle:")
    result = _result(run.run_dir, text)
    if result is not None:
        show_verdict(result, text, run.elsewhere)
    measured = _measured(run.run_dir, text) if same else None
    crowded = not run.elsewhere and oversubscribed(run.spec.to_dict())
    _show_picture(shown, measured, text, run.handle.run_id if same else "", crowded=crowded)
    if result is not None:
        # This machine's prediction is no measure of another's seconds.
        show_charts(result, shown, None if run.elsewhere else measured, text)
    # A run of earlier days has no memory in its result.
    held = ((result or {}).get("memory") or {}).get("measured") if same else None
    show_memory(shown, held, text)


def _name(shown: Shown) -> str:
    """Of files that show a prediction."""
    spec = shown.prediction.job.spec
    return f"{spec.mode}{spec.devices}-{spec.machine}"
