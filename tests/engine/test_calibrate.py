"""A real calibration, with little effort: it is stored, it predicts, and nothing of it is left when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.calibration.calibrate import COLLECTIVE_KINDS
from engine.cost.calibration import VARIABLE, find, load
from engine.predict import predict
from engine.spec import Spec

COMMAND = [sys.executable, "-m", "engine", "calibrate", "--quick", "--json"]


def children(of: int) -> set[int]:
    """Processes below one, however deep: fourth field of /proc/PID/stat."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = set(), {of}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def test_it_is_stored_and_predicts(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    made = json.loads(subprocess.run(COMMAND, check=True, capture_output=True, text=True).stdout)
    assert made["path"] == str(path) and find().source == "calibrated"
    kept = load(path)
    assert {f"{kind}/2" for kind in COLLECTIVE_KINDS} <= kept.curves.keys()
    assert 0 < kept.crowded <= kept.together <= 1 and kept.uneven > 0
    for curve in kept.curves.values():
        assert all(point[1] > 0 for point in curve)
    assert {"ddp/forward/block", "single/1/forward/conv1", "ddp/optimizer/"} <= kept.ops.keys()
    small = predict(Spec(mode="ddp", devices=2, model="gpt", hidden=32, dataset="synthetic")).step_time
    large = predict(Spec(mode="ddp", devices=2, model="gpt", hidden=256, dataset="synthetic")).step_time
    assert 0 < small < large


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_stopped_in_the_middle_it_stores_nothing_and_leaves_no_process(tmp_path):
    path = tmp_path / "calibration.json"
    process = subprocess.Popen(COMMAND, env=os.environ | {VARIABLE: str(path)}, stderr=subprocess.PIPE, text=True)
    deadline, below = time.monotonic() + 60, set()
    while len(below) < 2 and time.monotonic() < deadline:  # the launcher, and a worker of it
        time.sleep(0.05)
        below = children(process.pid)
    assert len(below) >= 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1 and "nothing was stored" in said
    assert not path.exists()
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
