"""A job under tensor and sequence parallelism -> its plan: an all-gather before each pair of matrices, a reduce-scatter
after it (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2); on the way back the other way round.

Between them a rank has its part of the context, so a norm's weight gets a part of its gradient there, and the parts are
summed after the backward pass.
"""

import dataclasses
import math
from collections.abc import Sequence

from engine.job import Job
from engine.model.shapes import Layer, num_experts
from engine.modes.expert.pieces import joined
from engine.modes.tensor.cuts import Cut, collective
from engine.modes.tensor.pieces import decoder, loss, with_loss
from engine.modes.tensor.plan import assemble, inside_of, names_of
from engine.modes.tensor.shards import ATTENTION, piece
from engine.plan import Plan


def plan(job: Job, step: int) -> Plan:
    return assemble(job, forward, backward, sequences=True)


def parts(job: Job, kind: str, name: str) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind."""
    return names_of(job, forward, backward, kind, name)


def forward(job: Job, layer: Layer, inside: Sequence[Layer] = ()) -> Cut:
    """`inside`: as of tensor ranks that have all tokens."""
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
    return _in_turn(_pieces(job, layer, inside), "all_gather", "reduce_scatter")


def backward(job: Job, layer: Layer, inside: Sequence[Layer] = ()) -> Cut:
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
    pieces = [part[::-1] for part in _pieces(job, layer, inside)][::-1]
    return _in_turn(pieces, "all_gather", "reduce_scatter")


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


def _in_turn(parts: list[list[Layer]], before: str, after: str) -> Cut:
    """Parts of a block with some of the context and with all of it in turn, with a collective between each two.

    The one after a matrix pair is given all of the context; the one before it, a part.
    """
    cut: Cut = [*parts[0]]
    for i in range(1, len(parts), 2):
        outside, inside, following = parts[i - 1][-1], parts[i], parts[i + 1]
        cut += [
            collective(before, inside[0].name, outside.output_bytes), *inside,
            collective(after, inside[-1].name, inside[-1].output_bytes), *following,
        ]  # fmt: skip
    return cut


def _pieces(job: Job, layer: Layer, inside: Sequence[Layer]) -> list[list[Layer]]:
    """A block, cut wherever its tokens are gathered or scattered. DTensor keeps the gathered input of each pair. To
    whole experts each rank sends tokens of its own: nothing is gathered for them, but for what they share."""
    ranks, tokens, sizes = job.degree("tp"), _tokens(job), decoder(job)
    part, whole, total_saved = layer.item * math.prod(tokens), _gathered(job), sizes.sum_saved(tokens[0])
    norm, total = sizes.norm_kernels(tokens[0]), sizes.sum_kernels(tokens[0])
    kept, only = sizes.attention_saved(ranks), sizes.repeats_scores
    apart = job.whole_experts and num_experts(layer)
    normed = _norm(job) + (part if apart else 0)  # what the second norm keeps: a router takes a rank's own tokens
    norm1 = piece(layer, "norm1", "norm1", saved=_norm(job), output=tokens, kernels=norm, products=_norm(job) * only)
    attention = piece(
        layer, "attention", *ATTENTION,
        flops=sizes.attention_flops(ranks),
        saved=whole + kept,
        output=layer.output,
        products=whole + kept - sizes.scores_saved(ranks) if only else whole + part + kept,
        kernels=sizes.attention_kernels(ranks),
    )  # fmt: skip
    norm2 = piece(
        layer, "norm2", "norm2",
        saved=total_saved - sizes.copied(tokens[0]) + normed, output=tokens, kernels=total + norm,
        products=(total_saved + normed) * only,
    )  # fmt: skip
    after = piece(
        layer, "sum",
        saved=total_saved, copied=sizes.copied(tokens[0]), output=tokens, products=total_saved,
        products_copied=layer.products_copied // ranks, kernels=total,
    )  # fmt: skip
    if not apart:
        return [[norm1], [attention], [norm2], _given_all(job, inside or [inside_of(job, layer)], part), [after]]
    *shared, router, experts, combine = inside
    own = [router, experts, joined([combine, after], "combine")]
    if shared:
        return [[norm1], [attention], [norm2], _given_all(job, shared, part), _repeating(job, own)]
    return [[norm1], [attention], _repeating(job, [joined([norm2, router], "router"), *own[1:]])]


def _given_all(job: Job, inside: Sequence[Layer], part: int) -> list[Layer]:
    """What is inside of a block's second half, which keeps the tokens that are gathered for it; of products, those that
    it scatters to each rank, `part` bytes, and those of a last one."""
    first, *rest = inside
    *ahead, last = dataclasses.replace(first, saved=first.saved + _gathered(job)), *rest
    kept = last.products + part + (_gathered(job) if last.last_flops else 0)
    return _repeating(job, [*ahead, dataclasses.replace(last, products=kept)])


def _repeating(job: Job, pieces: list[Layer]) -> list[Layer]:
    """All that they keep is kept where recomputing selectively repeats nothing but scores."""
    if not decoder(job).repeats_scores:
        return pieces
    return [dataclasses.replace(each, products=each.saved) for each in pieces]
