"""Fixtures that many tests share: a folder for runs, one warm launcher for all real runs, one browser."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.figures import ARGUMENTS, find_browser
from engine.launch import Launcher
from tests import table


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where tests run side by side (`pytest -n 2`), one that is marked `alone` waits for the others and they for it.

    Whoever waits does so at the gate and lets nobody pass, or there would always be somebody inside.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "gate").open("w") as gate, (shared / "inside").open("w") as inside:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(inside, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


SLOW = [line for line in Path(__file__).with_name("slow.txt").read_text().splitlines() if line and line[0] != "#"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what slow.txt lists. A line that names no test any more is an error, wherever its file was collected."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    whole = all("::" not in argument for argument in config.args)  # files, and not single tests of them
    for start in SLOW:
        there = by_file.get(start.partition("::")[0], [])
        named = [item for item in there if item.nodeid.startswith(start)]
        if there and whole and not named:
            raise pytest.UsageError(f"tests/slow.txt: no test begins with {start}")
        for item in named:
            item.add_marker(pytest.mark.slow)


def pytest_sessionstart(session: pytest.Session) -> None:
    """What an earlier session recorded of the modes says nothing about this code; the slow tests add to the others'."""
    if not hasattr(session.config, "workerinput") and session.config.option.markexpr != "slow":  # or one side by side
        table.RECORDS.unlink(missing_ok=True)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """An empty folder for this test's runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Holds torch imported, which takes seconds, for the whole session; ends its own runs with it."""
    with Launcher() as launcher:
        launcher.warm()
        yield launcher


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium: one for the session, since Playwright allows no second one in a process."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium (install chromium for the browser tests)")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield opened
        opened.close()
