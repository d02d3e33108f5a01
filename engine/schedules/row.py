"""What one rank does, in columns: reads like a list of actions, for schedules of hundreds of thousands of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.schedules import Action


@dataclass(frozen=True, slots=True, eq=False)
class Row(Sequence):
    """Entry i is `kinds[which[i]]` of `stage` for `microbatch[i]`. An action is made when it is looked at."""

    kinds: tuple[str, ...]
    stage: int
    which: np.ndarray
    microbatch: np.ndarray

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return list(Row(self.kinds, self.stage, self.which[i], self.microbatch[i]))
        return Action(self.kinds[self.which[i]], self.stage, int(self.microbatch[i]))

    def __iter__(self) -> Iterator[Action]:
        pairs = zip(self.which.tolist(), self.microbatch.tolist(), strict=True)
        return (Action(self.kinds[k], self.stage, m) for k, m in pairs)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (Row, list)) else NotImplemented

    __hash__ = None


def forward_and_backward(stage: int, microbatches: int, places: np.ndarray | slice) -> Row:
    """Every forward and then every backward, in another order: `places` are their places in this one."""
    each = np.arange(microbatches)
    which, microbatch = np.repeat([0, 1], microbatches), np.concatenate([each, each])
    return Row(("forward", "backward"), stage, which[places], microbatch[places])


def in_turn(first: range, second: range) -> np.ndarray:
    """One of each until one of them is used up, then the rest of the other."""
    both = min(len(first), len(second))
    pairs = np.stack([np.array(first[:both], dtype=np.int64), np.array(second[:both], dtype=np.int64)], axis=1)
    return np.concatenate([pairs.reshape(-1), first[both:], second[both:]]).astype(np.int64)
