"""A job's dataset -> the batch that a replica sees in a step, as tensors; the same samples for any number of replicas.

torch's DistributedSampler shuffles by seed and epoch and deals the samples out in turn, so the union of what all
replicas see in step k is what one replica would see: that is what makes parity with one device possible.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from engine.asking.faults import parse_fault
from engine.asking.masked import left_out
from engine.asking.settings import TOKEN_MODELS
from engine.data import datasets
from engine.job import Job
from engine.real import faults
from engine.real.models import dtype_of
from engine.spec import Spec


def _given(inputs: np.ndarray, spec: Spec) -> torch.Tensor:
    """Images in the precision of the model; tokens as they are."""
    tensor = torch.from_numpy(inputs)
    return tensor.to(dtype_of(spec)) if tensor.is_floating_point() else tensor


class Batches:
    """Step of this run -> (inputs, targets) of one replica; a run that resumes goes on where the other one stopped.

    Samples that do not fill a whole batch are left out of an epoch.
    """

    per_sample: float | None = None  # in this step, see engine.real.targets

    def __init__(self, job: Job, replica: int, replicas: int, device: torch.device):
        spec = job.spec
        self.replica, self.replicas = replica, replicas
        kind = "token" if spec.model in TOKEN_MODELS else "image"
        data = datasets.load(spec.dataset, kind=kind, data_dir=spec.data_dir, context=spec.context, seed=spec.seed)
        targets = data.train_y if spec.masked is None else left_out(data.train_y, spec.masked, spec.seed)
        self.x, self.y = _given(data.train_x, spec), torch.from_numpy(targets)
        self.validation = _given(data.validation_x, spec), torch.from_numpy(data.validation_y)
        self.size, self.per_epoch, self.device = spec.global_batch // replicas, job.batches_per_epoch, device
        self.sampler = DistributedSampler(range(len(self.x)), replicas, replica, seed=spec.seed, drop_last=True)
        self.first_step = job.first_step
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.long)
        self.forgets = faults.of_rank(parse_fault(spec.fault), replica) == "order"

    def __call__(self, step: int, piece: int = 0, pieces: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a step, or one of the equal pieces that it is cut into."""
        epoch, batch = divmod(self.first_step + step, self.per_epoch)
        if epoch != self.epoch:
            if not self.forgets:
                self.sampler.set_epoch(epoch)
            self.epoch, self.order = epoch, torch.tensor(list(self.sampler))
            self.fingerprint = hashlib.sha256(self.order.numpy().tobytes()).hexdigest()[:12]
        size = self.size // pieces
        first = batch * self.size + piece * size
        chosen = self.order[first : first + size]
        return self.x[chosen].to(self.device), self.y[chosen].to(self.device)

    def of_validation(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of validation samples, by their places."""
        inputs, targets = self.validation
        return inputs[chosen].to(self.device), targets[chosen].to(self.device)
