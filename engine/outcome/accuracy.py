"""A prediction and the timeline of its run -> predicted against measured, by kind of op and for the step; and why.

A step of a rank is its compute, the communication that no compute hides, and time in which it does neither. So the
difference between a measured step and the predicted one is the sum of three differences, and two of them are divided by
what else was seen: the time that ranks waited for a core, and how unevenly they computed. Where it is known how fast
the machine was beside when it was calibrated, all that was predicted is first brought to that speed, and what this adds
is a part of its own. The reason given is the largest of these parts on the side of the difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from engine.analysis.shares import Shares, shares
from engine.cost.calibration import MANY
from engine.plan import COLLECTIVES, COMPUTE, KINDS, Mesh
from engine.timeline import Timeline

SMALL = 0.03  # of a step: a difference that needs no reason
SPEED, START_UP, CONTENTION, IMBALANCE, OPS, COPIES, BETWEEN = (
    "speed", "start_up", "contention", "imbalance", "ops", "copies", "between",
)  # fmt: skip
# The reasons in English, where the step took longer than predicted and where it took less.
REASONS = {
    SPEED: (
        "this machine was slower than when it was calibrated, which makes {seconds} of a step",
        "this machine was faster than when it was calibrated, which makes {seconds} of a step",
    ),
    START_UP: ("the steps counted took {seconds} longer than the last of them: there are few, and the first are slow",)
    * 2,
    CONTENTION: (
        "each rank waited {seconds} longer for a core than {ranks} ranks on {cores} cores should: something else ran",
        "each rank waited {seconds} less for a core than predicted for {ranks} ranks on {cores} cores",
    ),
    IMBALANCE: (
        "the busiest rank computed {seconds} longer than the mean one, and its peers waited for it",
        "ranks computed more evenly than predicted, by {seconds}",
    ),
    OPS: ("{kind} took {seconds} longer than predicted", "{kind} took {seconds} less than predicted"),
    COPIES: (
        "{kind} took {seconds} longer than predicted, where no compute hides it",
        "{kind} took {seconds} less than predicted, where no compute hides it",
    ),
    BETWEEN: (
        "{seconds} more went by between ops than predicted, in Python and hooks or waiting for other ranks",
        "{seconds} less went by between ops than predicted, in Python and hooks or waiting for other ranks",
    ),
}


def explain(reason: Mapping[str, Any], show: Callable[[float], str], sentences=REASONS, kind=str) -> str:
    """A reason in words; `show` writes seconds, and `kind` an op's kind."""
    values = dict(reason["values"])
    values |= {"seconds": show(values["seconds"])} | ({"kind": kind(values["kind"])} if "kind" in values else {})
    return sentences[reason["code"]][not values["longer"]].format_map(values)


