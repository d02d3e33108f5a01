"""What each replica's gradients come to under PowerSGD, in one process: to hold PyTorch's hook to.

Written from the paper (Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2) with what PyTorch adds: two plain
averages first, error feedback for all tensors, and factors that start from the last ones.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from engine.job import Job
from engine.modes.ddp.buckets import buckets
from engine.modes.ddp.compression import START, factors

Gradients = dict[str, torch.Tensor]
SEED = 0  # PowerSGDState.random_seed


class PowerSGD:
    """One state for all replicas. Their first factors are the same on all, from a seed."""

    def __init__(self, job: Job):
        (bucket,) = buckets(job.layers, job.spec.bucket_mb)
        shapes = {f"{layer.name}.{name}": shape for layer in job.layers for name, shape in layer.params}
        self.rank, self.reduced = job.spec.compress_rank, 0
        by_shape: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name in bucket.params:
            if factors(shapes[name], self.rank):
                by_shape[shapes[name][0], int(np.prod(shapes[name][1:]))].append(name)
        self.right: Gradients = {}  # Q of each matrix
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
            for (rows, columns), names in by_shape.items():
                for name in names:
                    self.right[name] = torch.randn(1, columns, min(rows, columns, self.rank))[0]
        self.errors: list[Gradients] = []

    def reduce(self, of_ranks: list[Gradients]) -> Gradients:
        self.reduced += 1
        if self.reduced <= START:
            return {name: _mean([each[name] for each in of_ranks]) for name in of_ranks[0]}
        if self.errors:
            both = zip(of_ranks, self.errors, strict=True)
            of_ranks = [{name: gradient + left_out[name] for name, gradient in each.items()} for each, left_out in both]
        result = {name: self._one(name, [each[name] for each in of_ranks]) for name in of_ranks[0]}
        self.errors = [{name: gradient - result[name] for name, gradient in each.items()} for each in of_ranks]
        return result

    def _one(self, name: str, of_ranks: list[torch.Tensor]) -> torch.Tensor:
        if name not in self.right:
            return _mean(of_ranks)
        matrices = [gradient.flatten(1) for gradient in of_ranks]
        right, _ = torch.linalg.qr(self.right[name])
        left, _ = torch.linalg.qr(sum(matrix @ right for matrix in matrices))
        self.right[name] = _mean([matrix.T @ left for matrix in matrices])
        return (left @ self.right[name].T).view_as(of_ranks[0])


def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).mean(0)
