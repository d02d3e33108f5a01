"""A spec -> a Handle of its real run: found again by its id, followed, stopped, awaited, from any process. No torch.

A `Launcher` owns the process that has torch imported (`engine.real.launcher`) and ends with it. A `Handle` reads the
run folder and nothing else, so it needs no launcher.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine import archive, checkpoints
from engine.archive import RUNS
from engine.job import Job, prepare_real
from engine.scale_model.pictured import at_scale
from engine.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
# Read when numpy, torch and pyarrow are imported. A process that forks has no threads, so numpy's BLAS must start none,
# and neither must pyarrow's allocator.
FORKING = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# torch's threads sleep while they wait for each other: by default they spin, and where something else needs a core too
# (a browser that shows the run), a step was seen to take ten times longer.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
# Python's own switches are for the program in front. torch warns when it is imported, and needs its docstrings.
IN_FRONT = ("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONDEVMODE")
# Seconds between looks at a run folder while somebody waits: at first, at most, and between them as a part of the time
# waited so far. A look takes a part of a millisecond of a core that the run may need.
SOON, SELDOM, PART = 0.02, 0.2, 0.02


def start(spec: Spec, runs_dir: str | Path = RUNS, launcher: Launcher | None = None) -> Handle:
    """Begin a real run and return at once. Raises SpecError when it cannot be run here."""
    job = prepare_real(spec)
    if spec.resume is not None:
        job = prepare_real(checkpoints.resolve(job, runs_dir))
    return (launcher or default_launcher()).start(at_scale(job), runs_dir)


def open_handle(run_id: str, runs_dir: str | Path = RUNS) -> Handle:
    """A run by its id, whoever started it. Raises SpecError("bad_run_id" or "no_run")."""
    return Handle(archive.open_run(runs_dir, run_id))


class LauncherError(RuntimeError):
    """The launcher process did not come up (it has printed why on standard error), or a run has no result for it."""


class Launcher:
    """The warm process that forks workers. Started when first needed, and again when it has died; safe to share
    between threads. When this object is closed or collected, or this program ends, so do all of its runs."""

    def __init__(self, options: Sequence[str] = ()):
        """`options` are those of `python -m engine.real.launcher`."""
        self._command = [sys.executable, "-P", "-m", "engine.real.launcher", *options]
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()  # held for moments only
        self._reading = threading.Lock()  # held until a process is ready: seconds

    def warm(self) -> None:
        """Return when the process has torch imported (seconds, once). Raises LauncherError when it ends before."""
        with self._lock:
            process = self._living()
        with self._reading:
            # The only line it ever prints: once read, the pipe is closed, and there is nothing to wait for.
            if not process.stdout.closed:
                with process.stdout as lines:
                    if not any(b'"ready"' in line for line in lines):
                        raise LauncherError(f"the launcher process ended with exit code {process.wait()} at its start")

    @property
    def pid(self) -> int:
        with self._lock:
            return self._living().pid

    def start(self, job: Job, runs_dir: str | Path = RUNS) -> Handle:
        """Make the run folder and ask for the run. Does not wait, not even for the process to be warm."""
        with self._lock:
            process = self._living()
            run_dir = archive.new_run(runs_dir, job, launcher_pid=process.pid).absolute()
            _ask(process, run_dir)
        return Handle(run_dir)

    def begin(self, run_dir: Path) -> None:
        """Ask for what a folder with a first status asks of this launcher's worker."""
        with self._lock:
            _ask(self._living(), run_dir)

    def close(self) -> None:
        """End the process and all of its runs."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _living(self) -> subprocess.Popen:
        if self._process is not None and self._process.poll() is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None
        if self._process is None:
            # -P, and the path instead: `engine` is found from any directory, and nothing in that directory is.
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            given = {name: value for name, value in os.environ.items() if name not in IN_FRONT}
            self._process = subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Its own session: Ctrl-C in the terminal reaches the program, which then ends the runs in order.
                start_new_session=True,
                env=WAITING | given | FORKING | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        return self._process

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ask(process: subprocess.Popen, run_dir: Path) -> None:
    # When it died this instant, the run's status names its pid, and so reads as failed.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps({"start": str(run_dir)}).encode() + b"\n")


@functools.cache
def default_launcher() -> Launcher:
    """The one that a program uses when it names none."""
    return Launcher()


class RankProgress(NamedTuple):
    """One worker: `step` is the number of steps it has finished; `state` is one of the run's states."""

    rank: int
    step: int
    state: str


