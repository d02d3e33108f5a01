"""Lines on standard input -> runs: forks one worker a rank, from a process that has torch imported already.

`python -m engine.real.launcher` prints {"event": "ready"} and then reads one JSON object a line: {"start": RUN_DIR}.
From there on the run folder tells everything: status.json by this process, the rest by the workers; a file `stop`
in it ends the run. At end of file the program that started this one has ended, and every worker of every run is
killed. Workers die with this process, whatever ends it (Linux: PR_SET_PDEATHSIG).

Forking is safe because this process has one thread, never runs a torch operation and never touches CUDA: each child
starts its own threads, and takes its own device.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.archive import no_place, process_start, read_error, read_json, read_steps, write_in_place, write_json
from engine.asking.rules import SpecError
from engine.modes import MODES
from engine.real.cause import describe, find_error, is_consequence
from engine.schedules import TABLE as SCHEDULES

# Whatever the first step would otherwise import in every worker; without torch._dynamo alone it takes 2.5 s. And what
# every run's end would: to write a parquet file, and to take numpy's unique.
PRELOAD = (
    *("torch.distributed", "torch.distributed.pipelining", "torch.nn.parallel", "torch._dynamo"),
    *("torch.utils.serialization.config", "pyarrow.parquet", "numpy.ma"),
    *(f"engine.modes.{mode}.{file}" for mode in MODES for file in ("run", "plan")),
    *(f"engine.schedules.{shape.file}" for shape in SCHEDULES.values()),
)
SINCE_2_13 = "torch.profiler._cupti_monitor"  # which torch's marks look for

TICK = 0.05  # seconds between looks for the file `stop` and for deadlines
GRACE = 0.3  # from the first failure: time for its peers to say what they saw
PATIENCE = 1.0  # the same, where the first failure is one that waited too long: its peers may be about to say so too
TERM_TO_KILL = 0.5
FINISH_LIMIT = 300.0

PR_SET_PDEATHSIG = 1  # prctl(2)
SIGNALS = (signal.SIGCHLD, signal.SIGTERM)

Work = Callable[[str, int, int], Any]  # what it returns is kept until the worker has gone
Finish = Callable[[Path, str, dict[str, Any] | None], None]


@dataclass(slots=True)
class Child:
    """A forked process: a worker, or the finisher of a run."""

    pid: int
    rank: int | None
    exit_code: int | None = None  # None while it lives; negative: the signal that killed it
    ended: float = 0.0  # unix seconds
    signalled: bool = False  # by us, so that how it ends says nothing about the run
    steps: int | None = None  # that a worker had finished when it was found to have ended

    @property
    def lives(self) -> bool:
        return self.exit_code is None

    def reap(self, options: int = os.WNOHANG) -> None:
        if self.lives:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.exit_code, self.ended = os.waitstatus_to_exitcode(status), time.time()

    def signal(self, number: int) -> None:
        """Not waited for yet, so the pid cannot belong to another process."""
        if self.lives:
            self.signalled = True
            os.kill(self.pid, number)


class Run:
    """The processes of one run, and its status file. `advance` is called again and again; it never waits."""

    def __init__(self, run_dir: Path, work: Work, finish: Finish, private_fds: tuple[int, ...]):
        self.run_dir, self._finish, self._private_fds = run_dir, finish, private_fds
        status = read_json(run_dir / "status.json")
        if status is None:
            raise FileNotFoundError(f"{run_dir} is not a run folder: it has no status.json")
        self._status = status | {"launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid())}
        self._outcome = "stopped" if self._asked_to_stop() else "finished"
        self._term_at = self._kill_at = float("inf")
        self._error: dict[str, Any] | None = None
        self._finisher: Child | None = None
        self._workers: list[Child] = []
        self.done = False
        if self._outcome == "stopped":
            return
        world_size = status["processes"]
        try:
            for rank in range(world_size):
                train = functools.partial(_train, work, run_dir, rank, world_size)
                self._workers.append(Child(fork(train, run_dir / f"rank{rank}.log", private_fds), rank))
        except OSError as error:
            self._error = no_place(f"rank {len(self._workers)} could not be started: {error}")
            self._end("failed", wait=0.0)
        try:
            self._write(state="running", worker_pids=[w.pid for w in self._workers])
        except OSError as error:
            self.lose(error)

    def advance(self) -> None:
        if self._finisher is not None:
            self._conclude()
            return
        for worker in self._workers:
            worker.reap()
        alive = any(w.lives for w in self._workers)
        if self._outcome == "finished":
            if failed := [w for w in self._workers if w.exit_code or self._has_left(w)]:
                waited = any(is_consequence(read_error(self.run_dir, w.rank)) for w in failed)
                self._end("failed", wait=PATIENCE if waited else GRACE)
            elif alive and self._asked_to_stop():
                self._end("stopped", wait=0.0)
        now = time.monotonic()
        if now >= self._term_at:
            self._signal(signal.SIGTERM)
            self._term_at = float("inf")
        if now >= self._kill_at:
            self._signal(signal.SIGKILL)
            self._kill_at = float("inf")
        if not alive:
            self._begin_finish()

    def lose(self, error: OSError) -> None:
        """The folder was deleted, or the disk is full: nobody could follow the run, so it ends."""
        self.abandon("failed", f"the run cannot be followed: {error}")

    def abandon(self, state: str, reason: str) -> None:
        """End every process now, without results."""
        children = [*self._workers, *([self._finisher] if self._finisher else [])]
        for child in children:
            child.signal(signal.SIGKILL)
        for child in children:
            child.reap(options=0)
        self.done = True
        try:
            self._write(state=state, error=no_place(reason))
        except OSError:
            try:  # where there is no room for a second file, the last word is written over the first
                write_in_place(self.run_dir / "status.json", self._status)
            except OSError as error:
                report(f"{self.run_dir}: {error}")

    def _asked_to_stop(self) -> bool:
        """Raises FileNotFoundError when the whole folder was deleted."""
        return "stop" in os.listdir(self.run_dir)

    def _has_left(self, worker: Child) -> bool:
        """Ended as if all were well, before its last step: its peers wait for it."""
        if worker.exit_code == 0 and worker.steps is None:
            worker.steps = len(read_steps(self.run_dir, worker.rank))
        return worker.exit_code == 0 and worker.steps < self._status["total_steps"]

    def _end(self, outcome: str, wait: float) -> None:
        self._outcome = outcome
        self._term_at = time.monotonic() + wait
        self._kill_at = self._term_at + TERM_TO_KILL

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            worker.signal(number)

    def _begin_finish(self) -> None:
        if self._outcome == "failed" and self._error is None:
            self._error = find_error(self.run_dir, self._workers, self._status["total_steps"])
        self._write(state="finishing", error=self._error)
        finish = functools.partial(self._finish, self.run_dir, self._outcome, self._error)
        self._finisher = Child(fork(finish, self.run_dir / "finish.log", self._private_fds), None)
        self._kill_at = time.monotonic() + FINISH_LIMIT

    def _conclude(self) -> None:
        self._finisher.reap()
        if self._finisher.lives:
            if time.monotonic() >= self._kill_at:
                self._finisher.signal(signal.SIGKILL)
            return
        if self._finisher.exit_code:
            said = (self.run_dir / "finish.log").read_text(errors="replace").strip().splitlines()
            raised = said and self._finisher.exit_code == 1
            message = f"the results could not be written: {said[-1] if raised else describe(self._finisher)}"
            if self._error is None:
                self._outcome, self._error = "failed", no_place(message)
            else:
                self._error = self._error | {"message": f"{self._error['message']}; {message}"}
        self._write(state=self._outcome, error=self._error)
        self.done = True

    def _write(self, **changes: Any) -> None:
        self._status |= changes | {"updated": time.time()}
        write_json(self.run_dir / "status.json", self._status)


def _train(work: Work, run_dir: Path, rank: int, world_size: int) -> Any:
    """In a worker: train, or write down what went wrong."""
    # For what is loaded from here on; torch has been, so the worker tells it itself.
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world_size))
    try:
        return work(str(run_dir), rank, world_size)
    except BaseException as error:
        name = "" if isinstance(error, SpecError) else type(error).__name__
        said = {
            "rank": getattr(error, "rank", rank),
            "step": getattr(error, "step", None),
            "op": getattr(error, "op", None),
            "message": ": ".join(part for part in (name, str(error)) if part),
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        write_json(run_dir / f"rank{rank}.error.json", said)
        raise


def fork(call: Callable[[], Any], log: Path, private_fds: tuple[int, ...]) -> int:
    """A child that calls `call` with its output in `log`, exits with 0 or 1, and dies with this process. Its pid."""
    if threading.active_count() != 1:
        raise RuntimeError(f"this process must have one thread to fork; it has {threading.active_count()}")
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
    # No signal may reach the child while it still has the handlers of its parent.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
        if pid:
            return pid
        try:
            _become_child(parent, prctl, log, private_fds)
            _leave(0, call())
        except BaseException as error:
            traceback.print_exc()
            _leave(1, error)
        finally:
            os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _leave(code: int, _kept: Any) -> None:
    """End this process without collecting anything: neither what the parent left here to run at its exit, nor the
    result or the frames of the work, whose process groups deadlock when they are (gloo's threads wait for the GIL that
    the destructor which joins them holds)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become_child(parent: int, prctl: Callable, log: Path, private_fds: tuple[int, ...]) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that was set
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)
    for fd in (nothing, out, *private_fds):
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()  # a segmentation fault leaves its stack in the log


