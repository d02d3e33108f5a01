"""The address -> a page: `streamlit run app.py` opens the lab, /runs the list of earlier runs.

`streamlit run app.py -- --runs-dir FOLDER` keeps the runs somewhere else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import streamlit as st

from engine.archive import RUNS
from viz import locales, pages
from viz.pages import lab, runs
from viz.pages.live import warm_launcher
from viz.pages.state import read_language

SIDEBAR = 330  # pixels

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--runs-dir", type=Path, default=RUNS)
runs_dir = parser.parse_known_args(sys.argv[1:])[0].runs_dir

mark = Path(pages.__file__).with_name("mark.svg")
st.set_page_config(page_title="Lockstep", page_icon=mark, layout="wide", initial_sidebar_state=SIDEBAR)
st.logo(mark, size="large")
warm_launcher()
text = locales.text(read_language())
# Pages have no icons: a browser would ask Google for them.
lab_page = st.Page(lambda: lab.show(runs_dir), title=text("page.lab"), url_path="lab", default=True)
runs_page = st.Page(lambda: runs.show(runs_dir, lab_page), title=text("page.runs"), url_path="runs")
st.navigation([lab_page, runs_page], position="top").run()