class Progress(NamedTuple):
    """A run at one moment, as its files tell it."""

    state: str  # one of archive.STATES, or "broken"
    step: int  # steps that every rank has finished
    total_steps: int
    losses: tuple[float | None, ...]  # one a finished step: the mean over the ranks that have one
    samples_per_second: float | None  # over the finished steps after the first; of the first while it is alone
    ranks: tuple[RankProgress, ...]
    error: dict[str, Any] | None  # rank, step, op, message


class Handle:
    """A run in its folder. Any number of handles, in any process, can watch the same run and stop it."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self.run_id = self.run_dir.name
        self._files: list[archive.StepFile] = []
        self._losses: list[float | None] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the run has come to its final state, and its results are written."""
        return archive.read_status(self.run_dir)["state"] in archive.FINAL

    def poll(self) -> Progress:
        """How far it is. Reads only what was written since the last call; never waits."""
        # The status first: when it says that the run has ended, all steps are in their files.
        status = archive.read_status(self.run_dir)
        with self._lock:
            if len(self._files) != status["processes"]:
                self._files = [archive.StepFile(self.run_dir, rank) for rank in range(status["processes"])]
                self._losses = []
            steps = [file.read() for file in self._files]
            common = min(map(len, steps), default=0)
            fresh = zip(*(rank[len(self._losses) : common] for rank in steps), strict=True)
            self._losses += [_mean([rank["loss"] for rank in step if rank["loss"] is not None]) for step in fresh]
            losses, ends = tuple(self._losses), [[rank[i] for rank in steps] for i in (0, common - 1) if common]
        return Progress(
            state=status["state"],
            step=common,
            total_steps=status["total_steps"],
            losses=losses,
            samples_per_second=_rate(common, ends, archive.read_json(self.run_dir / "spec.json") or {}),
            ranks=tuple(
                RankProgress(rank, len(done), _rank_state(self.run_dir, status, rank, len(done)))
                for rank, done in enumerate(steps)
            ),
            error=status["error"],
        )

    def stop(self) -> None:
        """Ask for its end, which comes within a second or two. Harmless when it has ended, or has not begun."""
        archive.ask_to_stop(self.run_dir)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run, whatever it is: result.json. Raises TimeoutError, and LauncherError where the
        run was cut off before its results were written."""
        began = time.monotonic()
        deadline = float("inf") if timeout is None else began + timeout
        while True:
            status = archive.read_status(self.run_dir)
            if status["state"] in archive.FINAL:
                break
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the run {self.run_id} is {status['state']} after {timeout} s")
            time.sleep(min(max(SOON, PART * (time.monotonic() - began)), SELDOM))
        result = archive.read_result(self.run_dir)
        if result is None:
            reason = status["error"]["message"] if status["error"] else "result.json is missing or damaged"
            raise LauncherError(f"The run {self.run_id} has no result: {reason}.")
        return result


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(count: int, first_and_last: list[list[dict]], spec: dict[str, Any]) -> float | None:
    """Samples a second by the wall clock, from the end of the first step (which warms up) to the end of the last."""
    if not count or "global_batch" not in spec:
        return None
    begin, end = (max(rank["end"] for rank in step) for step in first_and_last)
    if count == 1:
        begin = min(rank["start"] for rank in first_and_last[0])
    return spec["global_batch"] * max(1, count - 1) / (end - begin) if end > begin else None


def _rank_state(run_dir: Path, status: dict[str, Any], rank: int, step: int) -> str:
    """A run that failed has one rank that did, where that is known; the others were stopped for it."""
    if status["error"] is not None and status["error"].get("rank") == rank:
        return "failed"
    if step >= status["total_steps"]:
        return "finished"
    if status["state"] == "finishing" or status["state"] in archive.FINAL:
        return "stopped"
    if archive.read_error(run_dir, rank) is not None:
        return "failed"
    return "running" if step else "starting"
