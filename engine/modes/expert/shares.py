"""A model's layers -> what a rank of a group that shares out the experts holds of them, and what all of it hold."""

from dataclasses import replace

from engine.job import Job
from engine.model.shapes import Layer, num_experts
from engine.modes.tensor import shards


def held(job: Job, place: int) -> tuple[Layer, ...]:
    """The model's layers, with the experts that the rank at `place` of its group holds, a run of them, and of those,
    as of all the rest, what a tensor rank has."""
    ranks = job.degree(job.expert_axis)
    return tuple(_with_some(layer, place, num_experts(layer) // ranks) for layer in shards.held(job))


def _with_some(layer: Layer, place: int, each: int) -> Layer:
    own = (None, *range(place * each, (place + 1) * each))
    return replace(layer, params=tuple((name, shape) for name, shape in layer.params if _expert(name) in own))


def replicated(job: Job) -> tuple[Layer, ...]:
    """The model's layers, without what only some ranks of a group have."""
    shared = job.degree("ep") > 1
    return tuple(
        replace(layer, params=tuple((n, shape) for n, shape in layer.params if not shared or _expert(n) is None))
        for layer in job.layers
    )


def _expert(name: str) -> int | None:
    """Whose parameter this is: experts.3.up.weight -> 3; None where it is no expert's."""
    words = name.split(".")
    return int(words[1]) if words[0] == "experts" else None
