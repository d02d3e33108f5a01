"""Fixtures that many tests share: a folder for runs, and one warm launcher for all real runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launch import Launcher


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
