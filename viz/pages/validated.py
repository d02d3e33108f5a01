"""What predictions were held to: published measurements beside them, and set by set how far off they are."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from engine.validate.kept import Kept, read
from engine.validate.targets import WHY, explained
from viz import locales, player
from viz.figures.validated import (
    QUANTITIES,
    SetError,
    plot_set_errors,
    plot_validated,
    points_of,
    set_errors,
    validated_info,
)
from viz.figures.words import show_error
from viz.locales import Catalogue
from viz.locales.engine import phrase
from viz.pages.numbers import NOTHING
from viz.pages.settings import escape, show_head
from viz.pages.state import read_url, write_url

if TYPE_CHECKING:
    import plotly.graph_objects as go

COMMIT = "[0-9a-f]{7,40}"
SOURCES = 4  # of a set, which are told apart
REASONS = 6  # of rows that were not used, which are told of a set


@st.cache_resource(show_spinner=False)
def _kept() -> Kept:
    return read()


def show() -> None:
    asked = read_url("validated")
    write_url(asked)
    text, kept = locales.text(asked.language), _kept()
    player.load()
    show_head(asked, text("validated.title"))
    _show_lead(kept, text)
    left, right = st.columns(2, gap="large")
    with left:
        _show_points(kept, text)
    with right:
        st.markdown(f"#### {text('validated.by_set')}", help=text("validated.by_set.help"))
        player.chart(_of_sets(text.language), key="set-errors-chart", alt=text("validated.by_set"))
    _show_targets(kept, text)
    _show_sets(kept, text)
    _show_beyond_time(kept, text)
    _show_not_used(kept, text)
    _show_origin(kept, text)


def _show_lead(kept: Kept, text: Catalogue) -> None:
    report, overall = kept.report, kept.report["overall"]
    sets = [each for each in report["sets"] if each["used"]]
    devices = [row.devices for row in kept.rows]
    st.markdown(
        text(
            "validated.lead", used=report["used"], entries=report["entries"], sets=len(sets), few=min(devices),
            many=f"{max(devices):,}", new=overall["rows"],
        )
    )  # fmt: skip
    met = sum(aim["met"] for aim in report["targets"])
    errors = [abs(point.error) for point in points_of(kept.rows, "time") if point.row.counts]
    numbers = {
        "error": percent(overall["mape"]),
        "median": percent(statistics.median(errors)),
        "bias": percent(overall["bias"], signed=True),
        "floor": percent(overall["floor_mape"]),
        "targets": text("validated.of", part=met, all=len(report["targets"])),
    }
    with st.container(horizontal=True, gap="large", key="validated-numbers"):
        for name, value in numbers.items():
            st.metric(text(f"validated.{name}"), value, help=text(f"validated.{name}.help"), width="content")


def _show_points(kept: Kept, text: Catalogue) -> None:
    st.markdown(f"#### {text('validated.points')}", help=text("validated.points.help"))
    names = [each["set"] for each in kept.report["sets"] if each["used"]]
    what, which = st.columns([2, 3], vertical_alignment="bottom")
    with what:
        quantity = st.segmented_control(
            text("validated.quantity"),
            QUANTITIES,
            default="time",
            required=True,
            format_func=lambda name: text(f"validated.quantity.{name}"),
            key="quantity",
            label_visibility="collapsed",
        )
    known = {point.row.set for point in points_of(kept.rows, quantity)}
    with which:
        chosen = st.selectbox(
            text("validated.set"),
            [None, *(name for name in names if name in known)],
            format_func=lambda name: name or text("validated.all_sets"),
            key=f"set-{quantity}",
            label_visibility="collapsed",
        )
    player.chart(_points(quantity, chosen, text.language), key="validated-chart", alt=text("validated.points"))


@st.cache_resource(max_entries=64, show_spinner=False)
def _points(quantity: str, chosen: str | None, language: str) -> go.Figure:
    return plot_validated(validated_info(_kept().rows, quantity, chosen), locales.text(language))


@st.cache_resource(max_entries=4, show_spinner=False)
def _of_sets(language: str) -> go.Figure:
    found: tuple[SetError, ...] = set_errors(_kept().rows, _kept().report["sets"])
    return plot_set_errors(found, locales.text(language))


def _show_targets(kept: Kept, text: Catalogue) -> None:
    st.markdown(f"#### {text('validated.targets')}")
    heads = [text(f"validated.{name}") for name in ("aim", "value", "limit", "why")]
    lines = []
    for aim in kept.report["targets"]:
        badge = ":green-badge[:material/check: {}]" if aim["met"] else ":red-badge[:material/close: {}]"
        lines.append([
            badge.format(text("validated.met" if aim["met"] else "validated.missed")),
            text(f"validated.aim.{aim['aim']}", set=f"`{aim['set']}`"),
            *amounts(aim, text),
            _why(aim, text),
        ])  # fmt: skip
    _table(["", *heads], lines, "llrrl", key="validated-targets")


def amounts(aim: Mapping[str, Any], text: Catalogue) -> tuple[str, str]:
    """What a target came to, and its limit: with so many digits that one which is missed does not look as if met."""
    for more in range(6):
        value, limit = (_amount(aim["aim"], aim[name], more, text) for name in ("value", "limit"))
        if aim["met"] or value != limit:
            break
    return value, limit


def _amount(aim: str, value: float, more: int, text: Catalogue) -> str:
    if aim == "order":
        return str(value)
    if aim == "scaling":
        return text("validated.in_points", value=f"{value:.{1 + more}f}")
    return f"{value:.{2 + more}f}" if aim == "floor" else percent(value, digits=1 + more)


def _why(aim: Mapping[str, Any], text: Catalogue) -> str:
    """The reason that was found, in the visitor's language; none where none stands out."""
    because = aim["because"]
    if because is None:
        return "" if aim["met"] else text("validated.why.none")
    if "property" in because:
        because = because | {"property": phrase(text.language, because["property"])}
    return escape(explained(because, {code: text.entries[f"validated.why.{code}"] for code in WHY}))


