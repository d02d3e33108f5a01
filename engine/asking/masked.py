"""The part of a text's targets that is left out of the loss -> which targets, the counting of the rest in a plan, and
what that is for.

As prompts are, where a model is to learn its answers only. Ranks then have different numbers of targets, so the mean of
their own means is not the mean over all targets (transformers#34242): losses are sums, divided by the number of targets
over all ranks, for which these add up their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.asking.settings import ONE_PROCESS_MODES
from engine.graph.columns import preceded
from engine.plan import Mesh, Op, Plan

if TYPE_CHECKING:
    from engine.job import Job

LEFT_OUT = -100  # a target that does not count: the `ignore_index` of torch's cross entropy
COUNTED = ("dp", "fsdp", "cp", "ep")  # axes whose ranks have targets of their own
INT64 = 8  # bytes


def left_out(targets: np.ndarray, part: float, seed: int) -> np.ndarray:
    """[samples, context] -> the same with the beginning of each sample left out: between 0 and 2 x part of it, or up to
    all but one target where that is more than the whole, and on average `part`."""
    samples, context = targets.shape
    width = 2 * min(part, 1 - part)
    shares = part - width / 2 + width * np.random.default_rng(seed).random(samples)
    return np.where(np.arange(context) < (shares * context).astype(np.int64)[:, None], LEFT_OUT, targets)


def counts(job: Job, mesh: Mesh) -> list[Op]:
    """What ranks do before a step to know how many targets they have together."""
    if job.spec.masked is None or job.spec.mode in ONE_PROCESS_MODES:
        return []
    axes = [axis for axis in COUNTED if mesh.has(axis) and mesh.degree(axis) > 1]
    return [Op(kind="all_reduce", part="targets", payload="control", axis=axis, bytes=INT64) for axis in axes]


def counting(job: Job, plan: Plan) -> Plan:
    before = counts(job, plan.mesh)
    if not before:
        return plan
    return replace(plan, programs=tuple(replace(p, ops=preceded(p.ops, before)) for p in plan.programs))


def means(sums: Sequence[float], counted: Sequence[int]) -> dict[str, Any]:
    """Of ranks' losses, each a sum over so many targets: the mean over all targets, and the mean of ranks' means."""
    of_ranks = [total / count for total, count in zip(sums, counted, strict=True) if count]
    over_ranks = sum(of_ranks) / len(of_ranks)
    return {"counted": list(counted), "over_targets": sum(sums) / sum(counted), "over_ranks": over_ranks}
