"""Rows and a predictor -> each row beside its prediction, or why not.

What the cost model's constants were fitted on is declared here, by set; such rows are shown, and counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.validate.case import Case, Predicted, case_of
from engine.validate.collectives import Call, call_of, is_collective
from engine.validate.metrics import Measured, peak_memory, ran_out_of_memory, step_seconds
from engine.validate.rows import VERIFIED, Row, Unusable

# (set, what its rows recompute; None: all of them)
FITTED = (("megatron_sc21_table1", None), ("korthikanti_t5", "full"))


Predict = Callable[[Case], Predicted]  # raises Unusable where Lockstep cannot predict it


@dataclass(frozen=True, slots=True)
class Compared:
    case: Case
    predicted: Predicted
    time: Measured | None
    memory: Measured | None
    out_of_memory: bool
    why_no_time: Unusable | None

    @property
    def row(self) -> Row:
        return self.case.row

    @property
    def held(self) -> float:
        """Bytes, predicted as they were measured."""
        return self.predicted.held(self.memory.kind if self.memory else None)

    @property
    def part(self) -> tuple[str, str]:
        """What the one-constant model has a constant of its own for, within a set."""
        experts = "" if self.case.dense else ", with experts"
        return str(self.row.hardware.get("gpu") or ""), f"{self.row.precision or ''}{experts}"

    @property
    def fitted(self) -> bool:
        return is_fitted(self.case)

    @property
    def weak(self) -> bool:
        """Not read in the source itself."""
        return self.row.confidence != VERIFIED

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.time.value - 1

    @property
    def inferred(self) -> tuple[str, ...]:
        of_metrics = [text for measured in (self.time, self.memory) if measured for text in measured.inferred]
        return (*self.case.inferred, *of_metrics, *self.predicted.inferred)


def is_fitted(case: Case) -> bool:
    return any(case.row.group == group and part in (None, case.recompute) for group, part in FITTED)


class Everything(NamedTuple):
    """A file's rows: trainings and collectives beside their predictions, and what neither could be made of."""

    used: list[Compared]
    calls: list[Call]
    refused: list[tuple[Row, Unusable]]


def compare(rows: Iterable[Row], predict: Predict, tell: Callable[[int], None] = lambda done: None) -> Everything:
    """`tell` is given how many rows are done, before each."""
    found = Everything([], [], [])
    for done, row in enumerate(rows):
        tell(done)
        try:
            if is_collective(row):
                found.calls.append(call_of(row))
            else:
                found.used.append(_compare(row, predict))
        except Unusable as why:
            found.refused.append((row, why))
    return found


def _compare(row: Row, predict: Predict) -> Compared:
    case = case_of(row)
    memory, out = peak_memory(row), ran_out_of_memory(row)
    time, no_time = None, None
    try:
        time = step_seconds(case)
    except Unusable as why:
        if memory is None and not out:
            raise
        no_time = why
    return Compared(case, predict(case), time, memory, out, no_time)
