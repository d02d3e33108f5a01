"""Layers and a size limit -> DDP's gradient buckets, in the order in which they are reduced."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.model.shapes import Layer

MIB = 1024 * 1024
FIRST_BUCKET_MB = 1.0  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, used when the limit is the default one
DEFAULT_BUCKET_MB = 25.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some gradients that are all-reduced together; it is full when `last_layer` has made its gradients."""

    bytes: int
    params: tuple[str, ...]
    last_layer: str


def buckets(layers: Sequence[Layer], limit_mb: float | None, *, forward: bool = False) -> list[Bucket]:
    """Gradients in order of arrival, cut whenever a bucket reaches its limit. `None`: one bucket for all.

    `forward`: cut in the order of the model's parameters instead, as DDP does before it has seen gradients arrive; of
    these buckets too that of the last parameters is reduced first.
    """
    limits = [math.inf] if limit_mb is None else [limit_mb * MIB]
    if limit_mb == DEFAULT_BUCKET_MB:
        limits.insert(0, FIRST_BUCKET_MB * MIB)
    order = [(layer, name, shape) for layer in layers for name, shape in layer.params]
    order = order if forward else [each for layer in reversed(layers) for each in _arriving(layer)]
    done: list[Bucket] = []
    names, size, first = [], 0, layers[-1]  # of the layers in a bucket the first one, with which backward ends
    for layer, name, shape in order:
        first = first if forward and names else layer
        names.append(f"{layer.name}.{name}")
        size += layer.item * math.prod(shape)
        if size >= limits[min(len(done), len(limits) - 1)]:
            done.append(Bucket(size, tuple(names), first.name))
            names, size = [], 0
    if names:
        done.append(Bucket(size, tuple(names), first.name))
    return done[::-1] if forward else done


def _arriving(layer: Layer) -> list[tuple[Layer, str, tuple[int, ...]]]:
    """Gradients of a layer in order of arrival: the last parameter's first, but of a convolution, whose backward makes
    both at once, the weight's."""
    params = [(layer, name, shape) for name, shape in layer.params]
    convolves = any(len(shape) == 4 for _, shape in layer.params)
    return params if convolves else params[::-1]


def filled_without(whole: Sequence[Bucket], used: Sequence[str]) -> list[Bucket]:
    """The buckets, as layers fill them of which only those `used`, in the order of their backwards, take part in the
    loss. DDP takes the others for done with the first gradient (reducer.cpp, autograd_hook); buckets go in order."""
    at, out = 0, []
    for bucket in whole:
        of_bucket = {name.partition(".")[0] for name in bucket.params}
        at = max([at, *(i for i, name in enumerate(used) if name in of_bucket)])
        out.append(replace(bucket, last_layer=used[at]))
    return out
