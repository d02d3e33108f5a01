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
    input, and its MLP's. Of all that, `products` are the results of matrix products."""
    (c, h), spec, sizes, item = layer.output, job.spec, decoder(job), job.item
    num, k, shared = spec.experts, spec.top_k, (spec.shared_experts or 0) * sizes.ffn
    whole, norms, only = {"ffn": shared}, sizes.norm_kernels(), sizes.repeats_scores
    row, of_sample = item * h, arrived / samples
    before = (
        c * (row + FP32 * num) - sizes.copied() + 2 * sizes.norm_saved() + sizes.attention_saved()
        + INT64 * c * 2 * k + (sizes.mlp_saved(**whole) if shared else 0)
    )  # fmt: skip
    results = sizes.attention_saved() + c * (row + FP32 * num)
    results += sizes.mlp_products(**whole) + c * row if shared else 0
    inside = round(of_sample * (row + sizes.mlp_saved() / c + INT64 * 2))
    made = item * c * (k * (1 + h) + h) + INT64 * c * k
    attention = piece(
        layer, "attention", *ATTENTION,
        flops=sizes.attention_flops() + 2 * c * h * num + (sizes.mlp_flops(**whole) if shared else 0),
        saved=before, products=before - sizes.scores_saved() if only else results, output=(c, h),
        kernels=(
            *norms, *sizes.attention_kernels(), *sizes.sum_kernels(), *norms,
            *(sizes.mlp_kernels(**whole) if shared else ()),
        ),
    )  # fmt: skip
    here = num // job.degree("ep")
    experts = piece(
        layer, "experts", "experts",
        flops=round(of_sample * sizes.mlp_flops() / c),
        saved=inside, products=inside if only else round(of_sample * (sizes.mlp_products() / c + row)),
        output=(round(of_sample), h),
        kernels=expert_kernels(sizes, here, of_sample / here),
    )  # fmt: skip
    combine = piece(
        layer, "combine", saved=made, output=(c, h), products=made if only else c * row,
        copied=sizes.copied(), products_copied=layer.products_copied,
    )  # fmt: skip
    return attention, experts, combine
