"""A unit of fully_shard -> its passes with what is copied beside its collectives, where its software does (`does`).

Both ways of FSDP copy on the stream that computes, so that nothing hides it.
"""

import dataclasses
from collections.abc import Sequence

from engine.cost.kernels import EACH_PARAMETER, FLAT_PARAMETER, Kernel, memory
from engine.job import Job
from engine.model.chain import Unit
from engine.model.shapes import FP32, Layer
from engine.modes.fsdp.units import gathered_bytes
from engine.plan import Mesh, Op


def forward_with(units: Sequence[Unit], mesh: Mesh) -> list[list[Op]]:
    return [_with(unit.forward, [_gathered(unit.layer, mesh)], []) for unit in units]


def backward_with(units: Sequence[Unit], job: Job, mesh: Mesh, *, gathered: bool) -> dict[bool, list[list[Op]]]:
    """Whether gradients are reduced after it -> each unit's backward: with a copy before it, if it was gathered again,
    and of its gradients behind, as they are made and as they are to be reduced."""
    return {synced: [_backward(unit, job, mesh, gathered, synced) for unit in units] for synced in (False, True)}


def _backward(unit: Unit, job: Job, mesh: Mesh, gathered: bool, synced: bool) -> list[Op]:
    layer, behind = unit.layer, []
    if not layer.frozen:
        whole, wider = _whole(layer, mesh), FP32 // layer.item if job.spec.reduce_fp32 else 1
        behind = [memory(2 * whole, 0, only=FLAT_PARAMETER)]
        behind += [memory((1 + wider) * whole, 0, only=EACH_PARAMETER)] if synced else []
    return _with(unit.backward, [_gathered(layer, mesh)] if gathered else [], behind)


def _gathered(layer: Layer, mesh: Mesh) -> Kernel:
    return memory(2 * _whole(layer, mesh), 0, only=EACH_PARAMETER)


def _whole(layer: Layer, mesh: Mesh) -> int:
    """Bytes that are gathered of a layer."""
    return gathered_bytes(layer, mesh.degree("fsdp")) if "fsdp" in mesh.axes else 0


def _with(ops: Sequence[Op], before: list[Kernel], behind: list[Kernel]) -> list[Op]:
    """With kernels more, where an op's are known. A layer that nothing goes back through has no ops."""
    ops = list(ops)
    if not ops:
        return ops
    for i, more in ((0, before), (-1, behind)):
        if ops[i].kernels and (moving := [kernel for kernel in more if kernel.bytes]):
            made = (*moving, *ops[i].kernels) if i == 0 else (*ops[i].kernels, *moving)
            ops[i] = dataclasses.replace(ops[i], kernels=made)
    return ops
