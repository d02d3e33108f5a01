"""What each rank is about to train -> nothing where all agree; where not, an error that names the ranks and the values.

Most modes take it for granted that every rank builds the same model from the same seed on the same samples. One that
does not would be found by a collective that hangs or aborts, or by nothing at all; so it is asked before the first one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from engine.job import Job
from engine.real import models
from engine.real.training import Place

SHOWN = 4  # parameters of a model that are listed in an error


class Disagreement(RuntimeError):
    """Ranks that are not about to train the same. `rank` is the one that stands alone, of two the second."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def check(job: Job, place: Place, *, scale: float = 1.0) -> None:
    """Collective. `scale` is what this rank's weights are multiplied by: 1 unless a fault asks for other weights."""
    mine = statement(job, scale)
    said: list[Any] = [None] * place.world_size
    dist.all_gather_object(said, mine)
    compare(said)


def statement(job: Job, scale: float = 1.0) -> dict[str, Any]:
    parameters = {name: p.detach() for name, p in models.build(job, to_look_at=True).named_parameters()}
    return {
        "torch": torch.__version__,
        "settings": job.spec.to_dict(),
        "samples": job.num_train,
        "shapes": {name: list(p.shape) for name, p in parameters.items()},
        "weights": {name: scale * float(p.double().abs().sum()) for name, p in parameters.items()},
    }


def compare(said: list[dict[str, Any]]) -> None:
    """Raises Disagreement for the first thing in which the ranks' statements differ."""
    for key in ("torch", "settings", "samples", "shapes", "weights"):
        values = [repr(one[key]) for one in said]
        usual = Counter(values).most_common(1)[0][0]  # of equally many, the first
        for rank, value in enumerate(values):
            if value != usual:
                like = values.index(usual)
                raise Disagreement(rank, _describe(key, like, said[like][key], rank, said[rank][key]))


def _describe(key: str, one: int, its: Any, two: int, others: Any) -> str:
    if key == "shapes" and its.keys() != others.keys():
        only = [f"{name} only on rank {one}" for name in its if name not in others]
        only += [f"{name} only on rank {two}" for name in others if name not in its]
        counts = f"{len(its)} parameters on rank {one}, {len(others)} on rank {two}"
        more = f" and {len(only) - SHOWN} more" if len(only) > SHOWN else ""
        return f"the ranks' models differ: {counts} ({', '.join(only[:SHOWN])}{more})"
    if isinstance(its, dict):
        name = next(name for name in its if its[name] != others[name])
        what = {"shapes": f"the shape of {name}", "weights": f"the sum of |{name}|", "settings": name}[key]
        its, others = its[name], others[name]
    else:
        what = {"torch": "the version of torch", "samples": "the number of training samples"}[key]
    return f"the ranks differ in {what}: {its} on rank {one}, {others} on rank {two}"
