"""A search, done or stopped -> what it found, as plain values: the fastest layouts, what their steps go to, and why one
takes longer than another.

A step of a mean rank is cut into pieces that add up to it: computing, computing again, communication that nothing hides
by its axis, and idle time, which is the bubble. So the pieces of two layouts differ by as much, together, as their
steps. Both are predictions: layouts that are no further apart than predictions are from measurements, on average over
all published ones (`engine/data/validated.json`), cannot be told apart.
"""

from __future__ import annotations

import functools
import shlex
from typing import Any

import numpy as np

from engine.analysis.shares import added, bubble_fraction, exposed_communication_fraction, shares
from engine.predict import Prediction
from engine.search.explore import Layout, Search
from engine.search.fits import room_of
from engine.search.space import AXES
from engine.validate import kept

ON_AXES = ("tp", "cp", "ep", "fsdp", "dp", "pp")  # of two that nothing hides at the same time, the first counts
PARTS = ("compute", "recompute", *ON_AXES, "bubble")


def report(search: Search) -> dict[str, Any]:
    """Seconds and bytes. `settings` are those that were searched; `command` predicts a layout, or runs it."""
    rows = [_row(search, one) for one in search.best]
    error = published_error(search)
    fastest = rows[0] if rows else None
    for row in rows:
        _set_beside(row, fastest, error)
    return {
        "spec": search.given.to_dict(),
        "held": sorted(search.held),
        "layouts": {
            "total": search.total,
            "refused": search.refused.total(),
            "too_large": search.too_large.total(),
            "cut": search.cut,
            "simulated": search.simulated,
            "left": search.total - search.decided,
        },
        "finished": search.done,
        "refused": {rule: {"layouts": n, "first": str(search.refusals[rule])} for rule, n in search.refused.items()},
        "too_large": dict(search.too_large),
        "smallest": search.smallest,
        "capacity": search.machine.memory_size,
        "error": error,
        "best": rows,
        "points": [
            {"settings": one.settings, "step_time": one.step_time, "peak_memory": one.peak_memory}
            for one in sorted(search.fastest.values(), key=lambda one: one.step_time)
        ],
    }


def row_of(search: Search, layout: Layout, found: dict[str, Any]) -> dict[str, Any]:
    """That of any layout of a search, as those in `found`, its report, are."""
    row = _row(search, layout)
    _set_beside(row, found["best"][0], found["error"])
    return row


def _set_beside(row: dict[str, Any], fastest: dict[str, Any], error: float | None) -> None:
    parts = {name: row["parts"][name] - fastest["parts"][name] for name in PARTS}
    row["slower_by"] = {"seconds": row["step_time"] - fastest["step_time"], "parts": parts}
    row["slower_by"]["most"] = max(parts, key=parts.__getitem__) if row is not fastest else None
    row["tied"] = error is not None and row["step_time"] <= fastest["step_time"] * (1 + error)


def published_error(search: Search) -> float | None:
    """Mean error of predictions for machines as published results are of; None where it is one of no such kind."""
    return _mean_error() if search.machine.sms else None


@functools.cache
def _mean_error() -> float:
    return kept.read().report["overall"]["mape"]


def _row(search: Search, layout: Layout) -> dict[str, Any]:
    prediction = search.prediction(layout)
    job, spent = prediction.job, shares(prediction.simulation.by_role)
    context = job.spec.context
    return {
        "settings": layout.settings,
        "mode": job.spec.mode,
        "mesh": {axis: job.degree(axis) for axis in AXES if job.degree(axis) > 1},
        "microbatches": job.spec.microbatches,
        "accumulate": job.microsteps,
        "schedule": job.spec.schedule,
        "stages_per_rank": job.spec.stages_per_rank,
        "recompute": job.spec.recompute,
        "step_time": prediction.step_time,
        "samples_per_second": job.spec.global_batch / prediction.step_time,
        "tokens_per_second": context and job.spec.global_batch * context / prediction.step_time,
        "mfu": prediction.utilisation(prediction.step_time, search.machine.at(job.spec.precision))["full"],
        "peak_memory": max(prediction.simulation.peak_memory),
        "capacity": room_of(job, search.machine),
        "bubble_fraction": bubble_fraction(spent),
        "exposed_communication_fraction": exposed_communication_fraction(spent),
        "parts": parts_of(prediction),
        "params": layout.spec.to_params(),
        "command": command(layout, "run" if search.machine.cores else "simulate"),
    }


def parts_of(prediction: Prediction) -> dict[str, float]:
    """Seconds of a mean rank's step, by what they go to; they add up to the step."""
    timeline = prediction.simulation.by_role
    kinds, axes = timeline["kind"], timeline["group"]
    computes = axes == ""
    known = np.unique(axes)  # a span on several axes counts for the first of them
    first, of_span = np.array([axis.partition("_")[0] for axis in known]), np.searchsorted(known, axes)
    picks = [computes & (kinds != "recompute"), computes, *((first == axis)[of_span] for axis in ON_AXES)]
    weights = timeline.weights
    seconds = added(timeline, picks) @ weights / weights.sum()
    found = dict(zip(PARTS, seconds.tolist(), strict=False))
    return found | {"bubble": prediction.step_time - float(seconds.sum())}


def command(layout: Layout, verb: str) -> str:
    """Words that give a layout, all that differs from a default."""
    given = {"mode": layout.spec.mode} | layout.spec.to_params()
    return f"python -m engine {verb} " + " ".join(f"--{name} {shlex.quote(value)}" for name, value in given.items())
