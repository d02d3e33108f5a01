"""The address -> a page: `streamlit run app.py` opens the lab, /search the search for the fastest layout, /runs the
list of earlier runs, /traces who comes last in traces of somebody's own, /validated what predictions were held to.

`streamlit run app.py -- --runs-dir FOLDER` keeps the runs somewhere else. Streamlit imports this file once to serve it
and runs it again for each view of a page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import streamlit as st
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from engine.archive import RUNS
from engine.asking.rules import SpecError
from viz import locales, pages, player
from viz.pages import lab, live, runs, search, traces, validated
from viz.pages.state import read_language

SIDEBAR = 330  # pixels


def page_below_root(_: Request) -> HTMLResponse:
    """Streamlit's own page, told that its server is one level up: else a browser that opens or reloads /runs first asks
    for the server's files below it, and its console shows what it did not find."""
    html = (Path(st.__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
    told = '<script>window.__streamlit = {BACKEND_BASE_URL: new URL(".", location.href).href}</script>'
    return HTMLResponse(html.replace("<head>", "<head>" + told, 1))


def progress(request: Request) -> JSONResponse:
    """How far a run is: for the page that watches it, and cheaper than a script run of Streamlit's."""
    try:
        run_id, language = request.path_params["run_id"], request.query_params.get("lang", locales.DEFAULT)
        return JSONResponse(live.answer(read_runs_dir(), run_id, language))
    except SpecError as error:
        # Not 404, which the console of every page that still shows it would have as an error.
        return JSONResponse({"ended": True, "error": str(error)})


def read_runs_dir() -> Path:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    return parser.parse_known_args(sys.argv[1:])[0].runs_dir


def show() -> None:
    runs_dir = read_runs_dir()
    mark = Path(pages.__file__).with_name("mark.svg")
    st.set_page_config(page_title="Lockstep", page_icon=mark, layout="wide", initial_sidebar_state=SIDEBAR)
    st.logo(mark, size="large")
    st.html(Path(pages.__file__).with_name("page.css"))
    live.warm_launcher()
    text = locales.text(read_language())
    player.attend(text.language)
    # Pages have no icons: a browser would ask Google for them.
    lab_page = st.Page(lambda: lab.show(runs_dir), title=text("page.lab"), url_path="lab", default=True)
    search_page = st.Page(lambda: search.show(lab_page), title=text("page.search"), url_path="search")
    runs_page = st.Page(lambda: runs.show(runs_dir, lab_page), title=text("page.runs"), url_path="runs")
    traces_page = st.Page(traces.show, title=text("page.traces"), url_path="traces")
    validated_page = st.Page(validated.show, title=text("page.validated"), url_path="validated")
    st.navigation([lab_page, search_page, runs_page, traces_page, validated_page], position="top").run()


if __name__ == "__main__":
    show()
else:
    below = ("lab", "search", "runs", "traces", "validated")
    pages_below = [Route(f"/{name}", page_below_root) for name in below]
    app = st.App(Path(__file__), routes=[*pages_below, Route(f"/{live.ADDRESS}/{{run_id}}", progress)])
