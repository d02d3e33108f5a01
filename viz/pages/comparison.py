"""Runs that have ended -> what they came to, side by side, with the settings in which they differ and their losses."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import streamlit as st

from engine import archive
from engine.spec import Spec, SpecError
from viz import player
from viz.figures.losses import plot_losses, result_losses
from viz.locales import Catalogue
from viz.pages.numbers import NOTHING, duration, percent
from viz.pages.settings import escape
from viz.pages.state import filled

MOST = 4  # runs side by side


def show_comparison(folders: list[Path], text: Catalogue) -> None:
    """The first of `folders`, as many as fit."""
    folders = folders[:MOST]
    results = [archive.read_result(folder) or {} for folder in folders]
    with st.container(border=True, gap="xxsmall", key="comparison"):
        st.markdown(f"##### {text('comparison.title')}")
        _show_row("", [f"**{folder.name}**" for folder in folders])
        for name, values in _differences(folders, text):
            _show_row(name, values)
        for key, show in VALUES.items():
            _show_row(text(key), [show(result, text) for result in results])
        curves = {
            folder.name: result_losses(result)
            for folder, result in zip(folders, results, strict=True)
            if result.get("losses")
        }
        if curves:
            player.load()
            player.chart(plot_losses(curves, text), key="comparison-losses", alt=text("charts.losses"))


def _show_row(name: str, values: list[str]) -> None:
    head, *places = st.columns([1.2] + [2.0] * len(values))
    if name:
        head.markdown(f":gray[{name}]")
    for place, value in zip(places, values, strict=True):
        place.markdown(value)


def _differences(folders: list[Path], text: Catalogue) -> list[tuple[str, list[str]]]:
    """(a setting's name, its value in each run), for the settings in which the runs differ."""
    specs = [_spec(folder) for folder in folders]
    found = []
    for field in fields(Spec):
        values = [getattr(spec, field.name, None) for spec in specs]
        if any(value != values[0] for value in values):
            name = text("settings.mode" if field.name == "mode" else f"setting.{field.name}")
            found.append((name, [_say(field.name, value, text) for value in values]))
    return found


def _spec(folder: Path) -> Spec | None:
    try:
        return filled(archive.read_spec(folder))
    except SpecError:  # a broken folder: nothing is known of its settings
        return None


def _say(setting: str, value: Any, text: Catalogue) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return text("comparison.yes" if value else "comparison.no")
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return escape(text.name(setting, str(value)))


def mark(result: dict[str, Any] | None, name: str, text: Catalogue) -> str:
    """A badge for what was proved, as on the run's own page; a dash where nothing was compared."""
    ok = ((result or {}).get(name) or {}).get("ok")
    if ok is None:
        return NOTHING
    word = text(f"{name}.{'ok' if ok else 'bad'}")
    return f":green-badge[:material/check: {word}]" if ok else f":red-badge[:material/close: {word}]"


def _rate(result: dict[str, Any], text: Catalogue) -> str:
    rate = result.get("samples_per_second")
    return text("learning.rate", rate=f"{rate:,.0f}") if rate else NOTHING


def _losses(result: dict[str, Any], text: Catalogue) -> str:
    losses = [loss for loss in result.get("losses", ()) if loss is not None]
    return f"{losses[0]:.3g} → {losses[-1]:.3g}" if losses else NOTHING


VALUES = {
    "runs.step_time": lambda result, text: duration(result.get("step_time")),
    "comparison.predicted": lambda result, text: duration(result.get("predicted_step_time")),
    "comparison.rate": _rate,
    "charts.losses": _losses,
    "comparison.accuracy": lambda result, text: percent(result.get("validation_accuracy")),
    "runs.parity": lambda result, text: mark(result, "parity", text),
    "runs.conformance": lambda result, text: mark(result, "conformance", text),
}
