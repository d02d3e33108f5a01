"""A job under tensor and sequence parallelism -> its plan: an all-gather before each pair of matrices, a reduce-scatter
after it (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2); on the way back the other way round.

Between them a rank has its part of the context, so a norm's weight gets a part of its gradient there, and the parts are
summed after the backward pass.
"""

import dataclasses
import math

from engine.job import Job
from engine.modes.tensor.cuts import Cut, collective
from engine.modes.tensor.pieces import decoder, loss, with_loss
from engine.modes.tensor.plan import assemble, names_of
from engine.modes.tensor.shards import norms_of, piece
from engine.plan import Op, Plan
from engine.shapes import Layer


def plan(job: Job, step: int) -> Plan:
    return assemble(job, forward, backward, [op for layer in job.layers for op in norm_gradients(layer)])


def parts(job: Job, kind: str, name: str) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind."""
    return names_of(job, forward, backward, kind, name)


def norm_gradients(layer: Layer) -> tuple[Op, ...]:
    """The sums of a layer's norms' gradients, in the order of its parameters."""
    sizes = {f"{layer.name}.{norm}": layer.item * math.prod(shape) for norm, shape in norms_of(layer).items()}
    known = {"kind": "all_reduce", "payload": "gradient", "axis": "tp"}
    return tuple(Op(part=name, bytes=size, **known) for name, size in sizes.items())


def forward(job: Job, layer: Layer) -> Cut:
    shard = _tokens(job)
    if layer.name == "embed":
        tokens = piece(layer, "tokens", "token", output=layer.output, kernels=layer.kernels)
        scatter = collective("reduce_scatter", "embed.tokens", layer.output_bytes)
        kept = {"saved": decoder(job).sum_saved(shard[0]), "copied": decoder(job).copied(shard[0])}
        return [tokens, scatter, piece(layer, "sum", "position", output=shard, **kept)]
    if layer.name == "head":
        norm = piece(layer, "norm", "norm", saved=_norm(job), output=shard, kernels=decoder(job).norm_kernels(shard[0]))
        gather = collective("all_gather", "head.logits", job.item * math.prod(shard))
        return [norm, gather, *loss(job, layer, _gathered(job))]
    return _in_turn(_pieces(job, layer), "all_gather", "reduce_scatter")


def backward(job: Job, layer: Layer) -> Cut:
    shard = _tokens(job)
    if layer.name == "embed":
        size = job.item * math.prod(shard)
        position = dataclasses.replace(collective("all_gather", "embed.position", size), payload="gradient")
        pieces = [piece(layer, name, output=shard) for name in ("sum", "position")]
        tokens = piece(layer, "tokens", "token", output=layer.output, kernels=layer.kernels)
        return [pieces[0], position, pieces[1], collective("all_gather", "embed.tokens", size), tokens]
    if layer.name == "head":
        logits, *_ = loss(job, layer, 0)
        scatter = collective("reduce_scatter", "head.logits", job.layers[-2].output_bytes)
        norm = piece(layer, "norm", "norm", output=shard, kernels=decoder(job).norm_kernels(shard[0]))
        return [with_loss(job, logits), scatter, norm]
    return _in_turn(_pieces(job, layer)[::-1], "all_gather", "reduce_scatter")


def _tokens(job: Job) -> tuple[int, int]:
    """What a rank has of one sample between the matrices: [context / ranks, hidden]."""
    return (job.tokens // job.degree("tp"), job.spec.hidden)


def _norm(job: Job) -> int:
    """What a norm of a rank's tokens keeps but its output, which is gathered."""
    tokens, hidden = _tokens(job)
    return decoder(job).norm_saved(tokens) - job.item * tokens * hidden


def _gathered(job: Job) -> int:
    """What is kept of all tokens, once they are gathered: DTensor keeps them; Megatron-LM a rank's own, and gathers
    them again (Korthikanti et al. 2022, section 4.2.2)."""
    return job.item * job.tokens * job.spec.hidden // (job.degree("tp") if decoder(job).fused else 1)


def _in_turn(pieces: list[Layer], before: str, after: str) -> Cut:
    """Pieces of part of the context and of all of it in turn, with a collective between each two.

    The one after a matrix pair is given all of the context; the one before it, a part.
    """
    cut: Cut = [pieces[0]]
    for i in range(1, len(pieces), 2):
        outside, inside, following = pieces[i - 1], pieces[i], pieces[i + 1]
        cut += [
            collective(before, inside.name, outside.output_bytes), inside,
            collective(after, inside.name, inside.output_bytes), following,
        ]  # fmt: skip
    return cut


def _pieces(job: Job, layer: Layer) -> list[Layer]:
    """A block, cut wherever its tokens are gathered or scattered. DTensor keeps the gathered input of each pair."""
    (c, h), ranks, tokens, sizes = layer.output, job.degree("tp"), _tokens(job), decoder(job)
    part, whole, total_saved = layer.item * tokens[0] * h, _gathered(job), sizes.sum_saved(tokens[0])
    norm, total = sizes.norm_kernels(tokens[0]), sizes.sum_kernels(tokens[0])
    kept, made, only = sizes.attention_saved(ranks), sizes.mlp_saved(ranks), sizes.repeats_scores
    return [
        piece(
            layer, "norm1", "norm1",
            saved=_norm(job), output=tokens, kernels=norm, products=_norm(job) if only else 0,
        ),
        piece(
            layer, "attention", "qkv", "proj",
            flops=sizes.attention_flops(ranks),
            saved=whole + kept,
            output=layer.output,
            products=whole + kept - sizes.scores_saved(ranks) if only else whole + part + kept,
            kernels=sizes.attention_kernels(ranks),
        ),
        piece(
            layer, "norm2", "norm2",
            saved=total_saved - sizes.copied(tokens[0]) + _norm(job), output=tokens, kernels=total + norm,
            products=total_saved + _norm(job) if only else 0,
        ),
        piece(
            layer, "mlp", "gate", "up", "down",
            flops=sizes.mlp_flops(ranks),
            saved=whole + made,
            output=layer.output,
            products=whole + made if only else whole + part + sizes.mlp_products(ranks),
            beside=sizes.mlp_beside(ranks) if sizes.fused else 0,
            last_flops=2 * c * h * sizes.ffn // ranks,
            kernels=sizes.mlp_kernels(ranks),
        ),
        piece(
            layer, "sum",
            saved=total_saved, copied=sizes.copied(tokens[0]), output=tokens, products=total_saved,
            products_copied=layer.products_copied // ranks, kernels=total,
        ),
    ]  # fmt: skip
