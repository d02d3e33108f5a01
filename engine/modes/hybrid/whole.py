"""What a rank of a pipeline of sharded stages does, in order -> the most bytes of layers and of gradients that it has
whole at any time.

A stage's gradients add up whole, from its first backward until they are reduced to their shards.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from engine.schedules import PASSES, Action
from engine.schedules.gathers import LAST

Sizes = Mapping[int, Sequence[int]]  # of each stage its layers' bytes, in order


def most_gathered(row: Sequence[Action], sizes: Sizes, ranks: int) -> int:
    """Each layer is copied out of what it was gathered into; a group of one copies its shards and gathers nothing.

    PyTorch's runtime gathers all layers of a stage in the background, and copies them out, one after the other, when a
    pass needs the stage. Its GPipe and 1F1B gather layer by layer in the first forward, where what the layer before was
    gathered into is still there; the last backward gives them up.
    """
    several, most = ranks > 1, 0
    if not any(action.kind == "unshard" for action in row):
        (layers,) = sizes.values()
        total = 0
        for before, own in pairwise([0, *layers]):
            total += own
            most = max(most, total + several * (before + own))
        return most
    there = dict.fromkeys(sizes, 0)
    waiting = set()
    for kind, stage, *_ in row:
        beside = 0
        if kind == "unshard":
            waiting.add(stage)
            there[stage] = several * sum(sizes[stage])
        elif kind in ("reshard", "reduce_grad"):
            there[stage] = 0
        elif kind in PASSES and stage in waiting:
            waiting.remove(stage)
            there[stage], beside = sum(sizes[stage]), several * max(sizes[stage])
        most = max(most, sum(there.values()) + beside)
    return most


def most_gradients(row: Sequence[Action], whole: Mapping[int, int], shards: Mapping[int, int], *, added: bool) -> int:
    """`added`: to the shards of an earlier micro-step."""
    there, most = dict.fromkeys(whole, 0), 0
    reduced = sum(shards.values()) if added else 0
    for kind, stage, *_ in row:
        if kind in LAST:
            there[stage] = whole[stage]
        elif kind == "reduce_grad":
            there[stage] = 0
            reduced += 0 if added else shards[stage]
        most = max(most, sum(there.values()) + reduced)
    return most
