"""The lines that ranks wrote, one a step -> what a run says of its own health: losses apart, memory, samples' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST_STEPS = 20  # for a slope; before that memory grows since things are made for the first time
# And so long it does too: the recorder writes down what it has seen once a second.
SETTLED = 1.5  # seconds
Rows = Sequence[dict[str, Any]]  # of one rank, a dictionary a finished step


def local_losses(steps: Sequence[Rows], done: int) -> list[list[float | None]]:
    """For each rank, the mean loss of its own samples in each step; None where it computes none."""
    return [[row["loss"] for row in rows[:done]] for rows in steps]


def memory_growth(rows: Rows) -> float | None:
    """Bytes that a rank's resident memory grows by in 100 steps: the slope over the second half of its steps, without
    those of the first moments. None where too few are left."""
    rows = [row for row in rows if "resident" in row]
    settled = [row for row in rows[len(rows) // 2 :] if row["start"] >= rows[0]["start"] + SETTLED]
    if len(rows) < LEAST_STEPS or len(settled) < LEAST_STEPS // 2:
        return None
    resident = np.array([row["resident"] for row in settled], dtype=float)
    return 100 * float(np.polyfit(np.arange(len(resident)), resident, 1)[0])


def repeated_orders(steps: Sequence[Rows]) -> list[dict[str, int]]:
    """Epochs in which a rank saw its samples in the order of an earlier epoch: DistributedSampler shuffles by epoch
    and seed, and gives the same order again where nobody calls set_epoch."""
    repeated = []
    for rank, rows in enumerate(steps):
        seen: dict[str, int] = {}
        for row in rows:
            epoch, order = row.get("epoch"), row.get("order")
            if order is not None and seen.setdefault(order, epoch) != epoch:
                if not any((one["rank"], one["epoch"]) == (rank, epoch) for one in repeated):
                    repeated.append({"rank": rank, "epoch": epoch, "like": seen[order]})
    return repeated
