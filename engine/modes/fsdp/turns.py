"""Units of FSDP in their order -> which of them are gathered when, on the way back."""

import itertools
from collections.abc import Sequence

from engine.chain import Unit


def prefetched(units: Sequence[Unit]) -> list[list[int]]:
    """Of each unit, those that are gathered when its way back begins: as FSDP goes through them in the order in which
    they ended forward, from the last. An inner one ends before its layer, which begins its way back with it."""
    ended: list[int] = []
    for i, unit in enumerate(units):
        ended.insert(len(ended) - unit.inner, i)
    following = {after: [before] for before, after in itertools.pairwise(ended)}
    inner = [unit.inner for unit in units] + [False]
    begin = [[i - 1, i] if inner[i] else [] if inner[i + 1] else [i] for i in range(len(units))]
    return [[other for one in both for other in following.get(one, [])] for both in begin]