def _show_sets(kept: Kept, text: Catalogue) -> None:
    st.markdown(f"#### {text('validated.sets')}", help=text("validated.sets.help"))
    heads = [text(f"validated.{name}") for name in ("set", "source", "rows", "error", "bias", "floor", "share")]
    lines = []
    for each in kept.report["sets"]:
        if not each["used"]:
            continue
        notes = [text(f"validated.note.{note}") for note in ("fitted", "weak") if each[note]]
        notes += [] if each["dense"] else [text("validated.note.experts")]
        if each["fitted_rows"] and not each["fitted"]:
            notes.append(text("validated.note.some_fitted", rows=each["fitted_rows"]))
        count = text("validated.of", part=each["used"], all=each["rows"])
        told = f"`{each['set']}`" + "".join(f" :gray-badge[{note}]" for note in notes)
        lines.append([told, escape(_publisher(each["source"])), count, *_errors(each["time"])])
        if routed := each["time_of_experts"]:
            told = f"`{each['set']}` :gray-badge[{text('validated.note.experts')}]"
            lines.append([told, "", str(routed["rows"]), *_errors(routed)])
    for name in ("overall", "overall_experts"):
        if found := kept.report[name]:
            lines.append([f"**{text(f'validated.{name}')}**", "", str(found["rows"]), *_errors(found)])
    _table(heads, lines, "llrrrrr", key="validated-sets")


def _errors(time: Mapping[str, Any] | None) -> list[str]:
    if not time:
        return [NOTHING] * 4
    share = time["ratio_to_floor"]
    shown = [percent(time["mape"]), percent(time["bias"], signed=True), percent(time["floor_mape"])]
    return [*shown, NOTHING if share is None else f"{share:.2f}"]


def _publisher(source: str) -> str:
    """The first two parts of a source, commits left out."""
    parts = [part for part in source.split(", ") if not re.fullmatch(COMMIT, part)]
    return textwrap.shorten(", ".join(parts[:2]), 60, placeholder=" …")


