"""A run <-> a folder of files: made, written atomically, read while others still write, listed, deleted.

The folder is the truth about a run: launcher and workers write it, everybody else only reads it. A folder holds
spec.json, status.json, a log, a steps file and a spans file a rank, and at the end timeline.parquet and result.json.
Nothing in it is ever unpickled or evaluated, and no path is built from an id that is not letters, digits, dashes and
underscores. `runs/gallery/` holds recorded runs with the same layout.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.asking.rules import SpecError
from engine.spec import Spec

if TYPE_CHECKING:
    from engine.job import Job

RUNS = Path(__file__).resolve().parents[1] / "runs"
GALLERY = "gallery"  # in the runs folder, and therefore not the id of a run

STATES = ("starting", "running", "finishing", "finished", "stopped", "failed")
# A folder without a readable status is shown as "broken"; nobody writes that.
FINAL = ("finished", "stopped", "failed", "broken")

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_STEP_KEYS = {"step", "start", "end", "loss", "samples"}
RESULT_KEYS = {  # of all results, those of the first Lockstep too
    *("run_id", "status", "mode", "devices", "step_time", "predicted_step_time", "samples_per_second", "losses"),
    *("validation_accuracy", "parity", "conformance", "error", "spec"),
}
_MAX_LOG_BYTES = 1 << 20

# --- writing ----------------------------------------------------------------------------------------------------------


def new_run(runs_dir: str | Path, job: Job, launcher_pid: int | None = None) -> Path:
    """A folder with a fresh id, its spec and the status "starting".

    With the pid of the launcher that will be asked to run it, a launcher that dies before it begins is noticed too.
    Raises SpecError("no_place_for_runs") where there is no room for it, or none may be made.
    """
    run_dir = None
    try:
        run_dir = _fresh_folder(Path(runs_dir), f"{job.spec.mode}{job.spec.devices}")
        write_json(run_dir / "spec.json", job.spec.to_dict())
        who = {"mode": job.spec.mode, "devices": job.spec.devices, "total_steps": job.steps}
        status = first_status(run_dir.name, processes=job.processes, launcher_pid=launcher_pid, **who)
        write_json(run_dir / "status.json", status)
    except OSError as error:
        if run_dir is not None:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise SpecError("no_place_for_runs", "runs_dir", f"{runs_dir}: {error.strerror}") from None
    return run_dir


def _fresh_folder(runs_dir: Path, what: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    while True:
        run_dir = runs_dir / f"{stamp}-{what}-{secrets.token_hex(2)}"
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            if not runs_dir.is_dir():  # a link to nowhere: no other name would do
                raise


def first_status(run_id: str, *, processes: int, launcher_pid: int | None = None, **who: Any) -> dict[str, Any]:
    """Of something that a launcher is asked for. `who`: its mode, devices and total_steps, where it trains."""
    now = time.time()
    return {
        "run_id": run_id,
        "state": "starting",
        "mode": None,
        "devices": processes,
        "processes": processes,
        "created": now,
        "updated": now,
        "launcher_pid": launcher_pid,
        "launcher_start": None if launcher_pid is None else process_start(launcher_pid),
        "worker_pids": [],
        "total_steps": 0,
        "error": None,
    } | who


def write_json(path: str | Path, value: Any) -> None:
    """Replace the file at once: a reader sees the old text or the new one, never a part."""
    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        fresh.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_in_place(path: str | Path, value: Any) -> None:
    """Over the file that is there, in one write: it takes no room on the disk that the file has not got already."""
    with Path(path).open("r+b", buffering=0) as file:
        file.write(json.dumps(value, ensure_ascii=False).encode())
        file.truncate()


def ask_to_stop(run_dir: str | Path) -> None:
    """Leave the file `stop`, for which the launcher looks many times a second. Harmless when the run has ended."""
    if read_status(run_dir)["state"] not in FINAL:
        (Path(run_dir) / "stop").touch()


def delete_run(runs_dir: str | Path, run_id: str) -> None:
    """Remove a run's folder, broken ones too; a run still going on ends with it. Recorded ones (gallery) are kept."""
    run_dir = Path(runs_dir) / check_run_id(run_id)
    if run_id == GALLERY or not run_dir.is_dir():
        raise SpecError("no_run", "run", run_id)
    if run_dir.is_symlink():
        run_dir.unlink()
        return
    # Renamed first: whoever still writes finds no folder, so it cannot fill up again while it is emptied.
    doomed = run_dir.with_name(f".{run_id}.deleted")
    run_dir.rename(doomed)
    shutil.rmtree(doomed)


# --- reading ----------------------------------------------------------------------------------------------------------


def check_run_id(run_id: Any) -> str:
    """The id itself, or SpecError("bad_run_id")."""
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise SpecError("bad_run_id", "run", run_id)
    return run_id


