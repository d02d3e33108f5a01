"""A role's program -> what it holds: at its peak by category, and over a simulated step as steps of bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.cost.memory import KEPT, by_category
from engine.graph.columns import Ops
from engine.plan import KINDS, Program
from engine.schedules.gathers import LAST

# Categories over time: those of a peak, of which gathered layers, logits and what an op needs while it lasts are apart.
OVER_TIME = ("parameters", "optimizer", "gradients", "gathered", "buffers", "activations", "logits", "at_work")


NUMBER = {kind: i for i, kind in enumerate(KINDS)}


class Held(NamedTuple):
    """Bytes that each op of a program adds when it starts (below 0: that go when it ends), of activations and of whole
    gradients; those that it needs only while it lasts, and those of the batch, which goes when the next one comes."""

    change: np.ndarray
    gradients: np.ndarray
    scratch: np.ndarray
    loaded: int
    in_flight: int  # most passes at once


class OverTime(NamedTuple):
    """`bytes[i]` are held from `seconds[i]` to `seconds[i + 1]`, by category; the last row's end is the step's."""

    seconds: np.ndarray
    bytes: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        return np.sum(list(self.bytes.values()), axis=0)


def memory_of(program: Program) -> tuple[dict[str, int], int]:
    """Bytes by category when a rank of a role holds most, and the most passes in flight."""
    held = held_by(Ops.of(program.ops))
    # What an op frees is there until it ends, beside what it needs while it lasts, and the gradients that it adds to.
    kept, gradients = (np.concatenate([[0], change.cumsum()]) for change in (held.change, held.gradients))
    gradients[:-1] += np.maximum(held.gradients, 0)
    scratch = np.concatenate([held.scratch, [0]])
    at = int((kept + gradients + scratch).argmax())
    there = {"gradients": program.memory.get("gradients", 0) + int(gradients[at]), "at work": int(scratch[at])}
    return by_category(program.memory | there, held.loaded + int(kept[at])), held.in_flight


def over_time(program: Program, start: np.ndarray, end: np.ndarray) -> OverTime:
    """`start`, `end`: seconds of each op of the program, in a step. What is kept appears when the op that makes it
    starts, and goes when the op that uses it up ends."""
    ops = Ops.of(program.ops)
    held = held_by(ops)
    stays = dict.fromkeys(OVER_TIME, 0)
    for name, size in program.memory.items():
        stays["activations" if name in KEPT else name if name in stays else "buffers"] += size
    stays["activations"] += held.loaded
    is_head = np.array([op.part.split(".")[0] == "head" for op in ops.templates], dtype=bool)[ops.which]
    moment = np.where(held.change < 0, end, start)
    known = {
        "gradients": (np.where(held.gradients < 0, end, start), held.gradients),
        "activations": (moment, np.where(is_head, 0, held.change)),
        "logits": (moment, np.where(is_head, held.change, 0)),
        "at_work": (np.concatenate([start, end]), np.concatenate([held.scratch, -held.scratch])),
    }
    seconds = np.unique(np.concatenate([[0.0], start, end]))
    found = {}
    for name, size in stays.items():
        found[name] = np.full(len(seconds), size, dtype=np.int64)
        if name in known:
            at, change = known[name]
            added = np.zeros(len(seconds), dtype=np.int64)
            np.add.at(added, np.searchsorted(seconds, at), change)
            found[name] += added.cumsum()
    return OverTime(seconds, found)


def held_by(ops: Ops) -> Held:
    """What the ops of one program keep. A microbatch is in flight in a stage from its
    first forward op there to its last backward op there; in two stages of one rank it is so twice."""
    microbatch = ops.microbatch + 1
    if microbatch.max(initial=0) > len(ops):  # keys below must be small numbers, and microbatches may not be
        microbatch = np.unique(microbatch, return_inverse=True)[1]

    kind = np.array([NUMBER[op.kind] for op in ops.templates], dtype=np.int8)[ops.which]

    def nodes(*kinds: str) -> np.ndarray:
        wanted = np.zeros(len(NUMBER), dtype=bool)
        wanted[[NUMBER[name] for name in kinds]] = True
        return np.flatnonzero(wanted[kind])

    def keys(of: list) -> np.ndarray:
        """A small number for each op: equal for equal microbatches of templates that are equal in `of`."""
        numbers = {value: i for i, value in enumerate(dict.fromkeys(of))}
        template = np.array([numbers[value] for value in of], dtype=np.int64)
        return template[ops.which] * (microbatch.max(initial=0) + 1) + microbatch

    forward, freeing = nodes("forward"), nodes("backward", "backward_weight")
    backward = nodes("backward", "backward_input", "backward_weight")
    making = nodes("forward", "recompute")
    saved = np.array([op.saved for op in ops.templates], dtype=np.int64)[ops.which[making]]
    part = keys([(op.stage, op.part) for op in ops.templates])
    held_by = np.zeros(part.max(initial=0) + 1, dtype=np.int64)
    np.add.at(held_by, part[making], saved)
    chunk = keys([op.stage for op in ops.templates])
    in_chunk = np.bincount(chunk[making], weights=saved, minlength=chunk.max(initial=0) + 1).astype(np.int64)
    freeing = freeing[_is_first(part[freeing])]
    held = np.zeros(len(ops), dtype=np.int64)
    held[making] = saved
    whole = np.array([not op.part for op in ops.templates], dtype=bool)[ops.which[freeing]]  # of all layers of a stage
    held[freeing] = -np.where(whole, in_chunk[chunk[freeing]], held_by[part[freeing]])
    held += np.array([0 if op.kind == "reduce_scatter" else op.remains for op in ops.templates], dtype=np.int64)[
        ops.which
    ]
    started, done = forward[_is_first(chunk[forward])], backward[::-1][_is_first(chunk[backward[::-1]])]
    in_flight = np.zeros(len(ops), dtype=np.int64)
    in_flight[started] = 1
    in_flight[done] -= 1
    loaded = max((op.saved for op in ops.templates if op.kind == "load"), default=0)  # a batch goes when the next comes
    scratch = np.array([op.scratch for op in ops.templates], dtype=np.int64)[ops.which]
    return Held(held, _gradients(ops), scratch, loaded, int(in_flight.cumsum().max(initial=0)))


def _gradients(ops: Ops) -> np.ndarray:
    """Bytes of a stage's whole gradients, which come with its first backward and go when they are reduced."""
    change = np.zeros(len(ops), dtype=np.int64)
    for stage in {op.stage for op in ops.templates if op.kind == "reduce_scatter" and op.remains}:
        of_stage = np.array([op.stage == stage for op in ops.templates], dtype=bool)
        adds, goes = ([op.kind in kinds for op in ops.templates] for kinds in (LAST, ("reduce_scatter",)))
        adds, goes = (np.flatnonzero((of_stage & np.array(one, dtype=bool))[ops.which]) for one in (adds, goes))
        sizes = np.array([op.remains for op in ops.templates], dtype=np.int64)[ops.which[goes]]
        # How many backwards come before each reduction: equal for those after which it is a new step's turn.
        before, together = np.unique(np.searchsorted(adds, goes), return_inverse=True)
        first = adds[np.concatenate([[0], before[:-1]])]
        np.add.at(change, goes, sizes)
        np.add.at(change, first[together], -sizes)
    return change


def _is_first(keys: np.ndarray) -> np.ndarray:
    """Whether each entry is the first one of its value."""
    places = np.arange(len(keys))
    first = np.empty(keys.max(initial=0) + 1, dtype=np.int64)
    first[keys[::-1]] = places[::-1]  # of several, the last one written stays
    return first[keys] == places
