"""A payload -> the player on a Streamlit page (`show`), or a standalone page that plays offline (`page`); and a figure
that stands still -> a chart beside it (`chart`); a run's address -> how far it is, while it goes on (`live`); a
language -> a page that says so and keeps its focus (`attend`).

Figures are drawn by one plotly.js. Streamlit's own st.plotly_chart would load a second one: a third of a page's load.
"""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viz.theme import THEME as THEME_COLOURS

if TYPE_CHECKING:
    import plotly.graph_objects as go

HERE = Path(__file__).parent
PLAYER = ("plotly.js", "svg.js", "telling.js", "player.js")

# The theme of an exported page: the names are those that Streamlit gives its own colours.
THEME = """:root { color-scheme: light dark; --st-text-color: #1B2530; --st-background-color: #FBFCFD;
  --st-primary-color: #0072B2; --st-secondary-background-color: #F0F3F6; --st-border-color: #C9D1D9;
  --st-font: "Source Sans 3", system-ui, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif }
@media (prefers-color-scheme: dark) { :root { --st-text-color: #E4EAF0; --st-background-color: #0E141C;
  --st-primary-color: #267ABA; --st-secondary-background-color: #18212C; --st-border-color: #3B4856 } }
body { margin: 1.2rem auto; max-width: 1500px; padding: 0 1.2rem; background: var(--st-background-color);
  color: var(--st-text-color); font-family: var(--st-font) }
h1 { font-size: 1.5rem; font-weight: 600 }"""


def show(payload: dict[str, Any], key: str, height: int | None = None) -> None:
    """Mount the player in the running Streamlit page. `height` in pixels; by default what the picture needs.

    A rerun with the same `key` and an equal payload leaves a playing animation alone.
    """
    load()
    size = {} if height is None else {"height": height}
    _component("player", PLAYER)(key=key, data=payload, **size)


def load() -> None:
    """Bring plotly.js to the running Streamlit page: once in a script run that draws with it.

    It travels once a session, then as a hash: Streamlit sends a component's code only when it is new.
    """
    _loader()(key="lockstep-plotly", height=1)


def chart(figure: go.Figure, key: str, alt: str, *, picks: bool = False) -> None:
    """Draw `figure` on a page that has `load`ed. `alt` says what it is to those who cannot see it. `picks`: a click on
    a point runs the page again, which finds the point's `customdata` by `picked`."""
    plain = json.loads(figure.to_json())
    payload = {"figure": {"data": plain["data"], "layout": plain["layout"]}, "theme": THEME_COLOURS, "alt": alt}
    known = {"on_picked_change": lambda: None} if picks else {}
    _component("chart", ("plotly.js", "svg.js", "chart.js"))(key=key, data=payload | {"picks": picks}, **known)


def live(address: str, key: str, *, sparing: str) -> None:
    """What a run that goes on has come to, which the page itself asks for at `address`; when it has ended, the page
    runs again. `sparing`: why the player beside it draws seldom meanwhile; empty where it need not."""
    data = {"address": address, "sparing": sparing}
    _component("live", ("live.js",))(key=key, data=data, on_ended_change=lambda: None)


def attend(language: str) -> None:
    """Tell the browser the page's language, and keep the keyboard's focus where a script run takes away what had it."""
    _component("page", ("page.js",))(key="lockstep-page", data={"language": language}, height=1)


def picked(key: str) -> Any:
    """What was clicked last in the chart with this key; None before."""
    import streamlit as st

    return st.session_state.get(key, {}).get("picked")


@functools.cache
def _loader() -> Any:
    import plotly.offline
    import streamlit.components.v2 as components

    plotly_js = plotly.offline.get_plotlyjs() + "\nexport default function () {}\n"
    return components.component("lockstep_plotly", js=plotly_js, isolate_styles=False)


@functools.cache
def _component(name: str, scripts: tuple[str, ...]) -> Any:
    import streamlit.components.v2 as components

    css = _read("player.css")
    return components.component(f"lockstep_{name}", js=_script(scripts), css=css, isolate_styles=False)


def _script(names: tuple[str, ...] = PLAYER) -> str:
    """One module, since a component is given as one text."""
    return "\n".join(map(_read, names))


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def page(payload: dict[str, Any], title: str = "Lockstep", language: str = "en") -> str:
    """One HTML file with everything in it: no request leaves the viewer's machine."""
    import plotly.offline

    script = _script().replace("export default function (", "function mountComponent(")
    script = re.sub(r"^export ", "", script, flags=re.MULTILINE)
    # "<" would let a label end the element that it stands in.
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="{html.escape(language)}"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{THEME}
{_read("player.css")}</style>
<h1>{title}</h1><div id="player"></div>
<script>{plotly.offline.get_plotlyjs()}</script>
<script type="application/json" id="payload">{data}</script>
<script>{script}
mountPlayer(document.getElementById("player"), JSON.parse(document.getElementById("payload").textContent));
</script></html>
"""
