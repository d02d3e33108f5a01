"""Predicted and measured values -> errors summed up, the error of a one-constant model, and ranks compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.validate.case import Case
from engine.validate.flops import step_flops


def errors(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float | int] | None:
    """Of each pair predicted / measured - 1: the mean of the absolute values (MAPE), the mean with signs (bias), the
    90th percentile and the largest of the absolute values. Fractions, not percent. None where there are no pairs."""
    if not measured:
        return None
    relative = np.array(predicted, dtype=float) / np.array(measured, dtype=float) - 1
    size = np.abs(relative)
    return {
        "rows": len(size),
        "mape": float(size.mean()),
        "bias": float(relative.mean()),
        "p90": float(np.percentile(size, 90)),
        "max": float(size.max()),
    }


def floor_load(case: Case) -> float:
    """FLOPs of a device in a step, with its pipeline's idle time as if it were work: what the one-constant model
    divides by its constant. FLOPs (with recomputation, full attention) * (1 + (p - 1) / (v m)) / devices."""
    bubble = (case.pp - 1) / (case.stages_per_rank * case.microbatches)
    return step_flops(case, causal=False, recompute=True) * (1 + bubble) / case.devices


def floor(loads: Sequence[float], measured: Sequence[float]) -> list[float]:
    """What a model of one constant predicts: load / c, with c the median of load / time over these very rows."""
    rates = np.array(loads, dtype=float) / np.array(measured, dtype=float)
    return (np.array(loads, dtype=float) / np.median(rates)).tolist()


def constant(values: Sequence[float]) -> list[float]:
    """The same for memory, where nothing but a constant is known beforehand: the median for every row."""
    return [float(np.median(values))] * len(values)


def ranks(values: Sequence[float]) -> np.ndarray:
    """Places from 1 on in rising order; equal values share the mean of their places."""
    array = np.array(values, dtype=float)
    unique, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse] if len(unique) else array


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where either has no order to compare."""
    a, b = ranks(predicted), ranks(measured)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much longer the layout that is predicted best takes than the best does: both as measured."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def order(predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[int, int]:
    """(pairs in the right order, pairs): of all pairs that were measured apart."""
    names = sorted(measured)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if measured[a] != measured[b]]
    right = sum((predicted[a] < predicted[b]) == (measured[a] < measured[b]) for a, b in pairs)
    return right, len(pairs)
