"""Numbers of samples, ranks and a batch -> which samples each rank sees, the three ways in which uneven numbers go.

- keep: dealt out in turn, and that is all. Some ranks then have a batch more, and its collectives wait for ever.
- pad: as torch's DistributedSampler does by itself: the first samples once more, until all ranks have equally many.
  What is counted over ranks then counts some samples twice.
- drop: as it does with drop_last: what does not go round is left out. Lockstep trains so, by whole global batches, and
  measures accuracy on each validation sample once, on one rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

WAYS = ("keep", "pad", "drop")


def deal(samples: int, ranks: int, way: str) -> list[list[int]]:
    """The samples of each rank, unshuffled."""
    order = list(range(samples))
    if way == "pad":
        total = math.ceil(samples / ranks) * ranks
        order = (order * math.ceil(total / samples))[:total]
    elif way == "drop":
        order = order[: samples // ranks * ranks]
    return [order[rank::ranks] for rank in range(ranks)]


def report(samples: int, ranks: int, batch: int, wrong: Iterable[int] = ()) -> dict[str, Any]:
    """For each way: samples and batches of each rank, what is seen twice or never, who runs out of batches when, and
    the accuracy that a count over all ranks comes to, if the model is wrong on the samples `wrong`."""
    wrong = set(wrong) & set(range(samples))
    ways = {}
    for way in WAYS:
        dealt = deal(samples, ranks, way)
        seen = Counter(sample for mine in dealt for sample in mine)
        batches = [math.ceil(len(mine) / batch) for mine in dealt]
        counted, longest = sum(seen.values()), max(batches)
        ways[way] = {
            "samples": dealt,
            "batches": batches,
            "twice": sorted(sample for sample, count in seen.items() if count > 1),
            "never": sorted(set(range(samples)) - seen.keys()),
            "runs_out": [{"rank": r, "step": n} for r, n in enumerate(batches) if n < longest],
            "accuracy": 1 - sum(seen[sample] for sample in wrong) / counted if counted else None,
        }
    return {"samples": samples, "ranks": ranks, "batch": batch, "ways": ways, "accuracy": 1 - len(wrong) / samples}
