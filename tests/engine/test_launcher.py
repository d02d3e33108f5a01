"""Real processes, stub training: every way a run can end, and that nothing is left when it has."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import archive
from engine.job import Job, prepare
from engine.launch import ROOT, Handle, Launcher, LauncherError, RankProgress, open_handle
from engine.real.launcher import Run
from engine.spec import Spec
from tests.engine import stub_workers
from tests.engine.stub_workers import OPTIONS, STEP

SOON = 10.0  # seconds; a limit for what takes milliseconds, on a busy machine

# --- help for the tests -----------------------------------------------------------------------------------------------


def job_of(devices: int = 2, steps: int = 4) -> Job:
    return prepare(Spec(mode="ddp", devices=devices, model="mlp", steps=steps, global_batch=12))


def wait_for(what: Callable[[], Any], seconds: float = SOON) -> Any:
    """The first true value of `what`."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, "this did not come true in time"
        time.sleep(0.005)
    return value


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if archive.process_start(pid) is not None]


def children_of(pid: int) -> list[int]:
    """By proc(5): field 4 of /proc/PID/stat is the parent."""
    children = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            children.append(int(entry))
    return children


@pytest.fixture(scope="module")
def shared() -> Iterator[Launcher]:
    with Launcher(OPTIONS) as launcher:
        launcher.warm()
        yield launcher
        assert children_of(launcher.pid) == [], "processes are left after all runs have ended"


@pytest.fixture
def run(shared, runs_dir) -> Callable[..., Handle]:
    """Start a run whose ranks behave so, with the shared launcher."""

    def run(behaviour: dict[Any, str] | None = None, **job: int) -> Handle:
        archive.write_json(runs_dir / "behaviour.json", {str(k): v for k, v in (behaviour or {}).items()})
        return shared.start(job_of(**job), runs_dir)

    return run


def begun(handle: Handle) -> list[int]:
    """The pids of the workers, once every rank has come to the step at which it does what it is told to."""
    wait_for(lambda: handle.poll().step >= STEP)
    return wait_for(lambda: archive.read_status(handle.run_dir)["worker_pids"])


# --- how runs end -----------------------------------------------------------------------------------------------------


def test_a_run_that_succeeds(run):
    handle = run(devices=3)
    assert handle.result(SOON) == {"state": "finished", "error": None}
    progress = handle.poll()
    assert (progress.state, progress.step, progress.total_steps, progress.error) == ("finished", 4, 4, None)
    assert progress.losses == (1.0,) * 4
    assert progress.ranks == tuple(RankProgress(rank, 4, "finished") for rank in range(3))
    assert handle.done and not living(archive.read_status(handle.run_dir)["worker_pids"])


FAILURES = {
    "raise": ("ValueError: this was meant", STEP, "all_reduce"),
    # Who said nothing was in the step after those that it finished.
    "exit": ("rank 1 exited with code 3 and said nothing", STEP, None),
    "signal 9": ("rank 1 was killed by signal 9 (SIGKILL)", STEP, None),
    "signal 11": ("rank 1 was killed by signal 11 (SIGSEGV)", STEP, None),
    "signal 6": ("rank 1 aborted (signal 6)", STEP, None),
}


@pytest.fixture(scope="module")
def failing(shared, tmp_path_factory) -> dict[tuple[str, str], Handle]:
    """One run for each way to fail and each way in which peers take it; all go on at once."""
    handles = {}
    for does in FAILURES:
        for peers in ("hang", "tell"):
            runs_dir = tmp_path_factory.mktemp("failing")
            behaviour = {"1": f"late {does}" if peers == "tell" else does, "0": peers, "2": peers}
            archive.write_json(runs_dir / "behaviour.json", behaviour)
            handles[does, peers] = shared.start(job_of(devices=3), runs_dir)
    return handles


@pytest.mark.parametrize("does", FAILURES)
@pytest.mark.parametrize("peers", ["hang", "tell"])
def test_the_rank_that_failed_is_named_whatever_its_peers_do(failing, does, peers):
    """With "tell" the peers report the closed connection before the rank itself has gone."""
    handle = failing[does, peers]
    message, step, op = FAILURES[does]
    error = {"rank": 1, "step": step, "op": op, "message": message}
    assert handle.result(SOON) == {"state": "failed", "error": error}
    progress = handle.poll()
    assert (progress.state, progress.error) == ("failed", error)
    assert [rank.state for rank in progress.ranks] == ["stopped", "failed", "stopped"]
    assert not living(archive.read_status(handle.run_dir)["worker_pids"])


def test_a_worker_that_raised_leaves_its_traceback(run):
    handle = run({1: "raise"})
    handle.result(SOON)
    assert "in act" in archive.read_error(handle.run_dir, 1)["traceback"]
    assert "ValueError: this was meant" in archive.read_log(handle.run_dir, 1)
    assert archive.read_error(handle.run_dir, 0) is None


