"""The lab as AppTest has it -> what a test asks about: its settings, numbers, running text and link."""

from __future__ import annotations

import json
from typing import Any

from streamlit.testing.v1 import AppTest


def keys(app: AppTest) -> set[str]:
    """The settings on the page, by their names in the URL."""
    widgets = [*app.radio, *app.selectbox, *app.number_input, *app.text_input, *app.toggle]
    return {widget.key.removeprefix("set-") for widget in widgets if (widget.key or "").startswith("set-")}


def numbers(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def words(app: AppTest) -> str:
    """All running text of the main part, also what is told on demand."""
    parts = [*app.main.markdown, *app.main.caption, *app.main.error, *app.main.warning, *app.main.info, *app.main.code]
    return "\n".join(f"{part.value} {getattr(part.proto, 'help', '')}" for part in parts).replace("\\", "")


def query(app: AppTest) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value[-1] for name, value in app.query_params.items()}


def charts(app: AppTest) -> list[dict[str, Any]]:
    """The figures that stand still, in Plotly's JSON."""
    found = [part.proto for part in app.get("bidi_component")]
    return [json.loads(part.json)["figure"] for part in found if part.component_name == "lockstep_chart"]
