"""A prediction -> the row of numbers above its picture; and how seconds, bytes and shares are written on the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from engine.asking.settings import planned_only
from viz.figures.words import show_bytes, show_seconds
from viz.locales import Catalogue
from viz.pages.prediction import Shown

NOTHING = "–"  # Markdown would make a list of a hyphen


def duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else show_seconds(seconds)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f} %"


def _mean_step(summary: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, str]]]:
    """Where ranks do not meet in every step, and the one that is shown is longer than others."""
    mean = summary["mean_step_time"]
    return {"mean_step": (duration(mean), {})} if mean != summary["step_time"] else {}


def show_numbers(shown: Shown, text: Catalogue) -> None:
    """One predicted step, in five numbers; the parameters of a published model, and MFU where the peak is known."""
    summary = shown.summary
    machine = text.name("machine", summary["machine"])
    batch = {name: summary[name] for name in ("global_batch", "replicas", "local_batch")}
    over_ideal = percent(summary["bubble_over_ideal"])
    cells = {
        "step_time": (duration(summary["step_time"]), {"machine": machine} | batch),
        **_mean_step(summary),
        "bubble": (percent(summary["bubble_fraction"]), {"over_ideal": over_ideal}),
        "exposed": (percent(summary["exposed_communication_fraction"]), {}),
        "bytes": (show_bytes(sum(summary["bytes_sent"])), {"devices": summary["devices"]}),
        "memory": (show_bytes(max(summary["peak_memory"])), {}),
    }
    if planned_only(shown.prediction.job.spec):
        cells["params"] = (f"{summary['num_params'] / 1e9:.4g} B", {"number": f"{summary['num_params']:,}"})
    if (found := summary["mfu"])["full"] is not None:
        values = {name: percent(found[name]) for name in ("causal", "hfu")}
        rate = f"{found['peak_flop_rate'] / 1e12:.4g} TFLOP/s"
        cells["mfu"] = (percent(found["full"]), values | {"peak": rate})
    with st.container(horizontal=True, horizontal_alignment="distribute", gap="small", key="numbers"):
        for name, (value, words) in cells.items():
            st.metric(text(f"number.{name}"), value, help=text(f"number.{name}.help", **words), width="content")
