"""A program's ops <-> a few templates and two columns, so that thousands of microbatches cost arrays, not objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.plan import Op
from engine.timeline import NONE


@dataclass(frozen=True, slots=True, eq=False)
class Ops(Sequence):
    """Reads like a tuple of ops, and equals one; an op is made when it is looked at.

    Entry i is `templates[which[i]]` with microbatch `microbatch[i]` (-1: none). Templates that belong to one pass
    (the same kind and stage) are all gone through by the same microbatches, each once.
    """

    templates: tuple[Op, ...]
    which: np.ndarray  # of int32
    microbatch: np.ndarray  # of int64

    @classmethod
    def of(cls, ops: Sequence[Op]) -> Ops:
        """The columns of any program: each op its own template, unless it is in columns already."""
        if isinstance(ops, Ops):
            return ops
        microbatch = [NONE if op.microbatch is None else op.microbatch for op in ops]
        return cls(tuple(ops), np.arange(len(ops), dtype=np.int32), np.array(microbatch, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return tuple(Ops(self.templates, self.which[i], self.microbatch[i]))
        return _with_microbatch(self.templates[self.which[i]], int(self.microbatch[i]))

    def __iter__(self) -> Iterator[Op]:
        pairs = zip(self.which.tolist(), self.microbatch.tolist(), strict=True)
        return (_with_microbatch(self.templates[t], m) for t, m in pairs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Ops, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None


class Calls(NamedTuple):
    """(name, microbatch) in columns: the place of the name among those of the passes, and the microbatch or -1."""

    which: np.ndarray
    microbatch: np.ndarray


def unroll(
    passes: Mapping[str, Sequence[Op]],
    order: Sequence[tuple[str, int | None]] | Calls,
    *,
    before: Sequence[Op] = (),
    after: Sequence[Op] = (),
) -> Ops:
    """`before`, then for each (name, microbatch) of `order` the ops of `passes[name]`, then `after`."""
    names = {name: i for i, name in enumerate(passes)}
    if isinstance(order, Calls):
        called, microbatch = order
    else:
        called = np.array([names[name] for name, _ in order], dtype=np.int64)
        microbatch = np.array([NONE if m is None else m for _, m in order], dtype=np.int64)
    sizes = np.array([len(ops) for ops in passes.values()], dtype=np.int64)
    starts = len(before) + np.cumsum(sizes) - sizes  # first template of each pass
    lengths = sizes[called]
    # Entry k of a call is template k of its pass: count up, and start again at each call.
    counted = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    body = np.repeat(starts[called], lengths) + counted
    templates = (*before, *(op for ops in passes.values() for op in ops), *after)
    ends = np.arange(len(templates) - len(after), len(templates))
    which = np.concatenate([np.arange(len(before)), body, ends]).astype(np.int32)
    outside = [[NONE if op.microbatch is None else op.microbatch for op in ops] for ops in (before, after)]
    repeated = np.repeat(microbatch, lengths)
    return Ops(templates, which, np.concatenate([outside[0], repeated, outside[1]]).astype(np.int64))


def preceded(ops: Sequence[Op], before: Sequence[Op]) -> Sequence[Op]:
    """A program's ops, after others."""
    if not isinstance(ops, Ops):
        return (*before, *ops)
    first = Ops.of(before)
    which = np.concatenate([first.which, ops.which + len(before)]).astype(np.int32)
    return Ops((*before, *ops.templates), which, np.concatenate([first.microbatch, ops.microbatch]))


def joined(*parts: Sequence[Op]) -> Ops:
    """Programs one after the other."""
    each = [Ops.of(part) for part in parts]
    before = np.cumsum([0, *(len(one.templates) for one in each)])
    which = [one.which + start for one, start in zip(each, before[:-1], strict=True)]
    microbatch = np.concatenate([one.microbatch for one in each])
    return Ops(tuple(op for one in each for op in one.templates), np.concatenate(which).astype(np.int32), microbatch)


def with_each(ops: Sequence[Op], change: Callable[[Op], Op]) -> Ops:
    """The same with each of its templates changed."""
    columns = Ops.of(ops)
    return replace(columns, templates=tuple(map(change, columns.templates)))


def _with_microbatch(template: Op, microbatch: int) -> Op:
    wanted = None if microbatch == NONE else microbatch
    return template if template.microbatch == wanted else replace(template, microbatch=wanted)
