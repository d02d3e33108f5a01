"""Layers and a number of ranks -> which rank owns which parameters, as ZeroRedundancyOptimizer deals them out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.shapes import Layer


@dataclass(frozen=True, slots=True)
class Owned:
    """The parameters that one rank updates, in the order in which they lie in what it broadcasts."""

    params: tuple[str, ...]
    bytes: int


def owners(layers: Sequence[Layer], ranks: int) -> list[Owned]:
    """The largest first, each to the rank that has least so far; of equals the first
    (ZeroRedundancyOptimizer._partition_parameters)."""
    sizes = {f"{layer.name}.{name}": math.prod(shape) for layer in layers for name, shape in layer.params}
    names: list[list[str]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for name in sorted(sizes, key=sizes.get, reverse=True):
        rank = totals.index(min(totals))
        names[rank].append(name)
        totals[rank] += sizes[name]
    return [Owned(tuple(n), layers[0].item * total) for n, total in zip(names, totals, strict=True)]
