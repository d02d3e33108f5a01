"""Trainings that go on at once, all but one stopped at any time -> the ratio of their step times, and its spread.

How fast a machine is changes from minute to minute, and by more than what is measured here; so they take turns of less
than a second, in which a signal stops the others' processes, and are measured in all that they do. A step lasts from
the end of the one before it to its own end, on the last rank: what is done between two steps counts. So a step during
which its process was stopped is in no turn.

Two processes that run the same program differ too, by some percent for as long as they live (by where their memory
lies, for one). So there are many rounds of short trainings, each with new processes; the interval is of rounds drawn
again, and of turns within them; and the same program against itself shows what such a number is worth.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from engine.archive import read_status, read_steps
from engine.launch import Launcher, start
from engine.spec import Spec

TURN = 0.75  # seconds
WARMUP = 4  # steps at the start of a run that are not counted
RESAMPLED = 1000  # times, for the interval
FEWEST = 5  # rounds: drawn from fewer, an interval would be narrower than what chance does
STARTING = 30.0  # seconds at most until a launcher has forked its workers
AT_ONCE = "LOCKSTEP_BENCH_AT_ONCE"  # read by bench/stopped.py: how many trainings take turns

Steps = list[list[dict]]  # of each rank: start, end (unix seconds), loss and CPU seconds (of the process) of each step


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one training; `ended` never waits, `result` does, and raises where it did not end well."""

    pids: list[int]
    ended: Callable[[], bool]
    result: Callable[[], Steps]

    def signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it is done
                os.kill(pid, number)


class Round(NamedTuple):
    """Of each training, in order of their beginning."""

    turns: list[tuple[list[float], ...]]  # seconds of the steps in a turn of each
    cpu: tuple[float, ...]  # CPU seconds of a step, all ranks together
    steps: tuple[Steps, ...]


def launcher(at_once: int) -> Launcher:
    """For runs of which so many take turns."""
    os.environ[AT_ONCE] = str(at_once)
    return Launcher(("--worker", "bench.stopped:work"))


def recorded(spec: Spec, launcher: Launcher, runs_dir: str | Path) -> Ranks:
    """A run of Lockstep."""
    handle = start(spec, runs_dir=runs_dir, launcher=launcher)
    deadline = time.monotonic() + STARTING
    while not (pids := read_status(handle.run_dir)["worker_pids"]):
        if handle.done or time.monotonic() > deadline:
            raise RuntimeError(f"{handle.run_id} has no workers: {read_status(handle.run_dir)['error']}")
        time.sleep(0.01)

    def result() -> Steps:
        found = handle.result(timeout=600)
        if found["status"] != "finished" or (spec.record and not found["conformance"]["ok"]):
            raise RuntimeError(found["error"] or found["conformance"])
        return [read_steps(handle.run_dir, rank) for rank in range(len(pids))]

    # Its workers are done when the launcher says that it finishes, or has finished.
    return Ranks(pids, lambda: read_status(handle.run_dir)["state"] not in ("starting", "running"), result)


def alternate(*begins: Callable[[], Ranks]) -> Round:
    """Start all and let them take turns until one is done, which they are to be at about the same time."""
    ranks: list[Ranks] = []
    turns: list[list[tuple[float, float]]] = [[] for _ in begins]
    try:
        for begin in begins:
            ranks.append(begin())
            ranks[-1].signal(signal.SIGSTOP)
        while not any(each.ended() for each in ranks):
            for each, its in zip(ranks, turns, strict=True):
                each.signal(signal.SIGCONT)
                began = time.time()
                time.sleep(TURN)
                each.signal(signal.SIGSTOP)
                its.append((began, time.time()))
        for each in ranks:
            each.signal(signal.SIGCONT)
        steps = tuple(each.result() for each in ranks)
    except BaseException:
        for each in ranks:
            each.signal(signal.SIGKILL)
        raise
    seconds = [[_within(turn, each) for turn in its] for its, each in zip(turns, steps, strict=True)]
    return Round([turn for turn in zip(*seconds, strict=True) if all(turn)], tuple(map(_cpu, steps)), steps)


def _within(turn: tuple[float, float], ranks: Steps) -> list[float]:
    ends = [max(row["end"] for row in step) for step in zip(*ranks, strict=True)][WARMUP - 1 :]
    ends = [end for end in ends if turn[0] < end < turn[1]]
    return [b - a for a, b in itertools.pairwise(ends)]


def _cpu(ranks: Steps) -> float:
    counted = [[row["cpu"] for row in rank][WARMUP - 1 :] for rank in ranks]
    return sum((rank[-1] - rank[0]) / (len(rank) - 1) for rank in counted)


def compared(rounds: list[Round], one: int = 0, other: int = 1) -> dict:
    """Of the training that began as number `one`, relative to number `other`, each with the interval in which 95 % of
    such numbers are when rounds, and turns within them, are drawn again from these; null where rounds are few.

    `ratio`: of the median steps of two turns, one after the other; of all such pairs the median. `ratio_of_sums`: of
    the mean seconds of a step, where seldom and long ones count too. `ratio_of_cpu`: of the CPU seconds of a step, all
    ranks together, which others on the machine change less.
    """
    rounds = [each for each in rounds if each.turns]
    if not rounds:
        raise ValueError(
            f"in no round had each training a turn of {TURN} s with two whole steps: make runs of more steps"
        )
    drawn = random.Random(0)

    def again() -> list[Round]:
        picked = drawn.choices(rounds, k=len(rounds))
        return [each._replace(turns=drawn.choices(each.turns, k=len(each.turns))) for each in picked]

    resampled = [again() for _ in range(RESAMPLED)]
    found: dict[str, Any] = {}
    for name, ratio in {"ratio": _of_pairs, "ratio_of_sums": _of_sums, "ratio_of_cpu": _of_cpu}.items():
        found[name], found[f"{name}_95_percent"] = _short(ratio(rounds, one, other)), None
        if len(rounds) >= FEWEST:
            spread = sorted(ratio(each, one, other) for each in resampled)
            found[f"{name}_95_percent"] = [_short(spread[int(RESAMPLED * share)]) for share in (0.025, 0.975)]
    steps = [[seconds for each in rounds for turn in each.turns for seconds in turn[way]] for way in (one, other)]
    return {
        **found,
        "step_times": [_short(median(each)) for each in steps],
        "steps": [*map(len, steps)],
        "pairs_of_turns": sum(len(each.turns) for each in rounds),
        "rounds": len(rounds),
    }


def _of_pairs(rounds: list[Round], one: int, other: int) -> float:
    return median(median(turn[one]) / median(turn[other]) for each in rounds for turn in each.turns)


def _of_sums(rounds: list[Round], one: int, other: int) -> float:
    return _mean(rounds, one) / _mean(rounds, other)


def _mean(rounds: list[Round], way: int) -> float:
    return fmean(seconds for each in rounds for turn in each.turns for seconds in turn[way])


def _of_cpu(rounds: list[Round], one: int, other: int) -> float:
    return sum(each.cpu[one] for each in rounds) / sum(each.cpu[other] for each in rounds)


def _short(value: float) -> float:
    return round(value, 4)