def test_a_peer_that_ignores_the_polite_signal_is_killed(run):
    handle = run({0: "deaf", 1: "exit"})
    assert handle.result(SOON)["error"]["rank"] == 1
    assert not living(archive.read_status(handle.run_dir)["worker_pids"])


@pytest.mark.parametrize("behaviour", ["hang", "deaf"])
def test_stop_ends_every_process_within_two_seconds(run, behaviour, alone):
    handle = run({0: behaviour})
    pids = begun(handle)
    assert len(living(pids)) == 2
    with alone():
        asked = time.monotonic()
        handle.stop()
        handle.stop()
        assert handle.result(SOON) == {"state": "stopped", "error": None}
        assert time.monotonic() - asked < 2.0
    assert not living(pids)
    assert [rank.state for rank in handle.poll().ranks] == ["stopped", "stopped"]


def test_stop_works_from_the_id_alone(run, runs_dir):
    handle = run({0: "hang"})
    begun(handle)
    program = f"from engine.launch import open_handle; open_handle({handle.run_id!r}, {str(runs_dir)!r}).stop()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    assert handle.result(SOON)["state"] == "stopped"


def test_stop_after_the_end_changes_nothing(run):
    handle = run()
    handle.result(SOON)
    before = sorted(os.listdir(handle.run_dir))
    handle.stop()
    assert handle.poll().state == "finished" and sorted(os.listdir(handle.run_dir)) == before


def test_a_run_stopped_before_it_begins_starts_no_worker(shared, run):
    os.kill(shared.pid, signal.SIGSTOP)
    try:
        handle = run()
        assert handle.poll().state == "starting" and not handle.done
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.0)
        handle.stop()
    finally:
        os.kill(shared.pid, signal.SIGCONT)
    assert handle.result(SOON)["state"] == "stopped"
    assert archive.read_status(handle.run_dir)["worker_pids"] == []


def test_runs_do_not_wait_for_each_other(run, runs_dir):
    slow = run({1: "wait"})
    pids = begun(slow)
    quick = run()
    assert quick.result(SOON)["state"] == "finished"
    assert len(living(pids)) == 2 and slow.poll().state == "running"
    (runs_dir / "go").touch()
    assert slow.result(SOON)["state"] == "finished"


def test_many_threads_may_start_runs(run):
    with ThreadPoolExecutor(6) as pool:
        handles = list(pool.map(lambda _: run(steps=1), range(6)))
    assert len({h.run_id for h in handles}) == 6
    assert [h.result(SOON)["state"] for h in handles] == ["finished"] * 6


def test_deleting_a_run_ends_it(run, runs_dir, shared):
    handle = run({0: "deaf"})
    pids = begun(handle)
    archive.delete_run(runs_dir, handle.run_id)
    wait_for(lambda: not living(pids))
    assert handle.poll().state == "broken" and archive.list_runs(runs_dir) == []
    assert run().result(SOON)["state"] == "finished"


def test_a_finisher_that_fails_fails_the_run(run):
    handle = run({"finish": "raise"})
    with pytest.raises(LauncherError, match="nowhere to write"):
        handle.result(SOON)
    progress = handle.poll()
    assert progress.state == "failed"
    assert progress.error == archive.no_place("the results could not be written: ValueError: nowhere to write")


def test_a_finisher_that_fails_does_not_hide_what_failed_before(run):
    handle = run({"finish": "raise", 1: "exit"})
    wait_for(lambda: handle.done)
    error = handle.poll().error
    assert error["rank"] == 1 and error["message"].startswith("rank 1 exited with code 3 and said nothing; the results")


