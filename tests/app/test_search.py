"""The page that searches for the fastest layout: without a browser what it tells, in one that it goes on and stops."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from engine.search import Search
from engine.spec import Spec
from tests.app.conftest import Tab
from tests.app.reading import charts, words
from viz.pages.search import FIRST

SECONDS = 60.0


def page(language: str, choices: dict | None, lab_has: dict | None = None) -> None:
    """The app, opened at this page, after the Lab with these settings."""
    import streamlit as st

    from viz.pages import search
    from viz.pages.state import Asked

    st.query_params["lang"] = language
    if choices is not None:
        st.session_state["search-choices"] = choices
    st.session_state.setdefault("asked", Asked(settings=lab_has or {}, page="lab"))
    lab = st.Page(lambda: None, title="Lab", url_path="lab")
    st.navigation([st.Page(lambda: search.show(lab), title="Search", url_path="search", default=True), lab]).run()


def searched(language: str, **choices) -> AppTest:
    app = AppTest.from_function(page, args=(language, choices), default_timeout=30).run()
    assert not app.exception
    app.button(key="search-start").click().run()
    deadline = time.monotonic() + SECONDS
    while any(button.key == "search-stop" for button in app.button):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        app.run()
    assert not app.exception
    return app


SMALL = {"model": "mlp", "devices": 2, "machine": "h100", "global_batch": 4}
TIED = {"model": "cnn", "devices": 2, "machine": "h100", "global_batch": 64}  # a pipeline and ddp, within 4 %


@pytest.mark.parametrize(("language", "told"), [("en", "cannot be told apart"), ("zh", "无法区分")])
def test_it_ranks_the_layouts_that_the_engine_finds_and_leads_to_each(language: str, told: str):
    app = searched(language, **TIED)
    search = Search(Spec(**TIED), set(TIED))
    for _ in search.steps():
        pass
    said = words(app)
    assert told in said and f"{search.total:,}" in said
    links = app.get("page_link")
    assert len(links) == len(search.best)
    first = links[0].proto.query_string
    assert all(part in first for part in ("machine=h100", "model=cnn", "mode=pipeline"))
    (figure,) = charts(app)
    drawn = sum(len(trace["x"]) for trace in figure["data"])
    assert drawn == sum(one.step_time <= 3 * search.best[0].step_time for one in search.fastest.values())


def test_what_is_typed_and_searched_at_once_is_what_is_searched():
    """A browser sends both together: the button that is clicked was drawn before. And what is then chosen otherwise
    does not seem to be what is shown."""
    app = AppTest.from_function(page, args=("en", SMALL), default_timeout=30).run()
    app.number_input(key="search-global_batch").set_value(8)
    app.button(key="search-start").click().run()
    assert dict(app.session_state["search-begun"]) == SMALL | {"global_batch": 8}
    assert not any("not of what is chosen" in info.value for info in app.info)
    app.number_input(key="search-devices").set_value(4).run()
    (info,) = [info.value for info in app.info if "not of what is chosen" in info.value]
    assert "on 2 devices (NVIDIA H100) with a global batch of 8" in info


def test_what_fits_nowhere_is_said_to():
    app = searched("en", model="llama3_405b", devices=8, machine="h100", global_batch=8)
    (warning,) = app.warning
    assert "85 GB" in warning.value


@pytest.mark.browser
@pytest.mark.xdist_group("app")
def test_a_visitor_searches_stops_and_opens_the_best_in_the_lab(tab: Callable[[], Tab]):
    """Of the largest, which takes seconds after the first layout is found: nobody is faster than the stop."""
    shown = tab().open("search")
    browser = shown.page
    browser.fill(".st-key-search-model input", "405B")
    browser.keyboard.press("Enter")
    for name, value in (("devices", "16384"), ("global_batch", "2048")):
        browser.fill(f".st-key-search-{name} input", value)
        browser.keyboard.press("Enter")
    browser.click(".st-key-search-start button")
    browser.wait_for_selector(".st-key-search-live .lockstep-chart .main-svg")
    browser.click(".st-key-search-stop button")
    browser.wait_for_selector(".st-key-search-row-1")
    assert "Stopped with" in shown.text()
    point = browser.locator(".st-key-search-points .scatterlayer .point").first
    point.wait_for()
    box = point.bounding_box()
    browser.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    picked = browser.locator(".st-key-search-picked")
    picked.filter(has_text=re.compile("s slower than the first|^1\\.")).wait_for()
    assert "machine=h100" in picked.locator("a").get_attribute("href")
    points = browser.get_by_role("slider", name="Step time against memory of a device")
    points.focus()
    for key in ("Home", "ArrowRight", "Enter"):
        browser.keyboard.press(key)
    assert points.get_attribute("aria-valuenow") == "2"
    picked.filter(has_text=points.get_attribute("aria-valuetext").partition(" · step ")[0]).wait_for()
    browser.click(".st-key-language >> text=中文")
    browser.wait_for_selector("text=哪种布局最快？")
    browser.locator(".st-key-search-row-1 a").first.click()
    browser.wait_for_url("**model=llama3_405b*")
    assert "machine=h100" in browser.url and "mode=hybrid" in browser.url
    assert shown.problems == []


LAB = {"mode": "hybrid", "model": "mixtral_8x7b", "devices": "64", "machine": "b200", "global-batch": "256"}
LABS = [
    (LAB, {"model": "mixtral_8x7b", "devices": 64, "machine": "b200", "global_batch": 256}),
    (LAB | {"machine": "local"}, {"model": "mixtral_8x7b", "devices": 64, "machine": "h100", "global_batch": 256}),
    (LAB | {"devices": "nonsense"}, FIRST),
    ({"mode": "ddp", "model": "cnn", "devices": "2"}, FIRST),
]


@pytest.mark.parametrize(("lab_has", "asked"), LABS, ids=["published", "here", "wrong", "small"])
def test_it_begins_with_the_published_model_that_the_lab_shows(lab_has, asked):
    app = AppTest.from_function(page, args=("en", None, lab_has), default_timeout=30).run()
    assert not app.exception
    assert app.session_state["search-choices"] == asked