def open_run(runs_dir: str | Path, run_id: str) -> Path:
    """The folder of a run, or of a recorded one in the gallery. Raises SpecError("bad_run_id" or "no_run")."""
    check_run_id(run_id)
    for run_dir in (Path(runs_dir) / run_id, Path(runs_dir) / GALLERY / run_id):
        if run_id != GALLERY and run_dir.is_dir():
            return run_dir
    raise SpecError("no_run", "run", run_id)


def list_runs(runs_dir: str | Path) -> list[dict[str, Any]]:
    """The status of every run, newest first; broken folders are last. For the gallery, give `runs_dir / GALLERY`."""
    runs_dir = Path(runs_dir)
    if not runs_dir.is_dir():
        return []
    folders = [f for f in runs_dir.iterdir() if f.is_dir() and f.name != GALLERY and _RUN_ID.fullmatch(f.name)]
    return sorted(map(read_status, folders), key=lambda s: (s["created"] or 0.0, s["run_id"]), reverse=True)


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """The status, with all its keys. A run whose launcher died before a final state is "failed"; a folder without a
    readable status is "broken", and its error says so."""
    status = _read_status(Path(run_dir))
    if status["state"] in FINAL or status["launcher_pid"] is None or _launcher_lives(status):
        return status
    # The launcher may have written its last word after the file was read and before its process was looked for.
    status = _read_status(Path(run_dir))
    if status["state"] not in FINAL:
        status |= {"state": "failed", "error": no_place("the launcher process ended")}
    return status


def no_place(message: str) -> dict[str, Any]:
    """An error of a run that did not happen on one rank."""
    return {"rank": None, "step": None, "op": None, "message": message}


def _read_status(run_dir: Path) -> dict[str, Any]:
    status = dict.fromkeys(("mode", "created", "updated", "launcher_pid", "launcher_start", "error"))
    status |= {"devices": 0, "processes": 0, "total_steps": 0, "worker_pids": []}
    found = read_json(run_dir / "status.json")
    merged = status | (found or {}) | {"run_id": run_dir.name}
    whole = (
        found is not None
        and merged.get("state") in STATES
        and isinstance(merged["created"], int | float)
        and all(type(merged[name]) is int for name in ("devices", "processes", "total_steps"))
        and isinstance(merged["launcher_pid"], int | None)
        and isinstance(merged["error"], dict | None)
    )
    if whole:
        return merged
    error = no_place("status.json is missing or damaged")
    return status | {"run_id": run_dir.name, "state": "broken", "error": error}


def _launcher_lives(status: dict[str, Any]) -> bool:
    start = process_start(status["launcher_pid"])
    return start is not None and start == status["launcher_start"]


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended (a zombie has). A pid that was given
    to another process meanwhile has another start. Source: proc(5), fields 3 and 22 of /proc/PID/stat."""
    try:
        # The name, field 2, is in parentheses and may hold spaces and parentheses itself.
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(numbers[18])


def read_spec(run_dir: str | Path) -> Spec:
    return Spec.from_file(Path(run_dir) / "spec.json")


def read_result(run_dir: str | Path) -> dict[str, Any] | None:
    """What the run came to; None while there is none, or none that can be read."""
    return read_json(Path(run_dir) / "result.json")


def read_whole_result(run_dir: str | Path) -> dict[str, Any] | None:
    """A result with all that is shown of it; None while there is none. SpecError("bad_result") where it is damaged, or
    lacks what all results have."""
    if not (Path(run_dir) / "result.json").exists():
        return None
    result = read_result(run_dir)
    if result is None or not result.keys() >= RESULT_KEYS:
        raise SpecError("bad_result", "run_id", Path(run_dir).name)
    return result


def read_error(run_dir: str | Path, rank: int) -> dict[str, Any] | None:
    """What a worker said before it exited: rank, step, op, message, traceback, time; None when it said nothing."""
    return read_json(Path(run_dir) / f"rank{rank}.error.json")


def read_json(path: str | Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is no such file or no such object in it."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_steps(run_dir: str | Path, rank: int) -> list[dict[str, Any]]:
    """The finished steps of one rank: step, start, end (unix seconds), loss, samples."""
    return StepFile(run_dir, rank).read()


class StepFile:
    """The finished steps of one rank. `read` goes on where it stopped, so that following a long run stays cheap.

    It reads up to the first line that is not whole: the last one may be half-written.
    """

    def __init__(self, run_dir: str | Path, rank: int):
        self._path = Path(run_dir) / f"rank{rank}.steps.jsonl"
        self._offset = 0
        self._steps: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return self._steps
        for line in text.splitlines(keepends=True):
            try:
                step = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(step, dict) or not step.keys() >= _STEP_KEYS:
                break
            self._steps.append(step)
            self._offset += len(line)
        return self._steps


def read_log(run_dir: str | Path, rank: int, tail: int | None = None) -> str:
    """What a worker printed, without the profiler's noise: all of it up to a MiB, or the last `tail` lines."""
    try:
        with (Path(run_dir) / f"rank{rank}.log").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    lines = [line for line in lines if not line.startswith("USDT:")]
    return "\n".join(lines[-tail:] if tail else lines)