def shared_with(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """How many of the cores other programs kept busy meanwhile (`other`, `cores`), where those were many."""
    other = found.get("other_cores")  # runs of earlier days hold none
    return {"other": f"{other:.1f}", "cores": found["cores"]} if other and other > MANY * found["cores"] else None


def by_kind(timeline: Timeline) -> dict[str, float]:
    """Seconds of each kind of op of a mean rank in a step; of several steps the median. A receive is its send's."""
    steps, step = np.unique(timeline["step"], return_inverse=True)
    kinds, kind = np.unique(timeline["kind"].astype(str), return_inverse=True)
    total = np.zeros((len(kinds), len(steps)))
    np.add.at(total, (kind, step), timeline["end"] - timeline["start"])
    seconds = np.median(total, axis=1) / timeline.world_size if len(steps) else []
    return {str(k): float(s) for k, s in zip(kinds, seconds, strict=True) if k != "recv"}


def without_waiting(timeline: Timeline, mesh: Mesh) -> Timeline:
    """The same with collectives that begin when their last member does: before that, its peers only wait."""
    rows: dict[tuple, list[int]] = defaultdict(list)
    columns = [timeline[name].tolist() for name in ("step", "rank", "lane", "kind")]
    for i, (step, rank, lane, kind) in enumerate(zip(*columns, strict=True)):
        if kind in COLLECTIVES and mesh.has(lane):
            rows[step, rank, lane].append(i)
    start = timeline["start"].copy()
    done: set[tuple] = set()
    for step, rank, lane in rows:
        group = mesh.group(rank, lane)
        if (step, group, lane) in done:
            continue
        done.add((step, group, lane))
        calls = [rows.get((step, member, lane), []) for member in group]
        for call in zip(*calls, strict=False):
            start[list(call)] = max(timeline["start"][i] for i in call)
    columns = dict(timeline.columns) | {"start": np.minimum(start, timeline["end"])}
    return Timeline(columns, timeline.source, timeline.world_size, timeline.memory)


def accuracy(
    predicted: Timeline,
    measured: Timeline,
    *,
    step_times: Sequence[float],
    predicted_step_time: float,
    waited: float | None = None,
    predicted_waited: float = 0.0,
    ranks: int = 1,
    cores: int = 1,
    slower: float | None = None,
) -> dict[str, Any]:
    """What `result.json` keeps. `measured`: the steps that count, without waiting; `step_times`: what they took, in
    order. `waited`: seconds of a step in which a mean rank had to wait for a core, where that is known, and as the
    simulator says. `slower`: how many times as long the machine took for the same as when it was
    calibrated, where that is known; `at_speed` is the step predicted so much longer, and its error the model's own."""
    took = median(step_times) if step_times else None
    kinds = [by_kind(predicted), by_kind(measured) if len(measured) else {}]
    ops = [_row(kind, *(of.get(kind) for of in kinds)) for kind in KINDS if any(kind in of for of in kinds)]
    at_speed = None if slower is None else _row("step", slower * predicted_step_time, took)
    found = {
        "step": _row("step", predicted_step_time, took),
        "slower": slower,
        "at_speed": at_speed,
        "ops": ops,
        "reason": None,
        "parts": {},
    }
    if took is None or not len(measured) or not len(predicted):
        return found
    speed = 1.0 if slower is None else slower
    parts = _parts(predicted, measured, took, predicted_step_time, speed)
    if slower is not None:
        parts[SPEED] = (slower - 1.0) * predicted_step_time
    if len(step_times) > 1:
        parts[START_UP] = max(0.0, took - median(step_times[len(step_times) // 2 :]))
    if waited is not None:
        parts[CONTENTION] = _between(waited - speed * predicted_waited, parts[OPS])
        parts[OPS] -= parts[CONTENTION]
    found["parts"] = {name: float(value) for name, value in parts.items()}
    difference = took - predicted_step_time
    if abs(difference) > SMALL * took:
        found["reason"] = _reason(parts, difference, ops, ranks, cores)
    return found


def _row(kind: str, predicted: float | None, measured: float | None) -> dict[str, Any]:
    error = predicted / measured - 1 if measured and predicted is not None else None
    return {"kind": kind, "predicted": predicted, "measured": measured, "error": error}


def _parts(predicted: Timeline, measured: Timeline, took: float, planned: float, slower: float) -> dict[str, float]:
    """Measured less `slower` times predicted seconds of a mean rank in the middle step: of compute, of communication
    that nothing hides, and of the rest, without what uneven ranks add to it. They add up to that of the step."""
    steps = sorted(shares(measured), key=lambda s: s.makespan)
    one, other = steps[len(steps) // 2], shares(predicted)[0]
    compute, exposed = (
        float(a.mean() - slower * b.mean()) for a, b in ((one.computing, other.computing), (one.exposed, other.exposed))
    )
    uneven = _unevenness(one) - slower * _unevenness(other)
    rest = took - slower * planned - compute - exposed - uneven
    return {OPS: compute, COPIES: exposed, IMBALANCE: uneven, BETWEEN: rest}


def _unevenness(step: Shares) -> float:
    return float(step.computing.max() - step.computing.mean())


def _between(value: float, limit: float) -> float:
    """`value`, as far as it lies between 0 and `limit`."""
    return min(max(value, min(limit, 0.0)), max(limit, 0.0))


def _reason(parts: Mapping[str, float], difference: float, ops: Sequence[Mapping], ranks: int, cores: int) -> dict:
    side = 1.0 if difference > 0 else -1.0
    code = max(parts, key=lambda name: side * parts[name])
    values: dict[str, Any] = {"seconds": abs(parts[code]), "longer": parts[code] > 0}
    if code == CONTENTION:
        values |= {"ranks": ranks, "cores": cores}
    if code in (OPS, COPIES):
        mine = [row for row in ops if (row["kind"] in COMPUTE) == (code == OPS)]
        values["kind"] = max(mine, key=lambda row: side * ((row["measured"] or 0.0) - (row["predicted"] or 0.0)))[
            "kind"
        ]
    return {"code": code, "share": parts[code] / difference, "values": values}
