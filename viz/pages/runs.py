"""The run folders -> a list of earlier runs, newest first, to open again, compare or delete; then the recorded ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from engine import archive
from engine.asking.rules import SpecError
from viz import locales
from viz.locales import Catalogue
from viz.pages.comparison import mark, show_comparison
from viz.pages.live import state_badge
from viz.pages.numbers import NOTHING, duration
from viz.pages.settings import show_head
from viz.pages.state import Asked, act, read_url, write_url

PAGE = 12  # rows
WIDTHS = (0.4, 2.6, 2.4, 0.9, 1.1, 1.1, 1.1, 1.3, 1.2, 0.9)
HEADS = ("choose", "when", "mode", "model", "state", "step_time", "parity", "conformance")


def show(runs_dir: Path, lab: st.Page) -> None:
    asked = read_url("runs")
    write_url(asked)
    text = locales.text(asked.language)
    show_head(asked, text("runs.title"))
    own = archive.list_runs(runs_dir)
    recorded = archive.list_runs(runs_dir / archive.GALLERY)
    if len(own) + len(recorded) > 1:
        st.caption(text("runs.compare"))
    if own:
        with st.container(key="own"):
            _show_list(own, runs_dir, lab, asked, text, key="own")
    else:
        st.caption(text("runs.none"))
        language = {} if asked.language == locales.DEFAULT else {"lang": asked.language}
        st.page_link(lab, label=text("runs.start"), icon=":material/play_arrow:", query_params=language)
    if recorded:
        st.markdown(f"#### {text('runs.gallery')}")
        st.caption(text("runs.gallery.help"))
        with st.container(key="gallery"):
            _show_list(recorded, runs_dir / archive.GALLERY, lab, asked, text, key="gallery")
    folders = [runs_dir / run["run_id"] for run in own]
    folders += [runs_dir / archive.GALLERY / run["run_id"] for run in recorded]
    chosen = [folder for folder in folders if st.session_state.get(f"choose-{folder.name}")]
    if len(chosen) > 1:
        show_comparison(chosen, text)


def _show_list(
    found: list[dict[str, Any]], folder: Path, lab: st.Page, asked: Asked, text: Catalogue, key: str
) -> None:
    with st.container(key=f"heads-{key}"):
        for place, name in zip(st.columns(WIDTHS), HEADS, strict=False):
            if name != "choose":
                place.caption(text(f"runs.{name}"))
    pages = -(-len(found) // PAGE)
    number = min(st.session_state.get(f"page-{key}", 1), pages)
    for status in found[(number - 1) * PAGE : number * PAGE]:
        _show_row(status, folder, lab, asked, text)
    if pages > 1:
        st.pagination(pages, key=f"page-{key}")


def _show_row(status: Mapping[str, Any], folder: Path, lab: st.Page, asked: Asked, text: Catalogue) -> None:
    run_id = status["run_id"]
    result = archive.read_result(folder / run_id) or {}
    link = {"run": run_id} | ({} if asked.language == locales.DEFAULT else {"lang": asked.language})
    with st.container(key=f"run-{run_id}"):
        choose, when, mode, model, state, step_time, parity, conformance, way, bin = st.columns(
            WIDTHS, vertical_alignment="center"
        )
        choose.checkbox(text("runs.choose", run=run_id), key=f"choose-{run_id}", label_visibility="collapsed")
        when.markdown(f"{_when(status)}  \n:small[:gray[{run_id}]]")
        if status["mode"]:
            mode.markdown(text("runs.mode_devices", mode=text(f"mode.{status['mode']}"), devices=status["devices"]))
        model.markdown(_model(folder / run_id, text))
        state.markdown(state_badge(status["state"], text))
        step_time.markdown(duration(result.get("step_time")))
        parity.markdown(mark(result, "parity", text))
        conformance.markdown(mark(result, "conformance", text))
        way.page_link(lab, label=text("runs.open"), icon=":material/open_in_new:", query_params=link)
        if folder.name != archive.GALLERY:
            with bin.popover(
                text("runs.delete"), icon=":material/delete:", help=text("runs.delete"), key=f"delete-{run_id}"
            ):
                st.markdown(text("runs.delete.sure", run=run_id))
                st.button(text("runs.delete.yes"), key=f"yes-{run_id}", on_click=act(_delete, folder, run_id))


def _when(status: Mapping[str, Any]) -> str:
    """In the server's own time zone, as in the run's id."""
    if status["created"] is None:
        return NOTHING
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["created"]))


def _model(run_dir: Path, text: Catalogue) -> str:
    try:
        return text.name("model", archive.read_spec(run_dir).model)
    except SpecError:
        return NOTHING


def _delete(asked: Asked, folder: Path, run_id: str) -> None:
    try:
        archive.delete_run(folder, run_id)
    except SpecError:  # another tab was quicker
        return
    if asked.run == run_id:
        asked.run = None