def test_a_worker_inherits_nothing_of_the_launcher(run):
    handle = run({0: "look"})
    handle.result(SOON)
    cores = len(os.sched_getaffinity(0))
    assert archive.read_json(handle.run_dir / "seen.json") == {
        "pipes": [],
        "input": "",
        "handlers": [True, True, True],
        "blocked": [],
        "threads": str(max(1, cores // 2)),
    }
    assert archive.read_log(handle.run_dir, 0) == "printed\nwritten"


# --- how launchers end ------------------------------------------------------------------------------------------------


def test_when_the_launcher_is_killed_nothing_is_left_and_the_next_run_gets_a_new_one(runs_dir):
    archive.write_json(runs_dir / "behaviour.json", {"0": "deaf"})
    with Launcher(OPTIONS) as launcher:
        handle = launcher.start(job_of(), runs_dir)
        pids, killed = begun(handle), launcher.pid
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: not living([killed, *pids]), seconds=5.0)
        # Not waited for: the dead launcher is still a zombie of this process.
        with pytest.raises(LauncherError, match="the launcher process ended"):
            handle.result(SOON)
        assert handle.poll().state == "failed"
        archive.write_json(runs_dir / "behaviour.json", {})
        assert launcher.start(job_of(), runs_dir).result(SOON)["state"] == "finished"
        assert launcher.pid != killed


@pytest.mark.parametrize("how", ["killed", "closed", "told"])
def test_when_program_or_launcher_ends_so_do_its_runs(runs_dir, how):
    archive.write_json(runs_dir / "behaviour.json", {"0": "deaf"})
    program = f"""if True:
        import sys
        from engine.launch import Launcher
        from tests.engine.test_launcher import OPTIONS, job_of
        launcher = Launcher(OPTIONS)
        print(launcher.start(job_of(), {str(runs_dir)!r}).run_id, flush=True)
        sys.stdin.read()
        launcher.close()"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        handle = open_handle(parent.stdout.readline().strip(), runs_dir)
        pids = begun(handle)
        launcher = archive.read_status(handle.run_dir)["launcher_pid"]
        assert len(living([launcher, *pids])) == 3
        if how == "killed":
            parent.kill()
        elif how == "closed":
            parent.stdin.close()
        else:
            os.kill(launcher, signal.SIGTERM)
        wait_for(lambda: not living([launcher, *pids]), seconds=5.0)
    status = archive.read_status(handle.run_dir)
    reason = "the launcher process was told to end" if how == "told" else "the program that started this run ended"
    assert (status["state"], status["error"]) == ("stopped", archive.no_place(reason))


def test_the_launcher_survives_an_interrupt_and_lines_it_cannot_read(runs_dir, capfd):
    with Launcher(OPTIONS) as launcher:
        launcher.warm()
        before = launcher.pid
        os.kill(before, signal.SIGINT)
        for line in (b"\n", b"{\n", b"7\n", b"{}\n", b'{"start": "/nowhere"}\n', b"\xff\n"):
            launcher._process.stdin.write(line)
        assert launcher.start(job_of(), runs_dir).result(SOON)["state"] == "finished"
        assert launcher.pid == before
    assert capfd.readouterr().err.count("engine.real.launcher: ") == 6


def test_a_run_for_whose_status_there_is_no_room_has_failed_and_left_no_worker(runs_dir, monkeypatch):
    """Its last word goes where the first one was: whoever waits for the run would else wait for ever."""
    workers = []

    def fork(*_) -> int:
        workers.append(subprocess.Popen(["sleep", "60"]))
        return workers[-1].pid

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run_dir = archive.new_run(runs_dir, job_of(), launcher_pid=os.getpid())
    monkeypatch.setattr("engine.real.launcher.fork", fork)
    monkeypatch.setattr("engine.real.launcher.write_json", full)
    assert Run(run_dir, stub_workers.train, stub_workers.finish, ()).done
    assert len(workers) == 2 and not living([worker.pid for worker in workers])
    status = archive.read_status(run_dir)
    assert status["state"] == "failed" and "No space left on device" in status["error"]["message"]


def test_a_launcher_whose_program_ends_while_it_warms_up_ends_without_a_word(runs_dir):
    launcher = Launcher(OPTIONS)
    handle = launcher.start(job_of(), runs_dir)
    process = launcher._process
    process.stdout.close()
    process.stdin.close()
    assert process.wait(SOON) == 0
    assert archive.read_status(handle.run_dir)["state"] in ("stopped", "failed")


def test_a_launcher_that_cannot_start_says_so():
    with Launcher(["--no-preload", "--worker", "engine.nothing:work"]) as launcher, pytest.raises(LauncherError):
        launcher.warm()


def test_engine_is_found_from_any_directory_and_nothing_there_is_taken_for_it(runs_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("engine.py", "json.py", "select.py"):
        (tmp_path / name).write_text("raise ImportError('the wrong one')")
    with Launcher(OPTIONS) as launcher:
        assert launcher.start(job_of(), "runs").result(SOON)["state"] == "finished"
    assert len(archive.list_runs(runs_dir)) == 1


@pytest.mark.real
def test_the_warm_process_has_one_thread_and_no_gpu(launcher):
    """The conditions for forking: threads do not survive a fork, and neither does a CUDA context."""
    assert len(os.listdir(f"/proc/{launcher.pid}/task")) == 1
    open_files = [os.readlink(f"/proc/{launcher.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{launcher.pid}/fd")]
    assert not [path for path in open_files if path.startswith("/dev/nvidia")]


def test_python_s_own_switches_are_for_the_program_in_front(monkeypatch):
    """With no docstrings, or with every warning an error, torch could not be imported."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    with Launcher(OPTIONS) as launcher:
        launcher.warm()
        seen = Path(f"/proc/{launcher.pid}/environ").read_bytes()
    assert b"PYTHONOPTIMIZE" not in seen and b"PYTHONWARNINGS" not in seen
