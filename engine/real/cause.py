"""How the workers of a run ended, and what they said -> the one failure that explains the others. No torch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.archive import read_error, read_log, read_steps

if TYPE_CHECKING:
    from engine.real.launcher import Child

LAST_LINES = 3  # of a killed worker's log, in the message about it

# What peers say when another rank has gone. It is never the cause while there is another error.
CONSEQUENCES = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "connection refused")


def describe(child: Child) -> str:
    """How a process ended, in words."""
    name = "the finisher" if child.rank is None else f"rank {child.rank}"
    if child.exit_code >= 0:
        return f"{name} exited with code {child.exit_code} and said nothing"
    if child.exit_code == -signal.SIGABRT:
        return f"{name} aborted (signal {signal.SIGABRT})"
    names = {s.value: f" ({s.name})" for s in signal.Signals}  # realtime signals have none
    return f"{name} was killed by signal {-child.exit_code}{names.get(-child.exit_code, '')}"


def last_words(run_dir: Path, rank: int) -> str:
    """What a killed worker's libraries wrote at its end: the last lines before Python's own report of the signal."""
    lines = read_log(run_dir, rank).partition("Fatal Python error")[0].split("\n")
    words = " ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip())
    return f": {words}" if words else ""


def is_consequence(said: dict[str, Any] | None) -> bool:
    return said is not None and any(phrase in str(said.get("message")).lower() for phrase in CONSEQUENCES)


def find_error(run_dir: Path, workers: list[Child], total_steps: int) -> dict[str, Any] | None:
    """The one failure that explains the others, as {rank, step, op, message}.

    In this order: killed by a signal that we did not send; left without a word; said the earliest error; said that a
    peer had gone. How peers end within the grace says nothing of the cause, and they may even be noticed first.
    """
    candidates, waited, silent = [], [], []
    for worker in workers:
        said, done = read_error(run_dir, worker.rank), len(read_steps(run_dir, worker.rank))
        if said is not None:
            consequence = is_consequence(said)
            waited += [said] if consequence else []
            candidates.append((3 if consequence else 2, said.get("time", worker.ended), said.get("rank"), said))
        elif worker.exit_code and not worker.signalled:
            # An abort is a consequence too, where a backend's own thread sees that a peer has gone.
            order = 2 if worker.exit_code == -signal.SIGABRT else 0 if worker.exit_code < 0 else 1
            message = describe(worker) + last_words(run_dir, worker.rank)
            candidates.append((order, worker.ended, worker.rank, {"message": message}))
        elif worker.exit_code == 0 and done < total_steps:
            message = f"rank {worker.rank} ended after {done} of {total_steps} steps; its peers waited for it"
            candidates.append((1, worker.ended, worker.rank, {"message": message}))
        elif worker.signalled:
            silent.append((done, worker.rank))
    if not candidates:
        return None
    order, _, rank, said = min(candidates, key=lambda c: c[:3])
    if order == 3:
        rank, said = _who_kept_them_waiting(waited, silent) or (rank, said)
    step = said.get("step")
    if step is None and (run_dir / f"rank{rank}.steps.jsonl").exists():  # its training had begun
        step = min(len(read_steps(run_dir, rank)), max(0, total_steps - 1))  # the one after those that it did
    return {"rank": rank, "step": step, "op": said.get("op"), "message": said.get("message")}


def _who_kept_them_waiting(waited: list[dict], silent: list[tuple[int, int]]) -> tuple[int, dict] | None:
    """Where everybody who spoke had only waited: (rank, what to say of it). One that said nothing at all; else, where
    ranks waited in different operations, one of those that stand alone with theirs."""
    timed_out = [said for said in waited if "timed out" in str(said["message"]).lower()]
    if not timed_out:  # they had lost a peer: one that has been looked at already, or nobody's fault
        return None
    first = min(timed_out, key=lambda said: said["time"])
    if silent:
        _, rank = min(silent)
        where = f" in {first['op']}" if first["op"] else ""
        return rank, {"message": f"rank {rank} did not answer; rank {first['rank']} waited{where}: {first['message']}"}
    doing: dict[str, list[dict]] = {}
    for said in waited:
        doing.setdefault(said["op"] or "no operation", []).append(said)
    if len(doing) < 2:
        return None
    alone = min(doing.values(), key=len)[0]
    words = [f"rank {', '.join(str(said['rank']) for said in group)} in {op}" for op, group in doing.items()]
    return alone["rank"], alone | {"message": f"the ranks waited for each other: {'; '.join(words)}"}
