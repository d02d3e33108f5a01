"""Steps that ran -> what a result says of them: critical path, idle time by cause and rank, stragglers; plain values.

Of several steps the seconds of idle time are means, which add up; the critical path, the largest gaps and their
sentences are those of the step whose duration is the median; a straggler is one in most of the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.analysis import stragglers
from engine.analysis.critical_path import Piece, critical_path, seconds_by_kind, seconds_by_rank
from engine.analysis.idle import CAUSES, idle, seconds_by_cause
from engine.analysis.ran import NotJoined, Ran, measured
from engine.analysis.words import largest
from engine.graph.matching import NO_NODE
from engine.plan import Plan
from engine.timeline import Timeline

MAX_STEPS = 8  # of a run that are looked at
LONGEST = 8  # pieces of a critical path that are listed
MAX_ROWS = 64  # ranks, or roles, that are listed one by one


def summary(steps: Sequence[Ran], *, crowded: bool = False) -> dict[str, Any]:
    """ValueError where there are no steps."""
    middle = sorted(steps, key=lambda ran: ran.makespan)[(len(steps) - 1) // 2]
    found = [idle(ran, crowded=crowded) for ran in steps]
    per_role = np.mean([seconds_by_cause(ran, each) for ran, each in zip(steps, found, strict=True)], axis=0)
    path, ranks = critical_path(middle), middle.ranks
    present = np.flatnonzero(per_role.any(axis=0)).tolist()
    rows = [
        {
            "rank": middle.graph.representative[role],
            "ranks": int(ranks[role]),
            "seconds": {CAUSES[i]: float(per_role[role, i]) for i in present},
        }
        for role in range(min(len(per_role), MAX_ROWS))
    ]
    by_rank = seconds_by_rank(middle, path)
    return {
        "analysed_steps": len(steps),
        "critical_path": {
            "seconds": middle.makespan,
            "pieces": len(path),
            "by_kind": seconds_by_kind(path),
            "by_rank": [{"rank": rank, "seconds": by_rank[rank]} for rank in list(by_rank)[:MAX_ROWS]],
            "longest": [_piece(middle, piece) for piece in sorted(path, key=lambda p: -p.duration)[:LONGEST]],
        },
        "idle_causes": {
            "seconds": {CAUSES[i]: float(per_role[:, i] @ ranks) for i in present},  # summed over ranks
            "ranks": rows,
            "largest": largest(middle, found[next(i for i, ran in enumerate(steps) if ran is middle)]),
        },
        "stragglers": named(steps),
    }


def _piece(ran: Ran, piece: Piece) -> dict[str, Any]:
    """Of the path: the op, and the one that it had waited for, on whatever rank; null: the beginning of the step."""
    before = None if piece.waited_for == NO_NODE else _op(ran, piece.waited_for)
    times = {"start": piece.start, "seconds": piece.duration, "waited_for": before}
    return _op(ran, piece.node) | {"kind": piece.kind} | times


def _op(ran: Ran, node: int) -> dict[str, Any]:
    op = ran.op(node)
    return {"rank": ran.rank(node), "kind": op.kind, "stage": op.stage, "microbatch": op.microbatch, "part": op.part}


def named(steps: Sequence[Ran]) -> list[dict[str, Any]]:
    """Ranks for which others waited, more than for all other ranks together, in more than half of the steps."""
    times: dict[int, list[stragglers.Straggler]] = defaultdict(list)
    for ran in steps:
        for one in stragglers.named(stragglers.stragglers(stragglers.calls_of(ran)), ran.makespan):
            times[one.rank].append(one)
    return [
        {
            "rank": rank,
            "steps": len(each),
            "last": sum(one.last for one in each),
            "calls": sum(one.calls for one in each),
            "seconds": float(np.median([one.seconds for one in each])),
        }
        for rank, each in sorted(times.items())
        if 2 * len(each) > len(steps)
    ]


def of_run(timeline: Timeline, plan_of: Callable[[int], Plan], steps: Sequence[int], *, crowded: bool) -> dict:
    """The summary of some of these steps of a run, with `reason` where there is none: then its values are None.

    `steps` ran to their end on every rank; `plan_of` gives a step's plan."""
    picked = [steps[i * len(steps) // MAX_STEPS] for i in range(MAX_STEPS)] if len(steps) > MAX_STEPS else steps
    ran = []
    for step in picked:
        part = timeline.step(step)
        if not len(part):
            return nothing("no step was recorded on every rank")
        try:
            ran.append(measured(part, plan_of(step)))
        except NotJoined as error:
            return nothing(str(error))
    return summary(ran, crowded=crowded) | {"analysis_reason": None} if ran else nothing("no step was recorded")


def nothing(reason: str) -> dict[str, Any]:
    keys = ("critical_path", "idle_causes", "stragglers")
    return {"analysed_steps": 0, **dict.fromkeys(keys), "analysis_reason": reason}
