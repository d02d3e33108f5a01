"""A run seen through its files alone, no process needed: which failure is its error, and how far it is."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from engine import archive
from engine.asking.rules import SpecError
from engine.job import prepare
from engine.launch import Handle, RankProgress, default_launcher, open_handle, start
from engine.real.cause import find_error
from engine.real.launcher import Child
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
            assert find_error(folder, workers, total_steps=0)["rank"] == ranks[0], (number, ranks)


def test_workers_that_we_ended_are_no_error(tmp_path):
    workers = [ended(0, 0, 1.0), ended(1, -signal.SIGTERM, 1.0, signalled=True)]
    assert find_error(tmp_path, workers, total_steps=0) is None


TIMED_OUT = "RuntimeError: Timed out waiting 4000ms for recv operation to complete"


def test_one_that_ended_well_before_its_last_step_is_what_its_peers_waited_for(tmp_path):
    write_steps(tmp_path, 0, [1.0, 1.0], 1.0)
    write_steps(tmp_path, 1, [1.0], 1.0)
    workers = [say(tmp_path, 0, "Connection reset by peer", 1.0), ended(1, 0, 2.0)]
    error = find_error(tmp_path, workers, total_steps=4)
    assert (error["rank"], error["message"]) == (1, "rank 1 ended after 1 of 4 steps; its peers waited for it")


def test_of_those_that_said_nothing_the_one_that_is_behind_kept_the_others_waiting(tmp_path):
    """Rank 3 has not timed out yet: it waits as rank 0 does, a step ahead of rank 2."""
    for rank, done in enumerate((3, 3, 2, 3)):
        write_steps(tmp_path, rank, [1.0] * done, 1.0)
    silent = [ended(rank, -signal.SIGKILL, 3.0, signalled=True) for rank in (2, 3)]
    workers = [say(tmp_path, 0, TIMED_OUT, 2.0), say(tmp_path, 1, "Connection closed by peer", 1.0), *silent]
    error = find_error(tmp_path, workers, total_steps=4)
    assert (error["rank"], error["step"]) == (2, 2)
    assert error["message"] == f"rank 2 did not answer; rank 0 waited: {TIMED_OUT}"


@pytest.mark.parametrize("alone", [0, 1, 2])
def test_of_ranks_that_wait_for_each_other_the_one_in_another_operation_is_named(alone, tmp_path):
    for rank in range(3):
        say(tmp_path, rank, TIMED_OUT, 1.0 + rank)
        path = tmp_path / f"rank{rank}.error.json"
        archive.write_json(path, archive.read_json(path) | {"op": "broadcast" if rank == alone else "backward"})
    error = find_error(tmp_path, [ended(rank, 1, 1.0) for rank in range(3)], total_steps=4)
    assert (error["rank"], error["step"], error["op"]) == (alone, 1, "broadcast")
    others = ", ".join(str(rank) for rank in range(3) if rank != alone)
    assert f"rank {alone} in broadcast" in error["message"] and f"rank {others} in backward" in error["message"]


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
