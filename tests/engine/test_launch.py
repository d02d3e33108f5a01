"""A run seen through its files alone, no process needed: which failure is its error, and how far it is."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from engine import archive
from engine.job import prepare
from engine.launch import Handle, RankProgress, default_launcher, open_handle, start
from engine.real.launcher import Child, find_error
from engine.rules import SpecError
from engine.spec import Spec

JOB = prepare(Spec(mode="ddp", devices=2, model="mlp", global_batch=12))

# --- choosing the error -----------------------------------------------------------------------------------------------


def ended(rank: int, exit_code: int, at: float, signalled: bool = False) -> Child:
    return Child(pid=0, rank=rank, exit_code=exit_code, ended=at, signalled=signalled)


def say(run_dir: Path, rank: int, message: str, at: float) -> Child:
    said = {"rank": rank, "step": 1, "op": None, "message": message, "traceback": "", "time": at}
    archive.write_json(run_dir / f"rank{rank}.error.json", said)
    return ended(rank, 1, at)


def test_the_error_is_the_cause_in_every_order_of_ranks(tmp_path):
    """Each pair: the first is the cause and the second a consequence, though it was noticed earlier."""
    pairs = [
        (lambda f, r: ended(r, -signal.SIGSEGV, 9.0), lambda f, r: ended(r, 3, 1.0)),
        (lambda f, r: ended(r, -signal.SIGKILL, 9.0), lambda f, r: ended(r, -signal.SIGTERM, 1.0, signalled=True)),
        (lambda f, r: ended(r, 3, 9.0), lambda f, r: say(f, r, "ValueError: x", 1.0)),
        (lambda f, r: say(f, r, "ValueError: x", 9.0), lambda f, r: say(f, r, "Connection reset by peer", 1.0)),
        (lambda f, r: say(f, r, "ValueError: x", 9.0), lambda f, r: say(f, r, "Timed out waiting 60000ms", 1.0)),
        (lambda f, r: say(f, r, "ValueError: x", 9.0), lambda f, r: ended(r, 143, 1.0, signalled=True)),
        (lambda f, r: say(f, r, "ValueError: x", 1.0), lambda f, r: ended(r, -signal.SIGABRT, 9.0)),
        (lambda f, r: say(f, r, "ValueError: x", 1.0), lambda f, r: say(f, r, "ValueError: y", 9.0)),
        (lambda f, r: ended(r, -signal.SIGABRT, 9.0), lambda f, r: say(f, r, "Connection closed by peer", 1.0)),
    ]
    for number, (first, second) in enumerate(pairs):
        for ranks in itertools.permutations((0, 1)):
            folder = tmp_path / f"{number}-{ranks[0]}"
            folder.mkdir()
            workers = sorted([first(folder, ranks[0]), second(folder, ranks[1])], key=lambda w: w.rank)
            assert find_error(folder, workers)["rank"] == ranks[0], (number, ranks)


def test_workers_that_we_ended_are_no_error(tmp_path):
    assert find_error(tmp_path, [ended(0, 0, 1.0), ended(1, -signal.SIGTERM, 1.0, signalled=True)]) is None


# --- progress, from files alone ---------------------------------------------------------------------------------------


def write_steps(run_dir: Path, rank: int, losses: list[float | None], first_end: float) -> None:
    lines = [
        {"step": n, "start": first_end + n - 0.5, "end": first_end + n, "loss": loss, "samples": 12}
        for n, loss in enumerate(losses)
    ]
    (run_dir / f"rank{rank}.steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_progress_is_that_of_the_slowest_rank(runs_dir):
    """Rank 1 ends each step 0.25 s after rank 0. The first step alone: from the first start, 9.5, to the last end,
    10.25, for 12 samples; then 12 samples a second, the time from end to end of the slower rank."""
    handle = Handle(archive.new_run(runs_dir, JOB, launcher_pid=os.getpid()))
    progress = handle.poll()
    assert (progress.state, progress.step, progress.losses, progress.samples_per_second) == ("starting", 0, (), None)
    assert progress.ranks == (RankProgress(0, 0, "starting"), RankProgress(1, 0, "starting"))
    write_steps(handle.run_dir, 0, [4.0, 2.0, 1.0], 10.0)
    write_steps(handle.run_dir, 1, [2.0], 10.25)
    progress = handle.poll()
    assert (progress.step, progress.losses) == (1, (3.0,))
    assert progress.samples_per_second == pytest.approx(12 / 0.75)
    assert progress.ranks == (RankProgress(0, 3, "running"), RankProgress(1, 1, "running"))
    write_steps(handle.run_dir, 1, [2.0, None, 0.0], 10.25)
    progress = handle.poll()
    assert (progress.step, progress.losses) == (3, (3.0, 2.0, 0.5))
    assert progress.samples_per_second == pytest.approx(12.0)
    assert progress == Handle(handle.run_dir).poll()


def test_a_broken_folder_has_progress_too(runs_dir):
    (runs_dir / "broken").mkdir()
    progress = open_handle("broken", runs_dir).poll()
    assert (progress.state, progress.step, progress.ranks, progress.samples_per_second) == ("broken", 0, (), None)


@pytest.mark.parametrize(("run_id", "code"), [("../../etc", "bad_run_id"), ("unknown", "no_run")])
def test_a_handle_is_not_opened_outside_the_runs_folder(runs_dir, run_id, code):
    with pytest.raises(SpecError) as caught:
        open_handle(run_id, runs_dir)
    assert caught.value.code == code


def test_a_spec_that_cannot_run_here_starts_nothing(runs_dir):
    before = default_launcher()._process
    with pytest.raises(SpecError) as caught:
        start(Spec(mode="ddp", devices=128, model="mlp", global_batch=128), runs_dir)
    assert caught.value.code == "cannot_run_here"
    assert os.listdir(runs_dir) == [] and default_launcher()._process is before