def _show_beyond_time(kept: Kept, text: Catalogue) -> None:
    """Memory, schedules, layouts, scale and collectives: what a mean error of time cannot tell."""
    sets = kept.report["sets"]
    lines = {
        "memory": [
            text(
                "validated.memory.out" if kind == "out_of_memory" else "validated.memory.one", set=f"`{each['set']}`",
                kind=text(f"validated.memory.{kind}"), rows=found["rows"], **_told(found),
            )
            for each in sets for kind, found in (each["memory"] or {}).items()
        ],
        "schedules": [
            text(
                "validated.schedules.one", set=f"`{each['set']}`", right=found["cells_right"], cells=found["cells"],
                worst=percent(found["worst_ratio_error"]),
            )
            for each in sets if (found := each["schedules"])
        ],
        "layouts": [
            text(
                "validated.layouts.one", set=f"`{each['set']}`", families=found["families"], rows=found["rows"],
                correlation=f"{found['spearman']:.2f}", worst=percent(found["worst_regret"]),
            )
            for each in sets if (found := each["layouts"])
        ],
        "scaling": [
            text(
                "validated.scaling.one", set=f"`{each['set']}`", part=escape(one["part"]), few=one["from_devices"],
                many=f"{one['to_devices']:,}", measured=percent(one["measured"]), predicted=percent(one["predicted"]),
            )
            for each in sets for one in each["scaling"]
        ],
        "collectives": [
            text("validated.collectives.one", set=f"`{each['set']}`", rows=found["rows"], **_told(found))
            for each in sets if (found := each["collectives"])
        ],
    }  # fmt: skip
    st.markdown(f"#### {text('validated.beyond')}")
    for name, told in lines.items():
        if told:
            with st.expander(text(f"validated.{name}", count=len(told)), key=f"validated-{name}"):
                st.markdown("\n".join(f"- {line}" for line in told))


def _told(found: Mapping[str, Any]) -> dict[str, str]:
    if "mape" not in found:
        return {"predicted": str(found["predicted"])}
    return {"error": percent(found["mape"]), "bias": percent(found["bias"], signed=True)}


def _show_not_used(kept: Kept, text: Catalogue) -> None:
    told = {}
    for each in kept.report["sets"]:
        most = sorted(each["not_used"], key=lambda why: -why["rows"])[:REASONS]
        told[each["set"]] = [f"{why['rows']} × {phrase(text.language, why['reason'])}" for why in most]
    with st.expander(text("validated.not_used", count=kept.report["not_used"]), key="validated-not-used"):
        _list(told)


def _show_origin(kept: Kept, text: Catalogue) -> None:
    made, told = kept.made, {}
    for each in kept.report["sets"]:
        sources = [each["source"], *(row.source for row in kept.rows if row.set == each["set"])]
        told[each["set"]] = [*dict.fromkeys(sources)][:SOURCES] if each["used"] else []
    with st.expander(text("validated.sources"), key="validated-sources"):
        _list(told)
    st.caption(text("validated.made", day=made["on"], file=f"`{made['file']}`", hash=made["sha256"][:12]))
    st.code(made["command"], language=None)


def _list(told: Mapping[str, Sequence[str]]) -> None:
    """Of each set what there is to say."""
    st.markdown("\n".join(f"- `{name}`: {escape('; '.join(said))}" for name, said in told.items() if said))


def percent(value: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """Not broken over two lines."""
    if value is None:
        return NOTHING
    return show_error(value, 1) if signed else f"{100 * value:.{digits}f}\u00a0%"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], sides: str, key: str) -> None:
    """Markdown; `sides`: l or r of each column."""
    cell: Callable[[str], str] = lambda value: value.replace("|", "\\|").replace("\n", " ")  # noqa: E731
    rows = [heads, ["---:" if side == "r" else "---" for side in sides], *lines]
    with st.container(key=key):
        st.markdown("\n".join("| " + " | ".join(map(cell, row)) + " |" for row in rows))
