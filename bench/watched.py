"""A training whose page is open in a browser, against the same from the command line -> the ratio of their steps.

    python -m bench.watched                  # all that is open is the page
    python -m bench.watched --playing        # and its picture plays meanwhile

Both take turns, since how fast a machine is changes from minute to minute. Beside it: how many cores the server and the
browser keep busy while ranks train.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from bench.figures import ARGUMENTS, find_browser
from engine import archive
from engine.launch import ROOT, Handle, Launcher, start
from engine.spec import Spec

CASES = (
    Spec(mode="ddp", devices=2, model="gpt", steps=40),
    Spec(mode="pipeline", devices=4, model="gpt", layers=4, steps=40),
)
TICKS = os.sysconf("SC_CLK_TCK")
STARTED = 3  # steps, from which on cores are counted


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """(address, pid) of the app, with its runs in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
    process = subprocess.Popen([*command, "--", "--runs-dir", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _answers(f"{address}/_stcore/health"):
            if process.poll() is not None:
                raise RuntimeError(f"the app ended with exit code {process.returncode}")
            time.sleep(0.1)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=1):
            return True
    except OSError:
        return False


def cpu_seconds(pids: list[int]) -> float:
    """Of processes that live. Source: proc(5), fields 14 and 15 of /proc/PID/stat."""
    rows = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in rows) / TICKS


def browsers(name: str) -> list[int]:
    """This program's browser, all of its processes: each has the folder of its profile in its command line, or is a
    child of one that has."""
    parents, own = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if name.encode() in (folder / "cmdline").read_bytes():
                own.add(int(folder.name))
        except OSError:  # it has ended
            continue
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sorted(own)


def watched(page: Any, address: str, spec: Spec, runs_dir: Path, playing: bool, count: list[list[int]]) -> tuple:
    """(median seconds of a step, cores that each of the lists of processes kept busy) of a run begun on its page."""
    page.goto(f"{address}/?{urlencode(spec.to_params())}")
    page.wait_for_selector(".lockstep-player .ls-title")
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")
    time.sleep(3.0)  # charts below are still drawn
    if playing:
        page.click(".ls-repeat")
        page.click(".ls-play")
    page.click(".st-key-run button:visible")
    page.wait_for_url("**run=*")
    handle = Handle(runs_dir / page.url.partition("run=")[2].partition("&")[0])
    wait(handle, STARTED)
    began, before = time.perf_counter(), [cpu_seconds(pids) for pids in count]
    wait(handle, spec.steps - 1)
    seconds, after = time.perf_counter() - began, [cpu_seconds(pids) for pids in count]
    page.wait_for_selector(".st-key-verdict")
    step = archive.read_whole_result(handle.run_dir)["step_time"]
    return step, [(b - a) / seconds for a, b in zip(before, after, strict=True)]


def wait(handle: Handle, steps: int) -> None:
    while (progress := handle.poll()).step < steps:
        if progress.state in archive.FINAL:
            raise RuntimeError(f"{handle.run_id} is {progress.state}: {progress.error}")
        time.sleep(0.1)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--playing", action="store_true")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder) / "runs") as (address, server),
        Launcher() as launcher,
        sync_playwright() as playwright,
    ):
        profile = str(Path(folder) / "profile")
        browser = playwright.chromium.launch_persistent_context(
            profile, executable_path=find_browser(), args=ARGUMENTS, viewport={"width": 1400, "height": 900}
        )
        page = browser.pages[0]
        launcher.warm()
        print(f"{'run':28} {'alone':>8} {'on its page':>12} {'ratio':>6}   cores: server, browser")
        for spec in CASES:
            alone, seen, cores = [], [], []
            for _ in range(asked.rounds):
                page.goto("about:blank")
                alone.append(start(spec, Path(folder) / "alone", launcher).result(timeout=300)["step_time"])
                count = [[server], browsers(profile)]
                step, busy = watched(page, address, spec, Path(folder) / "runs", asked.playing, count)
                seen.append(step)
                cores.append(busy)
            ratio = median(b / a for a, b in zip(alone, seen, strict=True))
            server_cores, browser_cores = (median(each) for each in zip(*cores, strict=True))
            name = f"{spec.mode}, {spec.devices} ranks, {spec.model}"
            times = f"{1e3 * median(alone):5.0f} ms {1e3 * median(seen):9.0f} ms {ratio:6.2f}"
            print(f"{name:28} {times}   {server_cores:.2f}, {browser_cores:.2f}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
