"""A piece of an idle gap -> a code and values, and the English sentence that is made of them.

`rank 2 waits 3.1 ms for the activation of microbatch 4 from rank 1: pipeline fill`. Other languages have the same codes
with sentences of their own (`viz.locales.engine`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.analysis.idle import CAUSES, Idle
from engine.analysis.ran import Ran
from engine.graph.matching import NO_NODE
from engine.plan import COLLECTIVES, MESSAGES

# {time} is the wait, {what} of OBJECTS, {cause} of NAMES; rank and other are ranks.
SENTENCES = {
    "message": "rank {rank} waits {time} for the {what} from rank {other}: {cause}",
    "collective": "rank {rank} waits {time} in the {what} for rank {other}, which comes last: {cause}",
    "load": "rank {rank} waits {time} for rank {other}, which loads its batch: {cause}",
    "transfer": "rank {rank} waits {time} while the {what} is on its way: {cause}",
    "start": "rank {rank} begins {time} after its step did: {cause}",
    "end": "rank {rank} is done {time} before the last: {cause}",
    "nothing": "rank {rank} has all that it needs and computes nothing for {time} before the {what}: {cause}",
}
OBJECTS = {
    "plain": "{name}",
    "microbatch": "{name} of microbatch {microbatch}",
    "part": "{name} of {part}",
    "call": "{kind} ({name})",
    "call_part": "{kind} ({name}, {part})",
    "end": "end of its step",
}
NAMES = {
    "fill": "pipeline fill",
    "imbalance": "steady-state imbalance",
    "drain": "pipeline drain",
    "straggler": "waiting for a straggler",
    "communication": "exposed communication",
    "loading": "waiting for data",
    "contention": "contention, more ranks than cores",
    "overhead": "overhead between ops",
    "start": "start-up",
    "end": "end of the step",
}
SHOWN = 8  # of the largest


def largest(ran: Ran, found: Idle, most: int = SHOWN) -> list[dict[str, Any]]:
    """The largest pieces, longest first, of one rank and cause the largest alone; with the values of a sentence."""
    order = found.seconds.argsort(kind="stable")[::-1]
    out, seen = [], set()
    for i in order.tolist():
        key = (int(found.role[i]), int(found.cause[i]))
        if key in seen:
            continue
        seen.add(key)
        out.append(told(ran, found, i))
        if len(out) == most:
            break
    return out


def told(ran: Ran, found: Idle, i: int) -> dict[str, Any]:
    """Plain values; `code` is one of SENTENCES, `cause` one of CAUSES. `ranks`: as many are in the same place. `start`:
    seconds since the step began."""
    cause = CAUSES[int(found.cause[i])]
    role, about, other, until = (int(column[i]) for column in (found.role, found.about, found.other, found.until))
    node = about if about != NO_NODE else until
    op = None if node == NO_NODE else ran.op(node)
    if cause == "loading":
        code = "load"
    elif about == NO_NODE:
        code = "start" if cause == "start" else "end" if until == NO_NODE and cause in ("end", "drain") else "nothing"
    elif other == NO_NODE:
        code = "transfer"
    else:
        code = "collective" if op.kind in COLLECTIVES else "message"
    return {
        "code": code,
        "cause": cause,
        "rank": ran.graph.representative[role],
        "ranks": int(ran.ranks[role]),
        "start": float(found.start[i]),
        "seconds": float(found.seconds[i]),
        "other": None if other == NO_NODE else _waited_for(ran, role, about, other),
        "kind": None if op is None else op.kind,
        "payload": op.payload if op is not None else "",
        "microbatch": None if op is None else op.microbatch,
        "part": op.part if op is not None else "",
    }


def _waited_for(ran: Ran, role: int, about: int, other: int) -> int:
    """The rank that has the node `other` and meets the lowest one of the role: round a ring, the one before it."""
    send, plan, rank = ran.op(about), ran.graph.plan, ran.graph.representative[role]
    return plan.peer_rank(rank, replace(send, peer=-send.peer)) if send.ring else ran.rank(other)


def object_of(gap: Mapping[str, Any]) -> str:
    """Which of OBJECTS says what was waited for, or what came next."""
    if gap["kind"] is None:
        return "end"
    if gap["kind"] in COLLECTIVES:
        return "call_part" if gap["part"] not in ("", f"{gap['payload']}s") else "call"  # gradients once
    return "part" if gap["part"] else "plain" if gap["microbatch"] is None else "microbatch"


def name_of(gap: Mapping[str, Any]) -> str:
    """Of that object: what moves, or the kind of op."""
    return (gap["payload"] if gap["kind"] in COLLECTIVES or gap["kind"] in MESSAGES else gap["kind"]) or ""


def sentence(gap: Mapping[str, Any], time: str) -> str:
    """`time`: its seconds, written out."""
    name, kind = (word.replace("_", "-") for word in (name_of(gap), gap["kind"] or ""))
    what = OBJECTS[object_of(gap)].format(name=name, kind=kind, microbatch=gap["microbatch"], part=gap["part"])
    cause = NAMES[gap["cause"]]
    return SENTENCES[gap["code"]].format(rank=gap["rank"], other=gap["other"], time=time, what=what, cause=cause)
