"""A mesh -> nothing where fully_shard averages gradients over it; an error where it does anything else.

torch once summed them on gloo without a word (pytorch#162338). A run compares its first steps with one device, but not
where that is switched off; this costs one small layer, and is always done.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

TOLERANCE = 1e-6


def check_averages(mesh: DeviceMesh, device: torch.device) -> None:
    """Collective over the mesh. Every rank's gradient is its rank plus one, so the average is known."""
    if mesh.size() == 1 or dist.get_backend() == "fake":  # nothing is averaged there
        return
    ranks = mesh.mesh.flatten().tolist()
    layer = nn.Linear(1, len(ranks), bias=False).to(device)  # a row a rank at least
    fully_shard(layer, mesh=mesh)
    layer(torch.full((1, 1), dist.get_rank() + 1.0, device=device)).sum().backward()
    verdict(layer.weight.grad.to_local(), sum(rank + 1.0 for rank in ranks) / len(ranks), len(ranks))


def verdict(gradient: torch.Tensor, average: float, ranks: int) -> None:
    ratio = (gradient / average).flatten().tolist()
    if any(not abs(one - 1) <= TOLERANCE for one in ratio):
        raise RuntimeError(
            f"fully_shard on this torch and backend gives gradients that are {ratio[0]:.6g} times the average over "
            f"{ranks} ranks (a sum would be {ranks} times): a training would be wrong without a word, so it is refused"
        )
