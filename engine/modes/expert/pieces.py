"""A block and the copies of tokens that come to its experts -> its pieces between two exchanges of tokens.

Probabilities are fp32, and indices int64: which experts, and three orders. Of each copy an expert keeps the input, and
its MLP's. Tensor ranks have a part of each expert's MLP, and all of its tokens; or experts whole, and then each routes
tokens of its own. What experts share is cut for tensor ranks either way, and computed first.
"""

import dataclasses
from collections.abc import Sequence

from engine.job import Job
from engine.model.shapes import FP32, Layer, expert_kernels
from engine.modes.tensor.pieces import decoder
from engine.modes.tensor.shards import NORMED_ATTENTION, piece

INT64 = 8  # bytes


def routed(job: Job, layer: Layer, arrived: int, samples: int) -> tuple[Layer, Layer, Layer]:
    """Up to the copies on their way, the experts, and from the copies that are back: what is between a block's second
    norm and the sum behind its experts. `products` are the results of matrix products."""
    (c, h), num, k, sizes, item = layer.output, job.spec.experts, job.spec.top_k, decoder(job), job.item
    own, ranks = job.routed_tokens, 1 if job.whole_experts else job.degree("tp")
    row, of_sample, here = item * h, arrived / samples, num // job.degree(job.expert_axis)
    router = piece(
        layer, "router", "router",
        flops=2 * own * h * num,
        saved=FP32 * own * num + INT64 * own * 2 * k,
        products=FP32 * own * num,
        output=(own, h),
    )  # fmt: skip
    orders = INT64 * 2 if job.expert_axis else 0  # of those that came: by expert, and back
    experts = piece(
        layer, "experts", "experts",
        flops=round(of_sample * sizes.mlp_flops(ranks) / c),
        saved=round(of_sample * (row + sizes.mlp_saved(ranks) / c + orders)),
        products=round(of_sample * (sizes.mlp_products(ranks) / c + row)),
        output=(round(of_sample), h),
        kernels=expert_kernels(sizes, here, of_sample / here, ranks),
    )  # fmt: skip
    combine = piece(layer, "combine", saved=item * own * k * (1 + h) + INT64 * own * k, output=(own, h))
    if not job.whole_experts:
        router = joined([*shared(job, layer), router], "router")
    return router, experts, combine


def shared(job: Job, layer: Layer) -> list[Layer]:
    """What experts share, if anything: an MLP of all tokens, of which tensor ranks have a part."""
    sizes, ranks = decoder(job), job.degree("tp")
    width = (job.spec.shared_experts or 0) * sizes.ffn
    if not width:
        return []
    made = piece(
        layer, "shared", "shared",
        flops=sizes.mlp_flops(ranks, width),
        saved=sizes.mlp_saved(ranks, width),
        products=sizes.mlp_products(ranks, width) + layer.output_bytes,
        output=layer.output,
        kernels=sizes.mlp_kernels(ranks, width),
    )  # fmt: skip
    return [made]


def mixture(job: Job, layer: Layer) -> Layer:
    """All of it as one piece, where nobody has experts of others."""
    pieces = routed(job, layer, job.tokens * job.spec.top_k, 1)
    sizes = decoder(job)
    return joined(pieces, "mixture", beside=sizes.mlp_beside(job.degree("tp")) if sizes.fused else 0)


def joined(pieces: Sequence[Layer], name: str, **more: int) -> Layer:
    first, added = pieces[0], ("flops", "saved", "products", "copied", "products_copied")
    total = {key: sum(getattr(p, key) for p in pieces) for key in added}
    lists = {key: tuple(each for p in pieces for each in getattr(p, key)) for key in ("params", "kernels")}
    name = f"{first.name.partition('.')[0]}.{name}"
    return dataclasses.replace(first, name=name, output=pieces[-1].output, **total, **lists, **more)


def pieces(job: Job, layer: Layer, arrived: int, samples: int) -> tuple[Layer, Layer, Layer]:
    """A block whose attention nobody shares: all up to its router is one piece."""
    sizes, (router, experts, combine) = decoder(job), routed(job, layer, arrived, samples)
    c, h = layer.output
    norms, output = sizes.norm_kernels(), job.item * c * h
    attention = piece(
        layer, "attention", *NORMED_ATTENTION, "norm2", "router", "shared",
        flops=sizes.attention_flops() + router.flops,
        saved=2 * sizes.norm_saved() + sizes.attention_saved() + sizes.sum_saved() - sizes.copied() + router.saved,
        products=sizes.attention_saved() + output + router.products,
        output=layer.output,
        kernels=(*norms, *sizes.attention_kernels(), *sizes.sum_kernels(), *norms, *router.kernels),
    )  # fmt: skip
    kept = {"copied": sizes.copied(), "products_copied": layer.products_copied, "products": output}
    combine = dataclasses.replace(combine, saved=combine.saved + sizes.sum_saved(), **kept)
    if not sizes.repeats_scores:
        return attention, experts, combine
    attention = dataclasses.replace(attention, products=attention.saved - sizes.scores_saved())
    return attention, *(dataclasses.replace(each, products=each.saved) for each in (experts, combine))
