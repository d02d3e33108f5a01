"""A mesh -> along which axis its ranks have the same shards, and average their gradients."""

from engine.plan import Mesh

REPLICATED = ("dp", "cp")  # along them equal shards meet; a mesh with several takes them as one


def replicas_of(mesh: Mesh) -> str:
    """The axis of those that have the same shards; none where nobody has."""
    return "_".join(axis for axis in REPLICATED if axis in mesh.axes)


def is_shared(mesh: Mesh) -> bool:
    """Whether ranks share layers, or average their gradients: then FSDP does it."""
    return "fsdp" in mesh.axes or replicas_of(mesh) != ""
