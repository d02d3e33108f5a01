"""Fixtures that many tests share: a folder for runs, one warm launcher for all real runs, one browser."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.figures import ARGUMENTS, find_browser
from engine.launch import Launcher
from tests import table

# Whatever this machine's calibration says, predictions for `local` are those of the shipped one.
os.environ["LOCKSTEP_CALIBRATION"] = "none"


class Room:
    """Where tests run side by side (`pytest -n 2`), all of them are in one room; one that measures a time asks the
    others out, so it waits for them and they for it.

    Whoever waits does so at the gate and lets nobody pass, or there would always be somebody inside.
    """

    def __init__(self, folder: Path):
        self.gate, self.inside = (folder / "gate").open("w"), (folder / "inside").open("w")

    def enter(self, kind: int) -> None:
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.inside, kind)
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        fcntl.flock(self.inside, fcntl.LOCK_UN)  # two that are inside and want to be alone would wait for ever
        self.enter(fcntl.LOCK_EX)
        yield
        fcntl.flock(self.inside, fcntl.LOCK_SH)

    def leave(self) -> None:
        self.gate.close()
        self.inside.close()


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """`with alone():` no other test runs meanwhile."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield nullcontext
        return
    room = Room(tmp_path_factory.getbasetemp().parent)
    room.enter(fcntl.LOCK_SH)
    yield room.alone
    room.leave()


SLOW = [line for line in Path(__file__).with_name("slow.txt").read_text().splitlines() if line and line[0] != "#"]


def mark_slow(items: list[pytest.Item], starts: list[str], *, whole: bool) -> None:
    """Mark the tests that slow.txt lists. A line that names none any more is an error where a `whole` file of it was
    collected, and not single tests."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for start in starts:
        there = by_file.get(start.partition("::")[0], [])
        named = [item for item in there if item.nodeid.startswith(start)]
        if there and whole and not named:
            raise pytest.UsageError(f"tests/slow.txt: no test begins with {start}")
        for item in named:
            item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items, SLOW, whole=all("::" not in argument for argument in config.args))


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
