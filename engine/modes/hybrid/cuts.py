"""A job on a mesh -> how its layers are cut there: a forward and a backward for each, and what completes its gradients.

Cut for tensor ranks a layer's sums are all-reduces; where sequences are parallel too, they are gathers and scatters of
tokens, and the gradients of norms, which have seen a part of the tokens, are summed over the tensor ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine import chain
from engine.job import Job
from engine.modes.sequence import plan as sequence
from engine.modes.tensor import plan as tensor
from engine.modes.tensor.cuts import Way, units
from engine.shapes import Layer


def ways(job: Job) -> tuple[Way, Way]:
    cuts = sequence if job.spec.sequence_parallel else tensor
    return cuts.forward, cuts.backward


def units_of(job: Job, layers: Sequence[Layer], samples: int, *, stage: int | None = None) -> list[chain.Unit]:
    """Layers of `held`, as a rank computes them."""
    made = units(job, layers, samples, *ways(job), stage=stage)
    if not job.spec.sequence_parallel:
        return made
    return [replace(unit, sums=sequence.norm_gradients(unit.layer)) for unit in made]


def parts(job: Job, kind: str, name: str) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind."""
    return (sequence if job.spec.sequence_parallel else tensor).parts(job, kind, name)


def output_of(job: Job, layer: Layer) -> Layer:
    """The last piece of a layer in forward: its output is what a rank passes on."""
    return tensor.output_of(job, layer, ways(job)[0])
