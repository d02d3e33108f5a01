"""Two trainings that go on at once, one stopped while the other runs -> the ratio of their step times, and its spread.

How fast a machine is changes from minute to minute, and by more than what is measured here; so the two take turns of
less than a second, in which a signal stops the other one's processes, and both are measured in all that it does. A
step lasts from the end of the one before it to its own end, on the last rank: what is done between two steps counts. So
a step during which its process was stopped is in no turn.
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
from statistics import mean, median
from typing import NamedTuple

from engine.archive import read_status, read_steps
from engine.launch import Launcher, start
from engine.spec import Spec

TURN = 0.5  # seconds
WARMUP = 4  # steps at the start of a run that are not counted
RESAMPLED = 1000  # times, for the interval
STARTING = 30.0  # seconds at most until a launcher has forked its workers

Steps = list[list[dict]]  # of each rank: start, end (unix seconds) and loss of each step


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


class Turn(NamedTuple):
    one: list[float]  # seconds of each step
    other: list[float]


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


def alternate(one: Callable[[], Ranks], other: Callable[[], Ranks]) -> tuple[list[Turn], tuple[Steps, Steps]]:
    """Start both and let them take turns until one is done, which they are to be at about the same time."""
    ranks: list[Ranks] = []
    turns: list[list[tuple[float, float]]] = [[], []]
    try:
        for begin in (one, other):
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
    return [Turn(a, b) for a, b in zip(*seconds, strict=True) if a and b], steps


def _within(turn: tuple[float, float], ranks: Steps) -> list[float]:
    ends = [max(row["end"] for row in step) for step in zip(*ranks, strict=True)][WARMUP - 1 :]
    ends = [end for end in ends if turn[0] < end < turn[1]]
    return [b - a for a, b in itertools.pairwise(ends)]


def compared(rounds: list[list[Turn]]) -> dict:
    """`ratio`: of the medians of all steps, with the interval in which 95 % of such ratios are of as many pairs of
    turns, drawn again from these. `ratio_of_sums`: of the mean seconds a step, where seldom and long ones count too."""
    turns, drawn = [turn for each in rounds for turn in each], random.Random(0)
    again = sorted(_ratio(drawn.choices(turns, k=len(turns))) for _ in range(RESAMPLED))
    one, other = _pooled(turns)
    return {
        "ratio": _short(_ratio(turns)),
        "interval_of_95_percent": [_short(again[int(RESAMPLED * share)]) for share in (0.025, 0.975)],
        "ratio_of_each_round": [_short(_ratio(each)) for each in rounds if each],
        "ratio_of_sums": _short(mean(one) / mean(other)),
        "step_times": [_short(median(one)), _short(median(other))],
        "pairs_of_turns": len(turns),
        "steps": [len(one), len(other)],
    }


def _pooled(turns: list[Turn]) -> tuple[list[float], ...]:
    return tuple([seconds for turn in turns for seconds in turn[way]] for way in (0, 1))


def _ratio(turns: list[Turn]) -> float:
    one, other = _pooled(turns)
    return median(one) / median(other)


def _short(value: float) -> float:
    return round(value, 4)
