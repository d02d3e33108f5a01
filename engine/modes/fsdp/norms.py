"""Layers that the ranks of a mesh share -> the all-reduces that make one norm of the norms of their gradients.

DTensor sums the norms of those parameters that lie on one mesh together, a number each: on fsdp alone, or also on tp
where a module is cut for tensor ranks. No DTensor knows of other stages, so the square of all is summed over them.
"""

from collections import Counter
from collections.abc import Iterable

from engine.job import Job
from engine.model.shapes import Layer
from engine.modes.tensor.shards import partial, styles
from engine.plan import Mesh


def norm_sums(job: Job, mesh: Mesh, layers: Iterable[Layer]) -> list[tuple[str, int]]:
    """(axis, how many numbers), in order. Replicas of a shard have the same norm, and sum nothing."""
    cut = set(styles(job))
    if job.degree("tp") > 1:
        sequences = bool(job.spec.sequence_parallel)
        cut |= {f"{layer.name}.{name}" for layer in job.layers for name in partial(layer, sequences=sequences)}
    names = [f"{layer.name}.{name}" for layer in layers for name, _ in layer.params]
    shared = job.expert_axis  # along it each rank has experts of its own
    apart = [shared != "" and name.split(".")[1] == "experts" for name in names]
    experts, names = sum(apart), [name for name, one in zip(names, apart, strict=True) if not one]
    cut_along = ("fsdp",) if job.whole_experts else ("fsdp", "tp")
    of_experts = [(axis, experts) for axis in cut_along if experts and mesh.degree(axis) > 1]
    alike = Counter(name.rpartition(".")[0] in cut for name in names)  # in the order in which they are met
    sums = [
        (axis, count)
        for on_tensor_ranks, count in alike.items()
        for axis in ("fsdp", "tp")
        if mesh.degree(axis) > 1 and (on_tensor_ranks or axis == "fsdp")
    ]
    return [*of_experts, *([(shared, 1)] if shared else []), *sums, *([("pp", 1)] if mesh.degree("pp") > 1 else [])]
