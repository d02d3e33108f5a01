"""Compared rows -> some of them as they were published, to be kept beside their predictions and predicted again.

A report is older than the code when what it says of these is not what they are predicted to take now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine.validate.case import Case, Predicted, case_of
from engine.validate.compared import Compared
from engine.validate.rows import parse
from engine.validate.spec_of import predicted

PER_SET = 2
PUBLISHED = ("id", "group", "source", "model", "parallel", "batch", "hardware", "schedule", "precision", "recompute")


def sample(used: Iterable[Compared]) -> list[dict[str, Any]]:
    """Of each set, with experts and without, the rows that are predicted soonest, each of another kind: what was
    measured is left out."""
    by_set: dict[tuple[str, bool], dict[tuple, Case]] = defaultdict(dict)
    for each in sorted(used, key=lambda each: (_cost(each.case), each.row.id)):
        by_set[each.row.group, each.case.dense].setdefault(_kind(each.case), each.case)
    cases = (case for kinds in by_set.values() for case in list(kinds.values())[:PER_SET])
    return [_entry(case) for case in cases]


def again(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Predicted]]:
    """(id, what it is predicted to take by the code as it is)."""
    published = parse({"entries": [entry | {"metrics": []} for entry in entries]}, "sample")
    for row in published.rows:
        yield row.id, predicted(case_of(row))


def _cost(case: Case) -> int:
    """Passes through layers, which is what a prediction goes with."""
    return case.layers * case.microbatches * case.stages_per_rank


def _kind(case: Case) -> tuple:
    axes = tuple(getattr(case, axis) > 1 for axis in ("tp", "pp", "cp", "ep", "dp"))
    return (*axes, case.schedule, case.recompute, case.precision, case.device, case.zero, case.sequence_parallel)


def _entry(case: Case) -> dict[str, Any]:
    row = case.row
    known = {name: getattr(row, name) for name in (*PUBLISHED, "notes")}
    return {name: value for name, value in known.items() if value not in (None, "", {})}
