"""A training in numbers -> the FLOPs of one step, by the conventions in which rates are published.

Narayanan et al. 2021 (arXiv:2104.04473, equation 3) count every matrix product, attention over the full square of a
sequence, and the forward that full recomputation repeats: for a GPT 96 B s l h^2 (1 + s/6h + V/16lh). Utilisations
(MFU) leave the repeated forward out (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Megatron-Core from 2025 on,
and MaxText, count causal attention: half of the square.
"""

from __future__ import annotations

from engine.model.decoder import Decoder
from engine.model.presets import PRESETS
from engine.spec import Spec
from engine.validate.case import Case

FORWARD_AND_BACKWARD = 3  # a backward pass has two products for each product of the forward


def block_products(case: Case) -> float:
    """Of one sequence through one block's matrices, forward; with experts, through those that a token goes to, on
    average over blocks with and without."""
    if case.preset:
        return _published_products(case)
    h, kept = case.hidden, case.kv_heads / case.heads
    matrices = 2 * h * h + 2 * h * h * kept + (3 if case.gated else 2) * h * case.ffn * max(1, case.top_k)
    return 2.0 * case.context * (matrices + h * case.experts)


def _published_products(case: Case) -> float:
    """Its experts, those that all tokens go to, and its router, or a dense feed-forward part, behind its attention."""
    sizes, h = PRESETS[case.preset].sizes, case.hidden
    routed = (case.top_k + sizes.get("shared_experts", 0)) * 3 * h * case.ffn + h * case.experts
    dense = 3 * h * sizes.get("dense_ffn", 0)
    inside = (case.dense_layers * dense + (case.layers - case.dense_layers) * routed) / case.layers
    return 2.0 * case.context * (sum(_decoder(case).attention_products()) + inside)


def attention_products(case: Case, *, causal: bool) -> float:
    """Of one sequence in one block, forward: scores and the weighted sum."""
    width = case.hidden
    if case.preset:
        width = _decoder(case).scores_width()
    return 2 * 2.0 * case.context**2 * width * (0.5 if causal else 1.0)


def _decoder(case: Case) -> Decoder:
    return Decoder.of(Spec(model=case.preset, **PRESETS[case.preset].sizes), 2)


def step_flops(case: Case, *, causal: bool = False, recompute: bool = True) -> float:
    """FLOPs of one step over all devices. The head is never recomputed."""
    products, attention = block_products(case), attention_products(case, causal=causal)
    times = {"full": (4, 4), "selective": (3, 4)}.get(case.recompute, (3, 3)) if recompute else (3, 3)
    head = FORWARD_AND_BACKWARD * 2.0 * case.context * case.hidden * case.vocabulary
    blocks = (case.layers + case.mtp) * (times[0] * products + times[1] * attention)
    return case.global_batch * (blocks + (1 + case.mtp) * head)
