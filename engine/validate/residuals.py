"""Compared rows of a set -> the property of them that their errors go with, in numbers; a cause to look for.

For each property the signed errors are grouped by its value. The share of their variance that lies between the groups
(eta squared) is corrected for the number of groups, which alone would explain something (omega squared).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.validate.case import Case
from engine.validate.compared import Compared

PROPERTIES: dict[str, Callable[[Case], object]] = {
    "tp": lambda case: case.tp,
    "pp": lambda case: case.pp,
    "cp": lambda case: case.cp,
    "devices": lambda case: case.devices,
    "micro-batch": lambda case: case.micro_batch,
    "micro-batches": lambda case: case.microbatches,
    "sequence": lambda case: case.context,
    "hidden size": lambda case: case.hidden,
    "head size": lambda case: case.hidden // case.heads,
    "recomputation": lambda case: case.recompute,
    "precision": lambda case: case.precision,
    "device": lambda case: case.row.hardware.get("gpu"),
    "schedule": lambda case: case.schedule or "none",
    "ZeRO": lambda case: case.zero,
}
ENOUGH = 6  # rows


def explain(rows: Sequence[Compared]) -> dict[str, Any] | None:
    """The property with the largest share, that share, and the mean error at each of its values; None where the set is
    too small or nothing stands out."""
    if len(rows) < ENOUGH:
        return None
    errors = np.array([each.error for each in rows])
    total = float(((errors - errors.mean()) ** 2).sum())
    best: tuple[float, str, dict] | None = None
    for name, of in PROPERTIES.items():
        groups = defaultdict(list)
        for each, error in zip(rows, errors, strict=True):
            groups[str(of(each.case))].append(float(error))
        if not 1 < len(groups) < len(rows) - 1:
            continue
        within = sum(float(((np.array(g) - np.mean(g)) ** 2).sum()) for g in groups.values())
        noise = within / (len(rows) - len(groups))
        share = (total - within - (len(groups) - 1) * noise) / (total + noise) if total else 0.0
        if best is None or share > best[0]:
            best = share, name, {value: float(np.mean(g)) for value, g in groups.items()}
    if best is None or best[0] <= 0:
        return None
    return {"property": best[1], "share_of_variance": best[0], "mean_error": best[2]}
