"""A layer of a rank of tensor parallelism -> its pieces between two collectives: what they compute, keep and run."""

import dataclasses
import math
from collections.abc import Sequence

from engine.job import Job
from engine.model.decoder import Decoder
from engine.model.shapes import FP32, Layer, num_experts
from engine.modes.tensor.cuts import Cut, collective
from engine.modes.tensor.shards import MLP, NORMED_ATTENTION, piece


def loss(job: Job, layer: Layer, normed: int) -> Cut:
    """This rank's part of the logits, and the loss: for each token the largest logit of all ranks, the sum of
    exponentials, and the target's log-probability, which one rank knows (torch's loss_parallel). `normed`: bytes kept
    of the norm before them."""
    context = layer.output[0]
    cut: Cut = [logits_of(job, layer, normed)]
    for before, after in (("logits", "largest"), ("largest", "total"), ("total", "loss")):
        work = decoder(job).loss_kernels(layer.output[1], job.degree("tp")) if after == "total" else ()
        cut.append(collective("all_reduce", f"head.{before}", FP32 * context))
        cut.append(piece(layer, after, output=(context,), kernels=work))
    return cut


def with_loss(job: Job, logits: Layer) -> Layer:
    """Logits on the way back, where the loss's gradient is made of what its pieces have left."""
    sizes, ranks = decoder(job), job.degree("tp")
    vocabulary = logits.output[1] * ranks
    return dataclasses.replace(
        logits, kernels=(*sizes.logits_kernels(vocabulary, ranks), *sizes.loss_kernels(vocabulary, ranks))
    )


def logits_of(job: Job, layer: Layer, normed: int) -> Layer:
    (context, vocabulary), ranks, sizes = layer.output, job.degree("tp"), decoder(job)
    flops, output = layer.flops // ranks, (context, vocabulary // ranks)
    work = (*(sizes.norm_kernels() if normed else ()), *sizes.logits_kernels(vocabulary, ranks))
    kept = sizes.logits_saved(vocabulary, ranks)
    known = {"saved": normed + kept, "logarithms": kept, "behind": kept, "last_flops": flops, "kernels": work}
    made = piece(layer, "logits", "linear", flops=flops, output=output, **known)
    if sizes.fused:
        beside, once = sizes.logits_beside(vocabulary, ranks)
        made = dataclasses.replace(made, beside=beside, beside_once=once)
    return made


def dense(job: Job, layer: Layer, style: str) -> Layer:
    """A linear layer of which this rank has some of the outputs (column) or of the inputs (row)."""
    output = (layer.params[0][1][0],) if style == "column" else layer.output
    return dataclasses.replace(
        layer, flops=layer.flops // job.degree("tp"), saved=layer.item * math.prod(output), output=output
    )


def decoder(job: Job) -> Decoder:
    return Decoder.of(job.spec, job.item, job.tokens)


def attention_of(job: Job, layer: Layer) -> Layer:
    """A block's attention, with the norm before it."""
    (c, h), ranks, sizes = layer.output, job.degree("tp"), decoder(job)
    kept, norm, again = sizes.attention_saved(ranks), sizes.norm_saved(), sizes.attention_repeated(ranks)
    only = sizes.repeats_scores
    return piece(
        layer, "attention", *NORMED_ATTENTION,
        flops=sizes.attention_flops(ranks),
        saved=norm + kept,
        output=layer.output,
        products=norm + kept - sizes.scores_saved(ranks) if only else layer.item * c * 2 * h + kept - again,
        kernels=(*sizes.norm_kernels(), *sizes.attention_kernels(ranks)),
    )  # fmt: skip


def mlp_of(job: Job, layer: Layer) -> Layer:
    """A block's dense MLP, without the norm before it and what becomes of its output."""
    (c, h), ranks, sizes, ffn = layer.output, job.degree("tp"), decoder(job), job.spec.dense_ffn
    return piece(
        layer, "mlp", *MLP,
        flops=sizes.mlp_flops(ranks, ffn),
        saved=sizes.mlp_saved(ranks, ffn),
        output=layer.output,
        products=sizes.mlp_products(ranks, ffn) - sizes.mlp_repeated(ranks, ffn),
        beside=sizes.mlp_beside(ranks, ffn) if sizes.fused else 0,
        last_flops=2 * c * h * (ffn or sizes.ffn) // ranks,
        kernels=sizes.mlp_kernels(ranks, ffn),
    )  # fmt: skip


def second_half(job: Job, layer: Layer, inside: Sequence[Layer]) -> list[Layer]:
    """What is after a block's attention: `inside`, whose output is summed over ranks, or of whole experts gathered,
    with the sum and the norm before it and the sum after. Of products are kept what they are summed to, the block's
    output, and that of a last one."""
    (_, h), sizes = layer.output, decoder(job)
    first, *rest = inside
    norm = tuple((name, shape) for name, shape in layer.params if name.startswith("norm2"))
    around = (*sizes.sum_kernels(), *sizes.norm_kernels())
    saved = first.saved + sizes.norm_saved() + sizes.sum_saved() - sizes.copied()
    apart = job.whole_experts and num_experts(layer)
    if apart:  # each rank has a copy of its own tokens, for its router; all are kept for what experts share
        saved += layer.item * job.routed_tokens * h - (0 if job.spec.shared_experts else layer.output_bytes)
    first = dataclasses.replace(first, params=norm + first.params, saved=saved, kernels=around + first.kernels)
    *ahead, last = first, *rest
    kept = last.products + layer.output_bytes * (3 if last.last_flops else 1 if apart else 2)
    known = {"copied": layer.copied, "products_copied": layer.products_copied}
    known |= {"saved": last.saved + sizes.sum_saved(), "products": kept, "output": layer.output}
    last = dataclasses.replace(last, **known)
    made = [*ahead, last]
    return [dataclasses.replace(each, products=each.saved) for each in made] if sizes.repeats_scores else made
