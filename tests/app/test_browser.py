"""The app as a visitor has it: a real server, a real browser, real runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import archive
from tests.app.conftest import Tab

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("app")]  # one server for all

NewTab = Callable[[], Tab]


def run_id(tab: Tab) -> str:
    tab.page.wait_for_url("**run=*")
    return tab.page.url.partition("run=")[2].partition("&")[0]


def wait_for_end(folder: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while (status := archive.read_status(folder))["state"] not in archive.FINAL:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


def test_a_first_visit(tab: NewTab):
    """The picture is above the fold and nobody else is asked; it plays; settings, link, back and language work."""
    lab = tab().open().settle()
    page = lab.page
    beside_mark = "getComputedStyle(document.querySelector('.stLogo').parentElement, '::after').content"
    assert page.evaluate(beside_mark) == '"Lockstep"'
    box = page.locator(".ls-stage").bounding_box()
    assert 0 < box["y"] < 450  # of 900 pixels
    assert page.locator(".ls-title").all_text_contents() == ["rank 0", "rank 1"]
    page.wait_for_selector(".lockstep-chart[role=img][aria-label='Memory of each rank'] .main-svg >> text=all ranks")
    # One plotly.js draws everything: Streamlit's own is as large, and a third of the page's load.
    assert not [entry for entry in page.evaluate("performance.getEntries().map(e => e.name)") if "PlotlyChart" in entry]

    at = lambda: float(page.get_attribute(".lockstep-player", "data-time"))  # noqa: E731
    assert at() == 0.0
    page.click(".ls-play")
    page.wait_for_function("() => +document.querySelector('.lockstep-player').dataset.time > 0")
    page.click(".ls-play")
    stopped, before = at(), page.locator(".ls-over").inner_html()
    page.get_by_role("button", name="Gradient aggregation").click()
    assert at() > stopped > 0
    assert page.locator(".ls-packet").count() == 2
    assert page.locator(".ls-over").inner_html() != before

    page.fill(".st-key-set-devices input", "4")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.ls-title').length === 4")
    page.wait_for_url("**devices=4*")
    page.go_back()
    page.wait_for_function("() => document.querySelectorAll('.ls-title').length === 2")
    page.go_forward()
    page.wait_for_function("() => document.querySelectorAll('.ls-title').length === 4")
    page.click(".st-key-language >> text=中文")
    page.wait_for_selector(".st-key-run >> text=真实运行")
    page.wait_for_selector(".ls-step >> text=梯度聚合")
    page.wait_for_url("**devices=4&lang=zh*")
    assert "分布式数据并行" in lab.text()
    assert lab.problems == []


def test_a_nonsense_address_gives_a_message_and_never_a_traceback(tab: NewTab):
    lab = tab().open("?run=%00&mode=<b>x</b>&devices=abc&lr=nan")
    assert lab.page.locator("[data-testid=stAlert]").count() >= 2
    assert lab.page.locator("[data-testid=stException]").count() == 0
    assert lab.problems == []


@pytest.fixture(scope="module")
def double_clicked(server: tuple[str, int, Path], chromium: Any) -> Iterator[tuple[Tab, Path]]:
    """A tab whose Run button was double-clicked, and the run that came of it, which has ended."""
    lab = Tab(chromium, server[0]).open("?mode=ddp&devices=2&model=mlp&steps=6")
    lab.page.dblclick(".st-key-run button")
    folder = server[2] / run_id(lab)
    wait_for_end(folder)
    yield lab, folder
    lab.page.close()


@pytest.mark.real
def test_a_double_click_starts_one_run_that_shows_what_it_proved(double_clicked: tuple[Tab, Path]):
    lab, folder = double_clicked
    assert [run["run_id"] for run in archive.list_runs(folder.parent)] == [folder.name]
    assert archive.read_status(folder)["state"] == "finished"
    assert_verdict(lab)


@pytest.mark.real
def test_the_list_of_runs_opens_a_run_by_its_id_and_a_reload_keeps_it(double_clicked: tuple[Tab, Path], tab: NewTab):
    name = double_clicked[1].name
    second = tab().open("runs")
    second.page.wait_for_function("window.lockstepKeepsFocus")
    second.page.focus(f".st-key-delete-{name} button:visible")
    second.page.keyboard.press("Enter")
    second.page.wait_for_selector(f".st-key-yes-{name} button:focus")
    second.page.keyboard.press("Escape")
    second.page.wait_for_selector(f".st-key-delete-{name} button:focus")
    way = second.page.locator(f".st-key-run-{name} a")
    way.focus()
    assert way.evaluate("(way) => getComputedStyle(way).boxShadow") != "none"
    way.press("Enter")
    assert_verdict(second)
    second.page.wait_for_url("**model=mlp*")  # the run has brought its settings
    second.page.reload()
    assert_verdict(second)
    assert run_id(second) == name


@pytest.mark.real
def test_the_server_that_ran_it_never_loaded_torch(double_clicked: tuple[Tab, Path], server: tuple[str, int, Path]):
    assert "libtorch" not in Path(f"/proc/{server[1]}/maps").read_text()


def assert_verdict(lab: Tab) -> None:
    """The run has finished, agrees with one device and with its plan, and its measured picture is shown."""
    lab.page.wait_for_selector(".st-key-verdict >> text=6 steps")
    cards = lab.settle().page.inner_text(".st-key-verdict")
    assert "equal" in cards and "as planned" in cards
    chosen = lab.page.locator(".st-key-view [aria-checked=true], .st-key-view [kind=segmented_controlActive]")
    assert chosen.first.inner_text() == "Measured"
    assert lab.problems == []


@pytest.mark.real
def test_a_run_is_watched_past_streamlit_and_stops_within_two_seconds(
    tab: NewTab, server: tuple[str, int, Path], alone
):
    # Each step sleeps a while: two workers at full speed leave no core for two browser tabs.
    lab, sent = tab(), []
    lab.page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: sent.append(frame)))
    lab.open("?mode=ddp&devices=2&model=mlp&steps=10000&fault=slow@0:0:0.1")
    lab.page.focus(".st-key-run button")
    lab.page.keyboard.press("Enter")
    folder = server[2] / run_id(lab)
    lab.page.wait_for_selector(".st-key-live >> text=/[1-9]\\d* of [\\d,]+ steps/")
    lab.page.get_by_role("progressbar", name="Running").wait_for()
    said, before = lab.settle().page.inner_text(".ls-count"), len(sent)
    lab.page.wait_for_function("(said) => document.querySelector('.ls-count').textContent !== said", arg=said)
    assert len(sent) == before > 0  # the ranks need the cores that a script run would take
    second = tab().open(f"?run={folder.name}")
    second.page.wait_for_selector(".st-key-live")
    workers = archive.read_status(folder)["worker_pids"]
    assert len(workers) == 2
    with alone():
        lab.page.wait_for_selector(".st-key-stop button:focus")  # in Run's place, and later the other way round
        lab.page.keyboard.press("Enter")
        clicked = time.monotonic()
        while not (folder / "stop").exists():
            assert time.monotonic() - clicked < 10.0
            time.sleep(0.01)
        asked = time.monotonic()
        while any(archive.process_start(pid) is not None for pid in workers):
            assert time.monotonic() - asked < 2.0
            time.sleep(0.02)
    for one in (lab, second):
        one.page.wait_for_selector("text=Stopped before its last step")
    lab.page.wait_for_selector(".st-key-run button:focus")
    shutil.rmtree(folder)  # by somebody else
    for one in (lab, second):
        one.page.reload()
        one.page.wait_for_selector(".st-key-wrong-run")
        assert one.problems == []
