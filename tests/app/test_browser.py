"""The app as a visitor has it: a real server, a real browser, real runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import archive
from tests.app.conftest import Tab

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NewTab = Callable[[], Tab]
SHORT = "?mode=ddp&devices=2&model=mlp&steps=6"
LONG = "?mode=ddp&devices=2&model=mlp&steps=5000"


@pytest.fixture
def runs(server: tuple[str, int, Path]) -> Path:
    return server[2]


def run_id(tab: Tab) -> str:
    tab.page.wait_for_url("**run=*")
    return tab.page.url.partition("run=")[2].partition("&")[0]


def wait_for_state(folder: Path, *states: str, seconds: float = 40) -> dict:
    deadline = time.monotonic() + seconds
    while (status := archive.read_status(folder))["state"] not in states:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def test_the_first_paint_has_the_picture_above_the_fold_and_asks_nobody_else(tab: NewTab):
    lab = tab().open()
    box = lab.page.locator(".ls-stage").bounding_box()
    assert 0 < box["y"] < 450  # of 900 pixels
    assert lab.page.locator(".ls-title").all_inner_texts() == ["rank 0", "rank 1"]
    assert lab.problems == []


def test_play_moves_the_packets(tab: NewTab):
    lab = tab().open("?mode=pipeline&devices=4&machine=unit")
    packets = lambda: [p.get_attribute("transform") for p in lab.page.locator(".ls-packet:visible").all()]  # noqa: E731
    at = lambda: float(lab.page.get_attribute(".lockstep-player", "data-time"))  # noqa: E731
    assert at() == 0.0
    lab.page.click(".ls-play")
    lab.page.wait_for_function("() => +document.querySelector('.lockstep-player').dataset.time > 0.1")
    lab.page.click(".ls-play")
    stopped, before = at(), packets()
    assert stopped > 0.1
    lab.page.click(".ls-forward")
    assert at() > stopped
    assert packets() != before
    assert lab.problems == []


def test_a_changed_setting_changes_picture_and_link_at_once(tab: NewTab):
    lab = tab().open("?machine=unit")
    lab.page.fill(".st-key-set-devices input", "4")
    lab.page.keyboard.press("Enter")
    lab.page.wait_for_function("() => document.querySelectorAll('.ls-title').length === 4")
    lab.page.wait_for_url("**devices=4*")
    lab.page.go_back()
    lab.page.wait_for_function("() => document.querySelectorAll('.ls-title').length === 2")
    assert lab.problems == []


def test_the_chinese_switch_keeps_the_page(tab: NewTab):
    lab = tab().open("?mode=pipeline&devices=4")
    lab.page.click(".st-key-language >> text=中文")
    lab.page.wait_for_selector(".st-key-run >> text=真实运行")
    lab.settle()
    assert "流水线并行" in lab.text() and "微批次" in lab.text()
    assert "lang=zh" in lab.page.url and "devices=4" in lab.page.url
    assert lab.problems == []


@pytest.mark.parametrize("query", ["?devices=abc", "?run=../../etc", "?mode=<b>x</b>&lr=nan", "?run=%00&devices=-1"])
def test_a_nonsense_address_gives_a_message_and_never_a_traceback(tab: NewTab, query: str):
    lab = tab().open(query)
    assert lab.page.locator("[data-testid=stAlert]").count() >= 1
    assert lab.page.locator("[data-testid=stException]").count() == 0
    assert lab.problems == []


@pytest.mark.real
def test_a_run_shows_itself_live_then_what_it_proved_and_again_after_a_reload_and_in_a_second_tab(
    tab: NewTab, runs: Path
):
    lab = tab().open(SHORT)
    lab.click("run")
    name = run_id(lab)
    status = wait_for_state(runs / name, *archive.FINAL)
    assert status["state"] == "finished", status
    lab.page.wait_for_selector(".st-key-verdict")
    second = tab().open(f"?run={name}")
    second.page.wait_for_selector(".st-key-verdict")
    lab.page.reload()
    for one in (lab.settle(), second):
        one.page.wait_for_selector(".st-key-verdict")
        cards = one.page.inner_text(".st-key-verdict")
        assert "equal" in cards and "as planned" in cards and "6 steps" in cards
        assert one.page.locator("[data-testid=stMain] [aria-checked=true]").first.inner_text() == "Measured"
        assert one.problems == []
    assert "model=mlp" in second.page.url  # the link to the run alone has brought its settings


@pytest.mark.real
def test_stop_ends_a_run_within_two_seconds_in_every_tab(tab: NewTab, runs: Path):
    lab = tab().open(LONG)
    lab.click("run")
    name = run_id(lab)
    wait_for_state(runs / name, "running")
    second = tab().open(f"?run={name}")
    second.page.wait_for_selector(".st-key-live")
    lab.page.wait_for_selector(".st-key-live >> text=/Step [1-9]/")
    workers = archive.read_status(runs / name)["worker_pids"]
    lab.click("stop")
    while not (runs / name / "stop").exists():
        time.sleep(0.01)
    asked = time.monotonic()
    while any(archive.process_start(pid) is not None for pid in workers):
        assert time.monotonic() - asked < 2.0
        time.sleep(0.02)
    for one in (lab, second):
        one.page.wait_for_selector("text=Stopped before its last step")
        assert one.problems == []


@pytest.mark.real
def test_a_double_click_starts_one_run(tab: NewTab, runs: Path):
    before = len(archive.list_runs(runs))
    lab = tab().open(SHORT)
    lab.page.dblclick(".st-key-run button")
    wait_for_state(runs / run_id(lab), *archive.FINAL)
    assert len(archive.list_runs(runs)) == before + 1


@pytest.mark.real
def test_the_list_of_runs_opens_a_run(tab: NewTab, runs: Path):
    lab = tab().open(SHORT)
    lab.click("run")
    name = run_id(lab)
    wait_for_state(runs / name, *archive.FINAL)
    lab.page.click("text=Runs")
    lab.page.click(f".st-key-run-{name} a")
    lab.page.wait_for_selector(".st-key-verdict")
    assert run_id(lab) == name
    assert lab.problems == []


@pytest.mark.real
def test_the_server_never_loads_torch(tab: NewTab, server: tuple[str, int, Path]):
    """Nor does it import it by the way: a run's results are written by processes of their own."""
    lab = tab().open(SHORT)
    lab.click("run")
    wait_for_state(server[2] / run_id(lab), *archive.FINAL)
    assert "libtorch" not in Path(f"/proc/{server[1]}/maps").read_text()
