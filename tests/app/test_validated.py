"""The page of what predictions were held to: its words without a browser, its charts in one, in both languages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from engine.validate.kept import read
from tests.app.conftest import Tab
from tests.app.reading import charts, numbers, words


def page(language: str) -> None:
    """The app, opened at this page."""
    import streamlit as st

    from viz.pages import validated

    st.query_params["lang"] = language
    st.navigation([st.Page(validated.show, title="Validated", url_path="validated", default=True)]).run()


@pytest.mark.parametrize(("language", "missed"), [("en", "missed"), ("zh", "未达到")])
def test_it_tells_every_target_and_every_set_and_how_it_was_made(language: str, missed: str):
    app = AppTest.from_function(page, args=(language,), default_timeout=30).run()
    assert not app.exception
    found, said = read(), words(app)
    report = found.report
    assert said.count(f":material/close: {missed}") == sum(not aim["met"] for aim in report["targets"])
    for each in report["sets"]:
        assert not each["used"] or f"`{each['set']}`" in said
    assert found.made["on"] in said and found.made["command"] in said
    assert f"{100 * report['overall']['mape']:.1f}\u00a0%" in numbers(app).values()
    scatter, by_set = charts(app)
    assert len(by_set["data"][1]["y"]) == sum(bool(each["time"]) for each in report["sets"])
    app.segmented_control(key="quantity").set_value("memory").run()
    assert charts(app)[0] != scatter


@pytest.mark.browser
@pytest.mark.xdist_group("app")
def test_a_visitor_reads_it_points_at_a_result_and_changes_language(tab: Callable[[], Tab]):
    page = tab().open("validated")
    browser = page.page
    browser.wait_for_selector(".lockstep-chart[aria-label='Predicted against measured'] .main-svg")
    browser.wait_for_selector(".lockstep-chart[aria-label='Set by set'] .main-svg >> text=zero_bubble_t4")
    points = browser.locator(".lockstep-chart[aria-label='Predicted against measured'] .points path")
    timed = sum(row.measured_seconds is not None for row in read().rows)
    assert points.count() == timed
    points.last.hover(force=True)
    browser.wait_for_selector(".hoverlayer >> text=measured")
    browser.click(".st-key-quantity >> text=Memory")
    browser.wait_for_selector(".main-svg >> text=measured memory of the fullest rank")
    browser.click(".st-key-language >> text=中文")
    browser.wait_for_selector(".lockstep-chart[aria-label='预测与实测'] .main-svg >> text=实测：最满 rank 的内存")
    assert "与已发表的测量结果对照" in page.text()
    browser.reload()
    browser.wait_for_selector(".lockstep-chart[aria-label='预测与实测'] .main-svg")
    browser.set_viewport_size({"width": 400, "height": 900})  # a table scrolls by itself, and not the page with it
    browser.wait_for_function("() => document.querySelector('[data-testid=stMain]').scrollWidth === 400")
    assert page.problems == []
