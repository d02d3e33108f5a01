"""Fixtures of the pages' tests: the app without a browser, runs that look as if they had been recorded, and a real
server with a real browser.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine import archive
from engine.job import prepare
from engine.launch import Launcher
from engine.predict import predict
from engine.spec import Spec
from engine.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]
SLOWER = (9.0, 5.0, 2.0, 3.0, 2.1)  # how many times slower than predicted each step of a recorded run is


@pytest.fixture
def lab(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """`lab("mode=ddp&lang=zh")` is the app, run once at this address. No launcher process is started for it."""
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs-dir", str(runs_dir)])
    monkeypatch.setattr(Launcher, "warm", lambda self: None)
    monkeypatch.setattr("engine.job.count_gpus", lambda: 0)

    def run(query: str = "") -> AppTest:
        app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=30)
        for part in filter(None, query.split("&")):
            name, _, value = part.partition("=")
            app.query_params[name] = value
        return app.run()

    return run


@pytest.fixture
def record(runs_dir: Path) -> Callable[..., Path]:
    """`record(Spec(...), state="failed", error={...}, parity={...})` writes a run folder, without running anything.

    What it "measured" is the prediction, slower by the factors in SLOWER; of the steady steps (from 2), step 4 has
    the median duration.
    """

    def write(spec: Spec, state: str = "finished", error: dict | None = None, **changes: Any) -> Path:
        job = prepare(spec.with_(device="cpu"))
        folder = archive.new_run(runs_dir, job)
        status = archive.read_json(folder / "status.json")
        archive.write_json(folder / "status.json", status | {"state": state, "error": error})
        if state not in archive.FINAL:
            return folder
        prediction = predict(spec)
        measured = _stretch(prediction.timeline)
        measured.save(folder / "timeline.parquet")
        step_time = 2 * prediction.step_time
        tolerance = {"loss_max_abs_diff": 1e-4, "grad_max_rel_diff": 1e-3, "param_max_abs_diff": 1e-4}
        diffs = {"loss_max_abs_diff": 2e-7, "grad_max_rel_diff": 3e-6, "param_max_abs_diff": 4e-8}
        result = {
            "run_id": folder.name,
            "status": state,
            "mode": spec.mode,
            "devices": spec.devices,
            "step_time": step_time,
            "predicted_step_time": prediction.step_time,
            "samples_per_second": spec.global_batch / step_time,
            "losses": [2.5, 2.0, 1.5, 1.25, 1.0],
            "validation_accuracy": 0.875,
            "parity": {"ok": True, **diffs, "tolerance": tolerance, "reason": None, "steps": 3},
            "conformance": {"ok": True, "planned": 70, "measured": 70, "matched": 70, "first_difference": None},
            "error": error,
            "spec": job.spec.to_dict(),
        }
        archive.write_json(folder / "result.json", result | changes)
        return folder

    return write


def _stretch(timeline: Timeline) -> Timeline:
    """Copies of one step, one after the other."""
    parts = []
    for step, factor in enumerate(SLOWER):
        offset = 10.0 * step * timeline.makespan
        columns = dict(timeline.columns) | {"step": np.full(len(timeline), step)}
        columns |= {name: timeline[name] * factor + offset for name in ("start", "end")}
        parts.append(columns)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Timeline(columns, "measured", timeline.world_size)


# --- a real server and a real browser -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Path]]:
    """(its address, its pid, its runs folder) of the app, served for the whole session and ended by its pid."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--", "--runs-dir", str(folder / "runs")], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/_stcore/health", process)
        yield f"http://127.0.0.1:{port}", process.pid, folder / "runs"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(address: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="session")
def chromium(browser: Any) -> Any:
    """One cache for the session; each tab is a Streamlit session of its own."""
    return browser.new_context(viewport={"width": 1400, "height": 900})


class Tab:
    """A browser tab at the app. `problems`: errors in its console, and requests that left this machine."""

    def __init__(self, browser: Any, address: str):
        self.page = browser.new_page()
        self.page.set_default_timeout(60_000)  # a machine that does much else is slow
        self.address = address
        self.problems: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._watch)

    def _watch(self, request: Any) -> None:
        if not request.url.startswith((self.address, self.address.replace("http", "ws"), "data:", "blob:")):
            self.problems.append(f"request to {request.url}")

    def open(self, query: str = "") -> Tab:
        """Wait until the page's script has run; its picture may still be on the way."""
        self.page.goto(f"{self.address}/{query}")
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")
        return self

    def settle(self) -> Tab:
        """Wait until the picture is drawn, too."""
        self.page.wait_for_selector(".lockstep-player .ls-title")
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")
        return self

    def click(self, key: str) -> None:
        self.page.click(f".st-key-{key} button")

    def text(self) -> str:
        return self.page.inner_text("[data-testid=stMain]")


@pytest.fixture
def tab(server: tuple[str, int, Path], chromium: Any) -> Iterator[Callable[[], Tab]]:
    """Opens tabs, each a browser session of its own."""
    opened: list[Tab] = []

    def new() -> Tab:
        opened.append(Tab(chromium, server[0]))
        return opened[-1]

    yield new
    for one in opened:
        one.page.close()
