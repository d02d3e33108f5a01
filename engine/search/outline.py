"""A pipeline's order, with what its passes take and keep -> when each rank is through, and the most that it keeps.

It is a plan in outline, one entry a pass, where a plan has each layer's ops. A pass begins when its rank is through
with the one before and what it needs from another stage has come. Many layouts share an order, which is sorted once so
that everything comes after what it needs: then a layout costs a fraction of a microsecond a pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine import schedules
from engine.schedules import PASSES
from engine.schedules.messages import groups

NOTHING = -1  # in the place of an entry that is waited for
FORWARD, BACK = range(2)  # ways through the stages
WAY = {"forward": FORWARD, "backward": BACK, "backward_input": BACK}


class Lengths(NamedTuple):
    """Seconds of each pass, and those of them in which it computes; of each stage, when its first pass may begin, and
    how long it is gathered and its gradients are reduced, in the background."""

    seconds: Sequence[float]
    computes: Sequence[float]
    ready: Sequence[float]
    gathers: Sequence[float]
    reduces: Sequence[float]


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """Lists have one entry a pass. A pass is a number, that of its kind in PASSES times all stages, and its stage; the
    number after all of them is nothing, which only waits."""

    ranks: list[int]
    needs: list[int]  # the entry that has to be done before, on whichever rank; or NOTHING
    comes: list[bool]  # from another rank
    passes: list[int]
    rows: list[np.ndarray]  # of each rank its passes, in order
    first: np.ndarray  # of each stage, the entry of its first pass
    last: np.ndarray  # and of its last

    def times(self, lengths: Lengths, hop: float, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds at which each rank is through, and at which each stage is. `hop`: from rank to rank. `share`: of a
        device, what it does not have to compute with while something is in the background, which is there from a
        stage's first pass on, or when that is through, one after the other (`engine.cost.contention`)."""
        free, ended, waiting = [0.0] * len(self.rows), [0.0] * len(self.ranks), [0.0] * len(self.rows)
        begins, given, taken = ([0.0] * len(self.ranks) for _ in range(3))
        for stage, (first, last) in enumerate(zip(self.first.tolist(), self.last.tolist(), strict=True)):
            begins[first], given[first], taken[last] = (column[stage] for column in lengths[2:])
        seconds, computes = ([*column, 0.0] for column in lengths[:2])
        rows = zip(self.ranks, self.needs, self.comes, self.passes, begins, given, taken, strict=True)
        for i, (rank, need, comes, one, begin, before, after) in enumerate(rows):
            if free[rank] > begin:
                begin = free[rank]
            if need >= 0:
                arrival = ended[need] + hop if comes else ended[need]
                if arrival > begin:
                    begin = arrival
            length = seconds[one]
            if background := waiting[rank] + before:
                slower = share * min(background, computes[one] / (1 - share))
                waiting[rank] = max(0.0, background - computes[one] - slower)
                length += slower
            free[rank] = ended[i] = begin + length
            waiting[rank] += after
        return np.array(free), np.array(ended)[self.last]

    def most(self, change: np.ndarray, meanwhile: np.ndarray) -> np.ndarray:
        """Bytes, one a rank. `change`: what each pass leaves behind, or takes away; `meanwhile`: what it has at its
        most beside what is there when it begins."""
        found = []
        for row in self.rows:
            after = change[row].cumsum()
            found.append((after - change[row] + meanwhile[row]).max())
        return np.array(found)


@functools.lru_cache(maxsize=256)
def outline(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> Outline:
    order = schedules.order(schedule, ranks, microbatches, stages_per_rank)
    placement = schedules.placement(schedule, ranks, stages_per_rank)
    rank_of, stages = schedules.ranks_of(placement), ranks * stages_per_rank
    sources = {}  # of a pass: the stage that gives it what it needs, and whether that is on another rank
    for line in schedules.pipelines(schedule, ranks, stages_per_rank):
        for way, through in ((FORWARD, line), (BACK, line[::-1])):
            for before, after in itertools.pairwise(through):
                sources[way, after] = before, rank_of[before] != rank_of[after]
    number = {kind: i * stages for i, kind in enumerate(PASSES)}
    done: dict[tuple[int, int, int], int] = {}  # (way, stage, microbatch) -> its entry
    entries: list[tuple[int, int, bool, int]] = []
    first, last = {}, {}
    rows = [[group for _, group in groups(row)] for row in order]
    at, waiting = [0] * ranks, range(ranks)
    while waiting:
        before, still = len(entries), []
        for rank in waiting:
            for group in itertools.islice(rows[rank], at[rank], None):
                needs = []
                for kind, stage, microbatch, _ in group:
                    way = WAY.get(kind)
                    source, comes = sources.get((way, stage), (None, False))
                    need = NOTHING if source is None else done.get((way, source, microbatch))
                    if need is None:
                        break
                    needs.append((need, comes))
                if len(needs) < len(group):
                    still.append(rank)
                    break
                at[rank] += 1
                # What any of a group needs is there before all of it, and what any makes is there after all.
                entries += [(rank, *need, len(PASSES) * stages) for need in needs[1:]]
                end = len(entries) + len(group) - 1
                for (kind, stage, microbatch, _), need in zip(group, needs, strict=True):
                    done[WAY.get(kind), stage, microbatch] = end
                    first.setdefault(stage, len(entries))
                    last[stage] = len(entries)
                    entries.append((rank, *need, number[kind] + stage))
        if len(entries) == before:
            raise ValueError(f"these ranks wait for each other: {still}")
        waiting = still
    ends = (np.array([of[stage] for stage in range(stages)]) for of in (first, last))
    passes = [np.array([number[kind] + stage for kind, stage, *_ in row]) for row in order]
    return Outline(*map(list, zip(*entries, strict=True)), passes, *ends)
