"""A training between two steps -> loss and accuracy on the validation samples, each counted once, forward only.

Every mode goes through its own `outputs`, which leaves gradients and all else of the training as they are. Torch's
`schedule.eval()` does not: after a step it divides gradients once more, and for zbv and dualpipev it fails. No model
here has dropout or statistics of a batch, so that a forward is the same in training and in evaluation.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from engine.job import Job
from engine.real.training import Place, Training

CHUNK = 256  # samples of one forward


def evaluate(job: Job, place: Place, training: Training) -> dict[str, float | None]:
    """Collective; the same on every rank.

    A replica sees its share of the samples. Where several ranks of each replica have the output, all its samples count
    as often, and the mean is the same.
    """
    batches = training.batches
    replica, replicas = (batches.replica, batches.replicas) if batches else (0, job.replicas)
    most = math.ceil(job.num_validation / replicas)
    share = torch.arange(replica, job.num_validation, replicas)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right guesses, guesses
    for chosen in share.tensor_split(math.ceil(most / CHUNK)):  # as many forwards on every rank: they may be collective
        inputs, targets = batches.of_validation(chosen) if batches else (None, None)
        with torch.no_grad():
            output = training.outputs(inputs, len(chosen))
            if output is not None:
                output = (output.full_tensor() if isinstance(output, DTensor) else output).flatten(0, -2).float()
                targets = targets.flatten()
                loss = F.cross_entropy(output, targets, reduction="sum")
                right = (output.argmax(-1) == targets).sum()
                sums += torch.stack([loss, right, torch.tensor(len(targets))]).cpu()
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    finite = count and math.isfinite(loss)
    return {"loss": loss / count if finite else None, "accuracy": right / count if count else None}
