"""Layers, and how a rank cuts each of them -> the ops of their passes: pieces, and the collectives between them."""

import dataclasses
from collections.abc import Callable, Sequence

from engine import chain
from engine.job import Job
from engine.plan import Op
from engine.shapes import Layer

Cut = list[Layer | Op]  # pieces of a layer, and the collectives between them, for one sample
Way = Callable[[Job, Layer], Cut]  # forward or backward through a layer


def units(
    job: Job,
    layers: Sequence[Layer],
    samples: int,
    forward: Way,
    backward: Way,
    *,
    stage: int | None = None,
) -> list[chain.Unit]:
    """Layers of `held`, each cut where its ranks meet. In a pipeline they, and their collectives, are of a stage."""
    if job.degree("tp") == job.degree("cp") == 1:
        return chain.units(layers, samples, stage=stage or 0)
    ways = ((chain.forward, forward, "activation"), (chain.backward, backward, "gradient"))
    out = []
    for layer in layers:
        passes = []
        for compute, cut, payload in ways:
            ops = []
            for item in cut(job, layer):
                if isinstance(item, Layer):
                    ops += compute([item], samples, stage=stage or 0)
                else:
                    ops.append(_of_batch(item, payload, samples, stage))
            passes.append(tuple(ops))
        out.append(chain.Unit(layer, *passes))
    return out


def collective(kind: str, part: str, size: int) -> Op:
    return Op(kind=kind, part=part, axis="tp", bytes=size)


def _of_batch(op: Op, payload: str, samples: int, stage: int | None) -> Op:
    """What is labelled already knows its bytes: those of a weight's gradient do not grow with the samples."""
    if op.payload:
        return dataclasses.replace(op, stage=stage)
    return dataclasses.replace(op, payload=payload, bytes=op.bytes * samples, stage=stage)
