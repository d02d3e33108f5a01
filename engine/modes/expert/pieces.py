"""A block and the copies of tokens that come to its experts -> its pieces between two exchanges of tokens."""

from engine.job import Job
from engine.modes.tensor.pieces import decoder
from engine.modes.tensor.shards import piece
from engine.shapes import FP32, Layer, expert_kernels

INT64 = 8  # bytes
LATENT = ("q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up")
ATTENTION = ("norm1", "qkv", *LATENT, "proj", "norm2", "router", "shared")


def pieces(job: Job, layer: Layer, arrived: int, samples: int) -> tuple[Layer, Layer, Layer]:
    """Up to the copies on their way, the experts, and from the copies that are back. What experts share is computed
    first. Probabilities are fp32, and indices int64: which experts, and three orders. Of each copy an expert keeps the
    input, and its MLP's."""
    (c, h), spec, sizes, item = layer.output, job.spec, decoder(job), job.item
    num, k, shared = spec.experts, spec.top_k, (spec.shared_experts or 0) * sizes.ffn
    whole, norms = {"ffn": shared}, sizes.norm_kernels()
    attention = piece(
        layer, "attention", *ATTENTION,
        flops=sizes.attention_flops() + 2 * c * h * num + (sizes.mlp_flops(**whole) if shared else 0),
        saved=c * (item * h + FP32 * num) - sizes.copied() + 2 * sizes.norm_saved() + sizes.attention_saved()
        + INT64 * c * 2 * k + (sizes.mlp_saved(**whole) if shared else 0),
        output=(c, h),
        kernels=(
            *norms, *sizes.attention_kernels(), *sizes.sum_kernels(), *norms,
            *(sizes.mlp_kernels(**whole) if shared else ()),
        ),
    )  # fmt: skip
    of_sample = arrived / samples
    here = num // job.degree("ep")
    experts = piece(
        layer, "experts", "experts",
        flops=round(of_sample * sizes.mlp_flops() / c),
        saved=round(of_sample * (item * h + sizes.mlp_saved() / c + INT64 * 2)),
        output=(round(of_sample), h),
        kernels=expert_kernels(sizes, here, of_sample / here),
    )  # fmt: skip
    made = item * c * (k * (1 + h) + h) + INT64 * c * k
    combine = piece(layer, "combine", saved=made, copied=sizes.copied(), output=(c, h))
    return attention, experts, combine
