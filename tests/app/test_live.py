"""A run while it goes on, as the page asks for it: past Streamlit, in words, by its id alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request

import app
from engine.launch import Progress, RankProgress
from engine.spec import Spec
from viz import locales
from viz.pages.live import MAX_RANKS, tell


def ask(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, run_id: str, query: str = "") -> tuple[int, dict]:
    """What the server answers: its status and its words."""
    monkeypatch.setattr("sys.argv", ["app.py", "--runs-dir", str(runs_dir)])
    scope = {"type": "http", "path_params": {"run_id": run_id}, "query_string": query.encode(), "headers": []}
    answer = app.progress(Request(scope))
    return answer.status_code, json.loads(answer.body)


def test_the_page_is_told_what_a_run_has_come_to(
    runs_dir: Path, record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    folder = record(Spec(devices=2, steps=4, global_batch=8), state="running")
    for rank in (0, 1):
        lines = [{"step": i, "start": i, "end": i + 1.0, "loss": 3.0 - i, "samples": 4} for i in range(3)]
        (folder / f"rank{rank}.steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, said = ask(runs_dir, monkeypatch, folder.name)
    assert (status, said["ended"], said["done"]) == (200, False, 0.75)
    assert said["state"] == ["blue", "Running"]
    assert said["count"] == "3 of 4 steps · 8 samples/s · loss 1"
    assert said["ranks"] == [["blue", "rank 0 · 3 done"], ["blue", "rank 1 · 3 done"]]
    assert said["losses"]["path"].startswith("M0.0,4.76L333.3,36.51L")
    assert ask(runs_dir, monkeypatch, folder.name, "lang=zh")[1]["state"] == ["blue", "运行中"]


@pytest.mark.parametrize("run_id", ["20260101-000000-ddp2-0000", "..", "%00"])
def test_what_is_no_run_is_not_looked_for_elsewhere(runs_dir: Path, monkeypatch: pytest.MonkeyPatch, run_id: str):
    status, said = ask(runs_dir, monkeypatch, run_id)
    assert (status, said["ended"]) == (200, True) and repr(run_id).strip("'") in said["error"]


def test_of_many_ranks_the_first_are_told_and_the_others_counted():
    ranks = tuple(RankProgress(rank, 0, "starting") for rank in range(MAX_RANKS + 3))
    said = tell(Progress("starting", 0, 10, (), None, ranks, None), locales.text("en"))
    assert (len(said["ranks"]), said["more"]) == (MAX_RANKS, "and 3 more ranks")
    assert said["count"] == "0 of 10 steps" and not said["ended"]


def test_a_run_that_ended_has_the_page_drawn_anew():
    for state in ("finished", "failed", "stopped"):
        assert tell(Progress(state, 3, 10, (), None, (), None), locales.text("en"))["ended"], state
