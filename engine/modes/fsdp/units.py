"""Layers and a number of ranks -> the shards of fully_shard: which rows each rank keeps, and what is gathered of them.

Each layer is one unit: its parameters are gathered by one all-gather, and their gradients reduced by one
reduce-scatter. A parameter is cut along dim 0 as torch.chunk does: ceil(rows / ranks) rows a rank, so the last ranks
may keep fewer, or none. What travels and is allocated is padded to equal size (torch/distributed/fsdp/_fully_shard).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from engine.model.shapes import Layer


def shard(layer: Layer, ranks: int, rank: int) -> Layer:
    """The layer with the rows that `rank` keeps of each parameter."""
    if ranks == 1:
        return layer
    kept = []
    for name, (rows, *rest) in layer.params:
        size = math.ceil(rows / ranks)
        kept.append((name, (min(size, max(0, rows - rank * size)), *rest)))
    return dataclasses.replace(layer, params=tuple(kept))


def padded_bytes(layer: Layer, ranks: int) -> int:
    """What each rank passes to the all-gather, and gets from the reduce-scatter."""
    return layer.item * _padded(layer.params, ranks)


@functools.lru_cache(maxsize=4096)  # layers of a model share their shapes, and are asked for their sizes often
def _padded(params: tuple[tuple[str, tuple[int, ...]], ...], ranks: int) -> int:
    return sum(math.ceil(rows / ranks) * math.prod(rest) for _, (rows, *rest) in params)


def gathered_bytes(layer: Layer, ranks: int) -> int:
    """The whole layer as gathered, and what each rank passes to the reduce-scatter."""
    return ranks * padded_bytes(layer, ranks)


def equal_ranks(layers: Sequence[Layer], ranks: int) -> list[range]:
    """Runs of ranks that keep shards of the same shapes."""
    edges = {0, ranks}
    for rows in {shape[0] for layer in layers for _, shape in layer.params}:
        size = math.ceil(rows / ranks)
        edges |= {min(ranks, rows // size), min(ranks, math.ceil(rows / size))}
    return [range(a, b) for a, b in itertools.pairwise(sorted(edges))]
