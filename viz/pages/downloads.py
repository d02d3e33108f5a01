"""What is shown -> files to take away: a trace for Perfetto, a page that plays without a network, a table.

Each is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from engine.export import to_csv, to_perfetto
from engine.spec import Spec
from engine.timeline import Timeline
from viz import player
from viz.locales import Catalogue


def show_downloads(name: str, spec: Spec, timeline: Timeline, payload: Mapping[str, Any], text: Catalogue) -> None:
    """`name` begins the files' names; `payload` is that of the picture on the page."""
    title = text("player.page_title", mode=text(f"mode.{spec.mode}"), devices=spec.devices)
    files = {
        "trace": (lambda: to_perfetto(timeline), ".trace.json", "application/json", ":material/timeline:"),
        "page": (lambda: player.page(payload, title, text.language), ".html", "text/html", ":material/movie:"),
        "table": (lambda: to_csv(timeline), ".csv", "text/csv", ":material/table:"),
    }
    drawn, total = int((timeline.weights > 0).sum()), timeline.world_size  # others do the same at the same times
    about = "" if drawn == total else " " + text("downloads.by_role", drawn=drawn, total=total)
    with st.container(horizontal=True, gap="small", key="downloads"):
        for kind, (make, ending, mime, icon) in files.items():
            st.download_button(
                text(f"downloads.{kind}"),
                make,
                file_name=name + ending,
                mime=mime,
                icon=icon,
                type="tertiary",
                key=f"download-{kind}",
                help=text(f"downloads.{kind}.help") + about * (kind != "page"),
                on_click="ignore",
            )
