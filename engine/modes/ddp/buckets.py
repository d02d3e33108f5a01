"""Layers and a size limit -> DDP's gradient buckets, in the order in which they are reduced."""

import math
from dataclasses import dataclass

from engine.shapes import Layer

MIB = 1024 * 1024
FIRST_BUCKET_MB = 1.0  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, used when the limit is the default one
DEFAULT_BUCKET_MB = 25.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some gradients that are all-reduced together; it is full when `last_layer` has made its gradients."""

    bytes: int
    params: tuple[str, ...]
    last_layer: str


def buckets(layers: tuple[Layer, ...], limit_mb: float | None) -> list[Bucket]:
    """Gradients in order of arrival, cut whenever a bucket reaches its limit. `None`: one bucket for all."""
    limits = [math.inf] if limit_mb is None else [limit_mb * MIB]
    if limit_mb == DEFAULT_BUCKET_MB:
        limits.insert(0, FIRST_BUCKET_MB * MIB)
    done: list[Bucket] = []
    names, size = [], 0
    for layer in reversed(layers):
        for name, shape in reversed(layer.params):
            names.append(f"{layer.name}.{name}")
            size += layer.item * math.prod(shape)
            if size >= limits[min(len(done), len(limits) - 1)]:
                done.append(Bucket(size, tuple(names), layer.name))
                names, size = [], 0
    if names:
        done.append(Bucket(size, tuple(names), layers[0].name))
    return done
