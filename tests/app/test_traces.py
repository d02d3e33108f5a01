"""The page of somebody's own traces: who comes last is named, what is no trace is refused by its own name."""

from __future__ import annotations

import gzip
import json

import pytest
from streamlit.testing.v1 import AppTest

from tests.app.reading import charts, words

MS = 1000  # microseconds, in which a trace counts


def page(language: str) -> None:
    """The app, opened at this page."""
    import streamlit as st

    from viz.pages import traces

    st.query_params["lang"] = language
    st.navigation([st.Page(traces.show, title="Traces", url_path="traces", default=True)]).run()


def trace(rank: int, came: list[int]) -> bytes:
    """Of a rank that comes to its collectives at these milliseconds; each ends on all ranks at 10, 20, 30."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": MS * at, "dur": MS * (10 * (i + 1) - at)}
        for i, at in enumerate(came)
    ]
    return gzip.compress(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events}).encode())


@pytest.mark.parametrize(
    ("language", "choose", "blamed", "time"),
    [
        ("en", "Choose files", "Rank 2 keeps the others waiting", "Time in collectives"),
        ("zh", "选择文件", "rank 2 让其他 rank 一直等待", "通信所用的时间"),
    ],
)
def test_the_rank_that_comes_last_is_named(language: str, choose: str, blamed: str, time: str):
    app = AppTest.from_function(page, args=(language,), default_timeout=30).run()
    assert "export_chrome_trace" in words(app)
    (style,) = app.get("html")  # Streamlit has its own words for a place for files, in English
    assert f'content: "{choose}"' in style.proto.body
    ranks = {0: [2, 12, 22], 1: [3, 13, 23], 2: [9, 19, 29]}
    app.file_uploader[0].set_value([(f"w{r}.json.gz", trace(r, at), "application/gzip") for r, at in ranks.items()])
    app.run()
    assert not app.exception and not app.error
    said = words(app)
    assert blamed in said and time in said and "3" in said
    waiting, transfer = charts(app)[0]["data"]
    assert waiting["x"] == [21.0, 18.0, 0.0] and transfer["x"] == [3.0, 3.0, 3.0]


BACKWARDS = {"ph": "X", "name": "gloo:all_reduce", "ts": 5, "dur": -1}
WRONG = {
    "no_trace": ([b"{}"], "A trace has a list traceEvents; notes0.json has none.", "notes0.json 没有"),
    "unreadable": ([b"{"], "notes0.json cannot be read", "无法读取 notes0.json"),
    "twice": ([trace(0, [1]), trace(0, [1])], "notes1.json is a second file of rank 0", "notes1.json 是 rank 0"),
    "counts": ([trace(0, [1]), trace(1, [1, 2])], "among ranks [0, 1]", "在 rank [0, 1] 之间"),
    "alone": ([trace(0, [1])], "are two ranks there", "两个 rank 在场"),
    "times": (
        [json.dumps({"distributedInfo": {"rank": r}, "traceEvents": [BACKWARDS]}).encode() for r in range(2)],
        "of rank 0 something does not",
        "rank 0 有一项不是这样",
    ),
}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_trace_is_refused_by_the_name_that_it_has(case: str, language: str):
    files, *said = WRONG[case]
    app = AppTest.from_function(page, args=(language,), default_timeout=30).run()
    names = [f"notes{i}.json" + ".gz" * (file[:2] == b"\x1f\x8b") for i, file in enumerate(files)]
    app.file_uploader[0].set_value([(name, file, "") for name, file in zip(names, files, strict=True)]).run()
    assert not app.exception
    told = app.error[0].value.replace("\\", "").replace(".gz", "")
    assert said[language == "zh"] in told and "/" not in told
