"""Gradients -> their global norm, over all shards and stages, and the same gradients scaled down to a largest norm.

The same steps as torch.nn.utils.clip_grad_norm_: where gradients are DTensors, the norm of their norms is what makes
DTensor all-reduce them, one number a parameter. What no DTensor knows of, the stages of a pipeline, is summed here, as
one square. There are also ranks with both kinds, which PyTorch does not take in one call. Each rank scales its own
parts: of DTensors PyTorch would first find out how all products lie at once, which takes a second.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from engine.plan import Op
from engine.real.parts import part_of
from engine.real.recorder import Recorder
from engine.real.training import Training


def clip(training: Training, recorder: Recorder, largest: float) -> float:
    """Collective where gradients are cut. The norm before clipping, the same on every rank."""
    names = getattr(training, "norm_names", {})
    alone = {name: axis for axis, of_axis in names.items() for name in of_axis}
    # By their mesh; None: this rank's own tensors; an axis: those of them that other ranks of that axis have not.
    groups: dict[object, list[nn.Parameter]] = defaultdict(list, {axis: [] for axis in names})
    for name, parameter in training.held().items():
        if parameter.grad is not None:
            groups[alone.get(name) or getattr(parameter.grad, "device_mesh", None)].append(parameter)
    with recorder.span("optimizer", part="norm"):
        norms = {
            key: [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in group] for key, group in groups.items()
        }
    over = getattr(training, "norm_groups", {})
    squares = torch.zeros(1)
    for key, of_group in norms.items():
        square = _total(of_group, recorder).square().reshape(1) if of_group else torch.zeros(1)
        if key in names:
            _sum_over_ranks(square, key, over[key], recorder)
        squares = squares.to(square.device) + square
    for axis, group in over.items():
        if axis not in names:
            _sum_over_ranks(squares, axis, group, recorder)
    total = squares.sqrt().squeeze()
    with recorder.span("optimizer", part="clip"):
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(map(part_of, group), largest, total)
    return total.item()


def _sum_over_ranks(squares: torch.Tensor, axis: str, group: dist.ProcessGroup | None, recorder: Recorder) -> None:
    if dist.get_world_size(group) > 1:
        with recorder.calls(_sum_over(axis)):
            dist.all_reduce(squares, group=group)


def _total(norms: list[torch.Tensor], recorder: Recorder) -> torch.Tensor:
    """The norm of the gradients that have these norms, on this rank alone or on their whole mesh."""
    if not isinstance(norms[0], DTensor):
        return torch.linalg.vector_norm(torch.stack(norms))
    mesh = norms[0].device_mesh
    cut = [i for i in range(mesh.ndim) if mesh.size(i) > 1 and any(norm.placements[i].is_partial() for norm in norms)]
    with recorder.calls(*(_sum_over(mesh.mesh_dim_names[i]) for i in cut)):
        return torch.linalg.vector_norm(torch.stack(norms)).full_tensor()


def _sum_over(axis: str) -> Op:
    return Op(kind="all_reduce", part="norm", payload="control", axis=axis)
