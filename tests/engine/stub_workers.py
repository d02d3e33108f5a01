"""A run folder and a rank -> a worker that trains nothing and ends in the way that `behaviour.json` beside it says.

The launcher imports this file for `train` and `finish`, and runs them in the processes that it forks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engine import archive

OPTIONS = [
    "--no-preload",
    "--worker",
    "tests.engine.stub_workers:train",
    "--finish",
    "tests.engine.stub_workers:finish",
]
STEP = 2  # at which a rank does what it is told to


def train(run_dir: str, rank: int, world_size: int) -> None:
    """Steps in lockstep: a rank begins a step when every rank has finished the one before, else it waits for ever."""
    folder = Path(run_dir)
    behaviour = read_behaviour(folder).get(str(rank), "")
    with (folder / f"rank{rank}.steps.jsonl").open("a", encoding="utf-8") as file:
        for step in range(archive.read_spec(folder).steps):
            while any(len(archive.read_steps(folder, peer)) < step for peer in range(world_size)):
                if behaviour == "tell" and (folder / "going").exists():
                    raise ConnectionError("Connection closed by peer [127.0.0.1]:1234")
                time.sleep(0.002)
            if step == STEP:
                act(behaviour, folder, world_size)
            now = time.time()
            line = {"step": step, "start": now, "end": now, "loss": 1.0, "samples": 8, "memory": 0}
            file.write(json.dumps(line) + "\n")
            file.flush()


def act(behaviour: str, folder: Path, world_size: int) -> None:
    if behaviour.startswith("late "):  # the peers see it going, and say so, before it has gone
        (folder / "going").touch()
        while sum(archive.read_error(folder, peer) is not None for peer in range(world_size)) < world_size - 1:
            time.sleep(0.002)
    match behaviour.removeprefix("late ").split():
        case ["raise"]:
            error = ValueError("this was meant")
            error.step, error.op = STEP, "all_reduce"
            raise error
        case ["exit"]:
            os._exit(3)
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["hang"]:
            hang()
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang()
        case ["wait"]:
            while not (folder.parent / "go").exists():
                time.sleep(0.002)
        case ["look"]:
            archive.write_json(folder / "seen.json", look())


def hang() -> None:
    while True:
        time.sleep(60)


def look() -> dict[str, Any]:
    """What a worker finds around it."""
    print("printed", flush=True)
    os.write(2, b"USDT: noise\nwritten\n")
    # os.listdir's own descriptor is among them, and closed by now.
    paths = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if path.is_symlink()]
    return {
        "pipes": [link for link in links if link.startswith(("pipe:", "socket:", "anon_inode:"))],
        "input": sys.stdin.read(),
        "handlers": [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def finish(run_dir: Path, state: str, error: dict | None) -> None:
    if read_behaviour(Path(run_dir)).get("finish") == "raise":
        raise ValueError("nowhere to write")
    archive.write_json(Path(run_dir) / "result.json", {"state": state, "error": error})


def read_behaviour(folder: Path) -> dict[str, str]:
    return archive.read_json(folder.parent / "behaviour.json") or {}
