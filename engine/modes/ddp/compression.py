"""A bucket of gradients and a way to compress them -> the all-reduces that are made of it.

fp16 halves each number. PowerSGD (Vogels et al. 2019, arXiv:1905.13727) sends a matrix of n x m as two factors of so
many columns, P and then Q; what is no matrix, or would hardly get smaller, goes first and as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.model.shapes import FP32, Layer
from engine.modes.ddp.buckets import Bucket
from engine.spec import Spec

FP16 = 2  # bytes
START = 2  # reductions that PowerSGD leaves alone: DDP rebuilds its buckets before the second (PowerSGDState)
LEAST = 2  # how many times smaller a matrix must become (PowerSGDState.min_compression_rate)


def factors(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Numbers in P and in Q of a parameter; None where it is sent whole."""
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, rank)
    return (rows * rank, columns * rank) if (rows + columns) * rank * LEAST < rows * columns else None


def pieces(bucket: Bucket, layers: Sequence[Layer], spec: Spec, reduced: int) -> list[tuple[str, int]]:
    """(what of the bucket, bytes) of each, in order; `reduced`: how often gradients were reduced before."""
    if spec.compress == "fp16":
        return [("", bucket.bytes // FP32 * FP16)]
    if spec.compress != "powersgd" or reduced < START:
        return [("", bucket.bytes)]
    shapes = {f"{layer.name}.{name}": shape for layer in layers for name, shape in layer.params}
    rest = p = q = 0
    for name in bucket.params:
        if both := factors(shapes[name], spec.compress_rank):
            p, q = p + both[0], q + both[1]
        else:
            rest += math.prod(shapes[name])
    return [(".rest", FP32 * rest), (".P", FP32 * p), (".Q", FP32 * q)]


def kept(buckets: Sequence[Bucket], layers: Sequence[Layer], spec: Spec) -> int:
    """Bytes beside the buckets: what is sent, and for PowerSGD what it left out the last time, and a copy of all."""
    sent = sum(size for bucket in buckets for _, size in pieces(bucket, layers, spec, START))
    whole = sum(bucket.bytes for bucket in buckets)
    return {"fp16": sent, "powersgd": sent + 2 * whole}.get(spec.compress, 0)
