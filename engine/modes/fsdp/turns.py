"""Units of FSDP in their order -> which of them are gathered when, on the way back, and what is whole meanwhile."""

import itertools
from collections.abc import Sequence

from engine.model.chain import Unit


def prefetched(units: Sequence[Unit]) -> list[list[int]]:
    """Of each unit, those that are gathered when its way back begins: as FSDP goes through them in the order in which
    they ended forward, from the last. An inner one ends before its layer, which begins its way back with it."""
    following = {after: [before] for before, after in itertools.pairwise(_ended(units))}
    inner = [unit.inner for unit in units] + [False]
    begin = [[i - 1, i] if inner[i] else [] if inner[i + 1] else [i] for i in range(len(units))]
    return [[other for one in both for other in following.get(one, [])] for both in begin]


def most_whole(units: Sequence[Unit], sizes: Sequence[int], ranks: int, beside: int = 0) -> int:
    """The most bytes of whole layers, and of gradients that are to be reduced, at any time; `sizes`: of each unit
    gathered, `beside`: what else is there while a block's attention goes back.

    A unit is copied out of what it was gathered into; a group of one copies its shards and gathers nothing. Beside both
    lies what is gathered meanwhile (in forward what the one before was gathered into), or the gradients of the unit
    that went back before; and around an inner unit its layer."""
    several, inner = ranks > 1, [unit.inner for unit in units] + [False]
    before = {after: sizes[before] for before, after in itertools.pairwise(_ended(units))}
    most = 0
    for i, own in enumerate(sizes):
        around = sizes[i - 1] if inner[i] else 0
        after = sizes[i + 1] if i + 1 < len(sizes) else 0
        copied = (1 + several) * own + max(several * before.get(i, 0), several * around, after)
        meanwhile = several * before.get(i + inner[i + 1], 0)
        has_attention = units[i].layer.name.startswith("block") and not inner[i]
        most = max(most, around + copied, own + meanwhile + after + has_attention * beside)
    return most


def _ended(units: Sequence[Unit]) -> list[int]:
    """In the order in which they end forward."""
    ended: list[int] = []
    for i, unit in enumerate(units):
        ended.insert(len(ended) - unit.inner, i)
    return ended
