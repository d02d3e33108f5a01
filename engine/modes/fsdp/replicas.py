"""A mesh -> along which axis its ranks have the same shards, and average their gradients."""

from engine.plan import Mesh

REPLICATED = ("dp", "cp", "ep")  # along them equal shards meet; a mesh with several takes them as one


def replicas_of(mesh: Mesh, *, of_experts: bool = False) -> str:
    """The axis of those that have the same shards; none where nobody has. Along ep each has experts of its own."""
    return "_".join(axis for axis in REPLICATED if axis in mesh.axes and not (of_experts and axis == "ep"))


def is_shared(mesh: Mesh) -> bool:
    """Whether ranks share layers, or average their gradients: then FSDP does it."""
    return "fsdp" in mesh.axes or replicas_of(mesh) != ""
