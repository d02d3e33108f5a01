"""A model, devices, a machine and a batch -> the fastest layouts that fit, as they are found; a way to each in the Lab.

A thread of its own looks, and never calls Streamlit: a fragment reads what it has found, twice a second, until it has
ended. Who asks for the same again, in another tab too, gets what was found.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import streamlit as st

from engine.asking.rules import SpecError
from engine.cost.machine import MACHINES
from engine.job import prepare
from engine.model.presets import PRESETS
from engine.search import Search, report
from engine.search.report import published_error, row_of
from engine.spec import MAX_DEVICES, MODELS, Spec
from viz import locales, player
from viz.figures.search import Found, name_of, plot_search, search_info, words
from viz.figures.words import show_bytes
from viz.locales import Catalogue
from viz.locales.engine import explain
from viz.pages.numbers import duration, percent
from viz.pages.settings import escape, show_head
from viz.pages.state import Asked, read_url, write_url

if TYPE_CHECKING:
    import plotly.graph_objects as go

REFRESH = 0.5  # seconds
POINTS = "search-points"  # the chart in which a point can be picked
FIRST = {"model": "llama3_8b", "devices": 8, "machine": "h100", "global_batch": 16}  # unless the Lab has another
MOST_BATCH = Spec.__dataclass_fields__["global_batch"].metadata["high"]
SHOWN_PARTS = 3  # of why a layout is slower
SMALL = 0.005  # of a step: what is less is no reason

Wanted = tuple[tuple[str, Any], ...]


class Looking:
    """A search under way. `found` is its report when it has ended, `error` what came in its way."""

    def __init__(self, wanted: Wanted):
        self.search = Search(Spec(**dict(wanted)), {name for name, _ in wanted})
        self.stopped, self.found, self.error = False, None, None
        self._rows: dict[str, dict[str, Any]] = {}  # of layouts that a person has asked for
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        try:
            for _ in self.search.steps():
                if self.stopped:
                    break
            self.found = report(self.search)
        except SpecError as error:
            self.error = error

    def row(self, name: str | None) -> tuple[int, dict[str, Any]] | None:
        """Of a layout that was found: how many are as fast, itself one of them, and what its report says; None where
        there is none of this name."""
        layouts = sorted(self.search.fastest.values(), key=lambda one: one.step_time)
        number = next((i for i, one in enumerate(layouts, 1) if name_of(one.settings) == name), None)
        if number is None:
            return None
        if number <= len(self.found["best"]):
            return number, self.found["best"][number - 1]
        if name not in self._rows:
            self._rows[name] = row_of(self.search, layouts[number - 1], self.found)
        return number, self._rows[name]

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()


@st.cache_resource(max_entries=8, show_spinner=False)
def _looking(wanted: Wanted) -> Looking:
    return Looking(wanted)


def show(lab: st.Page) -> None:
    asked = read_url("search")
    write_url(asked)
    text = locales.text(asked.language)
    player.load()
    show_head(asked, text("search.title"))
    st.markdown(text("search.lead"))
    wanted = _show_choices(asked, text)
    begun = st.session_state.get("search-begun")
    looking = _looking(begun) if begun is not None else None
    _show_button(wanted, begun, looking, text)
    if looking is None:
        return
    if begun != wanted:
        named = {name: text.name(name, value) for name, value in begun if name in ("model", "machine")}
        st.info(text("search.of", **dict(begun) | named), icon=":material/history:")
    if not looking.ended:
        _show_going_on(looking, text)
    elif looking.error is not None:
        st.error(escape(explain(text.language, looking.error)), icon=":material/error:")
    elif looking.found is not None:
        _show_found(looking, lab, asked.language, text)
    else:
        st.error(text("search.broken"), icon=":material/error:")


def _first(asked: Asked) -> dict[str, Any]:
    """What is asked at first: of what the Lab shows, where that is a published model."""
    with contextlib.suppress(SpecError):  # the Lab says what is wrong there
        if asked.model in PRESETS:
            spec = prepare(Spec.from_params(asked.settings)).spec
            here = {"machine": FIRST["machine"]} if spec.machine in ("local", "unit") else {}
            return {name: getattr(spec, name) for name in FIRST} | here
    return dict(FIRST)


def _show_choices(asked: Asked, text: Catalogue) -> Wanted:
    if "search-choices" not in st.session_state:
        st.session_state["search-choices"] = _first(asked)
    kept = st.session_state["search-choices"]
    places = st.columns(4, vertical_alignment="bottom")
    with places[0]:
        kept["model"] = st.selectbox(
            text("setting.model"), MODELS, MODELS.index(kept["model"]), format_func=lambda m: text.name("model", m),
            key="search-model",
        )  # fmt: skip
    for place, name, most in ((places[1], "devices", MAX_DEVICES), (places[3], "global_batch", MOST_BATCH)):
        with place:
            kept[name] = st.number_input(text(f"setting.{name}"), 1, most, kept[name], key=f"search-{name}")
    with places[2]:
        names = list(MACHINES)
        kept["machine"] = st.selectbox(
            text("setting.machine"), names, names.index(kept["machine"]), format_func=lambda m: text.name("machine", m),
            key="search-machine",
        )  # fmt: skip
    return tuple(kept.items())


def _show_button(wanted: Wanted, begun: Wanted | None, looking: Looking | None, text: Catalogue) -> None:
    """Search, or Stop while that goes on."""
    going_on = looking is not None and not looking.ended
    if going_on and begun == wanted:
        st.button(
            text("search.stop"), key="search-stop", type="primary", icon=":material/stop:", on_click=_stop,
            args=(begun,), disabled=looking.stopped,
        )  # fmt: skip
    else:
        st.button(
            text("search.start"), key="search-start", type="primary", icon=":material/search:", on_click=_start,
        )  # fmt: skip


def _start() -> None:
    """What was stopped is looked for anew; one search a visitor. A typed value comes with the click after it, so
    what is wanted is what the fields hold now, and not what they held when the button was drawn."""
    wanted = tuple((name, st.session_state[f"search-{name}"]) for name in FIRST)
    begun = st.session_state.get("search-begun")
    if begun is not None and begun != wanted:
        _looking(begun).stopped = True
    if (known := _looking(wanted)).stopped:
        _looking.clear(wanted)
        del known
    st.session_state["search-begun"] = wanted


def _stop(begun: Wanted) -> None:
    _looking(begun).stopped = True


def _show_going_on(looking: Looking, text: Catalogue) -> None:
    @st.fragment(run_every=REFRESH)
    def going_on() -> None:
        if looking.ended:
            st.rerun()
        search = looking.search
        told = text(
            "search.progress", decided=f"{search.decided:,}", total=f"{search.total:,}", number=search.simulated
        )
        best = search.best
        told += " · " + text("search.fastest", time=duration(best[0].step_time)) if best else ""
        st.progress(min(1.0, search.decided / max(1, search.total)), text=told)
        if best:
            _show_chart(looking, text)

    with st.container(border=True, key="search-live"):
        going_on()


def _show_chart(looking: Looking, text: Catalogue) -> None:
    player.chart(_figure(looking, text), key="search-chart", alt=text("search.chart"))


def _show_points(looking: Looking, lab: st.Page, language: str, text: Catalogue) -> None:
    """The chart, when all is found: a click on a point shows its layout."""
    name = player.picked(POINTS)
    player.chart(_figure(looking, text, name), key=POINTS, alt=text("search.chart"), picks=True)
    picked = looking.row(name)
    if picked is None:
        st.caption(text("search.pick"))
    else:
        _show_row(*picked, "search-picked", lab, language, text)


def _figure(looking: Looking, text: Catalogue, picked: str | None = None) -> go.Figure:
    search = looking.search
    found = [Found(one.settings, one.step_time, one.peak_memory) for one in list(search.fastest.values())]
    return plot_search(search_info(found, search.machine.memory_size, published_error(search)), text, picked)


def _show_found(looking: Looking, lab: st.Page, language: str, text: Catalogue) -> None:
    found = looking.found
    numbers = {name: f"{value:,}" for name, value in found["layouts"].items()}
    st.caption(
        text("search.counts", **numbers) + ("" if found["finished"] else " " + text("search.stopped", **numbers))
    )
    rows = found["best"]
    if not rows:
        nothing = text("search.nothing", capacity=show_bytes(found["capacity"] or 0))
        if found["smallest"] is not None:
            nothing += " " + text("search.nothing.smallest", size=show_bytes(found["smallest"]))
        st.warning(nothing if found["too_large"] else text("search.none"), icon=":material/memory:")
        _show_refusals(looking, text)
        return
    error = found["error"]
    if error is None:
        st.info(text("search.error.unknown"), icon=":material/info:")
    else:
        tied = sum(row["tied"] for row in rows)
        told = text("search.tied" if tied > 1 else "search.first", number=tied, error=percent(error))
        st.info(told, icon=":material/balance:")
    _show_points(looking, lab, language, text)
    st.markdown(f"#### {text('search.best')}")
    for number, row in enumerate(rows, 1):
        _show_row(number, row, f"search-row-{number}", lab, language, text)
    _show_refusals(looking, text)


def _show_row(number: int, row: dict[str, Any], key: str, lab: st.Page, language: str, text: Catalogue) -> None:
    link = row["params"] | ({} if language == locales.DEFAULT else {"lang": language})
    with st.container(border=True, key=key):
        head, way = st.columns([5, 1.2], vertical_alignment="center")
        tie = f" :blue-badge[{text('search.tie')}]" if row["tied"] and number > 1 else ""
        head.markdown(f"**{number}.** {escape(words(row['settings'], text))}{tie}")
        way.page_link(lab, label=text("search.open"), icon=":material/open_in_new:", query_params=link)
        memory, capacity = show_bytes(row["peak_memory"]), row["capacity"]
        values = {
            "time": f"**{duration(row['step_time'])}**",
            "memory": memory if capacity is None else text("search.memory", size=memory, capacity=show_bytes(capacity)),
            "bubble": percent(row["bubble_fraction"]),
            "exposed": percent(row["exposed_communication_fraction"]),
            "speed": f"{row['tokens_per_second'] or row['samples_per_second']:,.0f}",
            "mfu": percent(row["mfu"]),
        }
        st.markdown(text("search.row.tokens" if row["tokens_per_second"] else "search.row", **values))
        if number > 1:
            st.caption(_slower(row, text))


def _slower(row: dict[str, Any], text: Catalogue) -> str:
    by = row["slower_by"]
    parts = sorted(by["parts"].items(), key=lambda part: -abs(part[1]))[:SHOWN_PARTS]
    told = [
        f"{text(f'search.part.{name}')} {'+' if value > 0 else '−'}{duration(abs(value))}"
        for name, value in parts
        if abs(value) >= SMALL * row["step_time"]
    ]
    return text("search.slower", time=duration(by["seconds"]), parts=", ".join(told) or text("search.part.none"))


def _show_refusals(looking: Looking, text: Catalogue) -> None:
    search = looking.search
    if not search.refused:
        return
    with st.expander(text("search.refused", number=f"{search.refused.total():,}")):
        for rule, number in search.refused.most_common():
            example = escape(explain(text.language, search.refusals[rule]))
            st.markdown(f"- {text('search.refusal', number=f'{number:,}', example=example)}")
