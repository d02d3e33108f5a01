"""Traces of somebody's own training, from PyTorch's profiler -> who comes last to its collectives and messages."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import streamlit as st

from engine.analysis import stragglers, traces
from engine.asking.rules import SpecError
from viz import locales, player
from viz.figures.late import plot_late
from viz.locales import Catalogue
from viz.locales.engine import explain
from viz.pages.numbers import duration
from viz.pages.settings import escape, show_head
from viz.pages.state import read_url, write_url

LONGEST = 8  # calls that are told
RECIPE = """with torch.profiler.profile() as profiler:
    train_one_step()
profiler.export_chrome_trace(f"rank{torch.distributed.get_rank()}.json")"""
# Streamlit says what is in its place for files in English alone.
WORDS = """<style>
[data-testid=stFileUploaderDropzone] :is(p, [data-testid=stFileUploaderDropzoneInstructions] span) {{ font-size: 0; }}
[data-testid=stFileUploaderDropzone] p::after {{ font-size: 1rem; content: {choose}; }}
[data-testid=stFileUploaderDropzoneInstructions] span::after {{ font-size: .875rem; content: {most}; }}
</style>"""


def show() -> None:
    asked = read_url("traces")
    write_url(asked)
    text = locales.text(asked.language)
    show_head(asked, text("traces.title"))
    st.markdown(text("traces.lead"))
    most = text("traces.most", size=f"{st.get_option('server.maxUploadSize')} MB")
    st.html(WORDS.format(choose=_quoted(text("traces.choose")), most=_quoted(most)))
    files = st.file_uploader(text("traces.files"), type=["json", "gz"], accept_multiple_files=True, key="traces")
    if not files:
        st.caption(text("traces.how"))
        st.code(RECIPE, language=None)
        return
    try:
        found = _read(tuple(file.file_id for file in files), files)
    except SpecError as wrong:
        st.error(escape(explain(text.language, wrong)), icon=":material/error:")
        return
    _show_found(found, text)


def _quoted(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)  # what CSS takes for a string too


@st.cache_resource(max_entries=2, show_spinner=False)
def _read(key: tuple[str, ...], _files: list[Any]) -> traces.Found:
    """SpecError names files as they are called where they come from."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, file in enumerate(_files):  # two may have one name
            paths.append(Path(folder) / str(i) / Path(file.name).name)
            paths[-1].parent.mkdir()
            paths[-1].write_bytes(file.getbuffer())
        try:
            return traces.communications(paths)
        except SpecError as wrong:
            told = {name: re.sub(rf"{re.escape(folder)}/\d+/", "", said) for name, said in wrong.values.items()}
            raise SpecError(wrong.code, told.pop("setting"), told.pop("value"), **told) from None


def _show_found(found: traces.Found, text: Catalogue) -> None:
    calls = found.calls
    ranks = stragglers.stragglers(calls)
    named = stragglers.named(ranks, float(calls.ended.max() - calls.came.min()))
    if named:
        st.markdown(f"#### :red[:material/hourglass_bottom:] {text('traces.straggler', rank=named[0].rank)}")
    else:
        st.markdown(f"#### {text('traces.nobody' if ranks else 'traces.together')}")
    for one in ranks[:LONGEST]:
        values = {name: getattr(one, name) for name in ("rank", "last", "calls")} | {"time": duration(one.seconds)}
        st.markdown(f"- {text('waits.straggler', **values)}")
    st.markdown(f"##### {text('traces.inside')}", help=text("traces.inside.help"))
    player.load()
    player.chart(plot_late(stragglers.inside(calls), text), key="late-chart", alt=text("traces.inside"))
    late = stragglers.late(calls)
    order = [i for i in (-late.longest).argsort(kind="stable") if late.last[i] >= 0][:LONGEST]
    if order:
        st.markdown(f"##### {text('traces.longest')}")
        st.markdown("\n".join(f"- {_call(found, late, int(i), text)}" for i in order))
    if found.unmatched:
        st.caption(text("traces.unmatched", count=found.unmatched))


def _call(found: traces.Found, late: stragglers.Late, i: int, text: Catalogue) -> str:
    times = {"longest": duration(float(late.longest[i])), "waited": duration(float(late.waited[i]))}
    return text("traces.call", number=i + 1, name=escape(found.names[i]), last=int(late.last[i]), **times)
