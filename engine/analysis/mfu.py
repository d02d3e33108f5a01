"""A model, a step's time and a machine -> how much of the machine's peak went into the model: MFU in both conventions.

Model FLOPs are those of one forward and one backward pass, which takes twice as many (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1), whatever is computed again. Attention is counted over the full square of tokens, as in
PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and Megatron-LM, or over the half that a causal mask leaves:
say which, since for long contexts they differ by a third. HFU counts what the plan does, recomputation too (Korthikanti
et al. 2022, arXiv:2205.05198, section 6.3), with attention over the full square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.cost.kernels import attention_flops
from engine.cost.machine import Machine
from engine.graph.matching import Graph
from engine.model.shapes import Layer

FORWARD, BACKWARD = 1, 2
COUNTED = ("forward", "backward", "backward_input", "backward_weight", "recompute")
MFU_FORMULA = "MFU = FLOPs of the model's forward and backward pass / (step time × devices × peak FLOP/s)"


def model_flops(layers: Sequence[Layer], samples: int) -> tuple[float, float]:
    """(attention over the full square, over its causal half) of a step with so many samples. A frozen layer has no
    gradients of weights, which are half of its backward but in attention; and no backward where nothing goes back."""
    full = causal = 0.0
    for layer in layers:
        core = attention_flops(layer.kernels)
        products = layer.flops - core
        passes = FORWARD if layer.stops else FORWARD + BACKWARD
        full += (passes - (layer.frozen and not layer.stops)) * products + passes * core
        causal += passes * core / 2
    return samples * full, samples * (full - causal)


def planned_flops(graph: Graph) -> float:
    """Of a step's passes and recomputation, on all ranks."""
    times = np.bincount(graph.which, minlength=len(graph.templates)).tolist()
    each = zip(graph.templates, graph.lanes, times, strict=True)
    return float(sum(op.flops * n * graph.num_ranks[role] for op, (role, _), n in each if op.kind in COUNTED))


def utilisation(
    layers: Sequence[Layer], samples: int, planned: float, seconds: float | None, devices: int, machine: Machine | None
) -> dict[str, Any]:
    """Fractions of the peak: `full` and `causal` MFU, and `hfu`; FLOPs of a step, in all and a second and device.

    `machine`: None where the step ran on none that is known. What is not known is None, and `reason` says why."""
    full, causal = model_flops(layers, samples)
    peak = None if machine is None else machine.peak_flop_rate
    out = {"model_flops": full, "causal_model_flops": causal, "planned_flops": planned, "peak_flop_rate": peak}
    out |= {"flop_rate": full / (seconds * devices) if seconds else None}
    if not seconds or peak is None:
        reason = "the step took no time" if peak is not None else "the machine's peak is not known"
        return out | {"full": None, "causal": None, "hfu": None, "reason": reason}
    whole = seconds * devices * peak
    return out | {"full": full / whole, "causal": causal / whole, "hfu": planned / whole, "reason": None}
