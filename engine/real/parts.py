"""A parameter that is a DTensor <-> this rank's part of it, which is what the optimizer updates.

SGD and AdamW treat every element alike, so a part is updated as the whole would be. Given the DTensor itself, each of
their ops would first find out how its result lies: on a mesh of three axes that takes a tenth of a second for every
shape, and in later steps as long as the op itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Part(nn.Parameter):
    """This rank's part of `whole`, in the same memory. It has a part of the whole's gradient, whatever that is now."""

    whole: DTensor

    @property
    def grad(self) -> torch.Tensor | None:
        return None if self.whole.grad is None else self.whole.grad._local_tensor

    @grad.setter
    def grad(self, gradient: None) -> None:
        """Only to be forgotten: the training makes gradients, of the whole."""
        assert gradient is None
        self.whole.grad = None


def on_parts(
    kind: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], **settings: float
) -> torch.optim.Optimizer:
    """Of DTensors it updates this rank's parts."""
    optimizer = kind([{"params": [*map(part_of, parameters)]}], **settings)  # there may be none
    optimizer.register_step_pre_hook(_check)
    return optimizer


def part_of(whole: nn.Parameter) -> nn.Parameter:
    """Of a DTensor this rank's part; else the parameter itself."""
    if not isinstance(whole, DTensor):
        return whole
    part = Part(whole._local_tensor, requires_grad=whole.requires_grad)
    part.whole = whole
    return part


def _check(optimizer: torch.optim.Optimizer, *_) -> None:
    """Before a step. Gradients that are only forgotten may lie as they like."""
    for whole, part in updated(optimizer).items():
        if part is whole or whole.grad is None:
            continue
        if whole.grad.placements != whole.placements or whole._local_tensor.data_ptr() != part.data_ptr():
            raise RuntimeError(
                f"a parameter that lies as {whole.placements} on its mesh has a gradient that lies as "
                f"{whole.grad.placements}, or other memory than when its optimizer was made: it would go astray"
            )


def updated(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """The parameters that an optimizer updates -> what it knows each of them as."""
    known = [each for group in optimizer.param_groups for each in group["params"]]
    return {each.whole if isinstance(each, Part) else each: each for each in known}


def whole_state(part: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """What an optimizer keeps for a part, laid out as the parameter is; a count of steps as it is."""
    return like(part.whole, value) if isinstance(part, Part) and value.shape == part.shape else value


def like(whole: DTensor, part: torch.Tensor) -> DTensor:
    """A DTensor of which `part` is this rank's, laid out as another one."""
    layout = (whole.device_mesh, whole.placements)
    return DTensor.from_local(part, *layout, run_check=False, shape=whole.shape, stride=whole.stride())


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Without its history."""
    if isinstance(tensor, DTensor):
        return like(tensor, tensor._local_tensor.clone())
    return tensor.detach().clone()