def serve(work: Work, finish: Finish) -> None:
    """Start what standard input asks for and see it through, until there is no more input."""
    runs: list[Run] = []
    wake, wakeup = os.pipe()  # a byte for each signal, so that select returns at once
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    rest, reason = b"", ""
    while not reason:
        readable, _, _ = select.select([0, wake], [], [], TICK if runs else None)
        if wake in readable and signal.SIGTERM in os.read(wake, 4096):
            reason = "the launcher process was told to end"
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                reason = "the program that started this run ended"
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    runs.append(Run(Path(json.loads(line)["start"]), work, finish, (wake, wakeup)))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    report(f"{line.decode(errors='replace')}: {error}")
        for run in runs:
            try:
                run.advance()
            except OSError as error:
                run.lose(error)
        runs = [run for run in runs if not run.done]
    for run in runs:
        run.abandon("stopped", reason)


def report(message: str) -> None:
    print(f"engine.real.launcher: {message}", file=sys.stderr, flush=True)


def load(name: str) -> Callable:
    """`module:function` -> the function."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.real.launcher", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--worker", default="engine.real.worker:work", help="module:function(run_dir, rank, world_size)"
    )
    parser.add_argument(
        "--finish", default="engine.outcome.finish:finish", help="module:function(run_dir, state, error)"
    )
    parser.add_argument("--no-preload", action="store_true", help="do not import torch (for workers without it)")
    options = parser.parse_args()
    # Ctrl-C is for the program in front; it closes our standard input when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in () if options.no_preload else PRELOAD:
        importlib.import_module(module)
    if not options.no_preload:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(SINCE_2_13)
        # Kept by the module, so that workers find them made.
        datasets = importlib.import_module("engine.data.datasets")
        datasets.load("digits", kind="image")
        with contextlib.suppress(datasets.DatasetError):  # a Python without its help: who asks for it is told
            datasets.vocabulary_size("text")
    work, finish = load(options.worker), load(options.finish)
    gc.collect()
    gc.freeze()  # workers share these pages; a collection would copy them all
    with contextlib.suppress(BrokenPipeError):  # whoever asked has gone; so has its end of standard input
        os.write(1, b'{"event": "ready"}\n')
    serve(work, finish)


if __name__ == "__main__":
    main()
