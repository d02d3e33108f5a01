"""A job under tensor parallelism -> its plan: every layer cut where its ranks have to sum what they computed.

What DTensor does: the output of a layer cut by rows is a part of a sum on each rank, and is all-reduced; so is, on the
way back, the gradient of the input of a layer cut by columns, where anybody needs it. Each is waited for at once.
"""

import dataclasses
import math
from collections.abc import Iterable

from engine import chain
from engine.job import Job
from engine.modes.tensor.cuts import Cut, Way, collective, names_in, units
from engine.modes.tensor.shards import held, parameters_in, piece, styles
from engine.plan import Mesh, Op, Plan, Program
from engine.shapes import FP32, Layer, norm_saved


def plan(job: Job, step: int) -> Plan:
    return assemble(job, forward, backward, [])


def parts(job: Job, kind: str, name: str) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind."""
    return names_of(job, forward, backward, kind, name)


def names_of(job: Job, forward: Way, backward: Way, kind: str, name: str) -> tuple[str, ...]:
    if job.degree("tp") == 1:
        return (name,)
    (layer,) = [layer for layer in held(job) if layer.name == name]
    return names_in(job, layer, (forward, backward), kind)


def assemble(job: Job, forward: Way, backward: Way, after: Iterable[Op]) -> Plan:
    """One program for all ranks: they do the same, each with its own shards. `after` follows the backward pass.

    One rank has nothing to sum: there no layer is cut.
    """
    layers, ranks, after = held(job), job.degree("tp"), list(after)
    cut = units(job, layers, job.local_batch, forward, backward)
    ops = [chain.load(job.sample_bytes, job.local_batch), *(op for unit in cut for op in unit.forward)]
    ops += [op for unit in reversed(cut) for op in unit.backward]
    laid_out = parameters_in(job, styles(job)) + len(after)  # as DTensors: what is cut, and the norms of sequences
    clip = chain.clip(layers, job.spec, [("tp", laid_out)] if ranks > 1 else [])
    ops += [*(after if ranks > 1 else []), *clip, chain.optimizer(layers, job.spec)]
    shares = tuple(mine.param_bytes / layer.param_bytes for mine, layer in zip(layers, job.layers, strict=True))
    memory = chain.standing_memory(layers, job.spec)
    program = Program(tuple(ops), tuple(range(len(layers))), memory, shares=shares if job.degree("tp") > 1 else ())
    return Plan(Mesh(("tp",), (ranks,)), (program,), (0,) * ranks, tuple(layer.name for layer in layers))


def output_of(job: Job, layer: Layer, forward: Way) -> Layer:
    """The last piece of a layer in forward: its output is what a rank passes on."""
    if job.degree("tp") == 1:
        return layer
    return _logits(job, layer, 0) if layer.name == "head" else forward(job, layer)[-1]


def forward(job: Job, layer: Layer) -> Cut:
    style, whole = styles(job).get(layer.name), layer.output
    if layer.name == "embed":
        return [
            piece(layer, "tokens", "token", output=whole),
            collective("all_reduce", "embed.tokens", layer.output_bytes),
            piece(layer, "sum", "position", output=whole, saved=layer.saved),
        ]
    if layer.name == "head":
        return loss(job, layer, job.item * layer.output[0] * norm_saved(job.spec.hidden))
    if layer.name.startswith("block"):
        attention, mlp, size = *_halves(job, layer), layer.output_bytes
        total = [collective("all_reduce", part.name, size) for part in (attention, mlp)]
        return [attention, total[0], mlp, total[1], piece(layer, "sum", output=whole)]
    if style == "row":
        total = collective("all_reduce", layer.name, layer.output_bytes)
        return [_dense(job, layer, style), total, piece(layer, "output", output=whole)]
    return [_dense(job, layer, style) if style else layer]


def backward(job: Job, layer: Layer) -> Cut:
    style = styles(job).get(layer.name)
    if layer.name == "head":
        logits, total = _logits(job, layer, 0), collective("all_reduce", "head.logits", job.layers[-2].output_bytes)
        return [logits, total, piece(layer, "norm", "norm", output=job.layers[-2].output)]
    if layer.name.startswith("block"):
        attention, mlp, size = *_halves(job, layer), layer.output_bytes
        total = [collective("all_reduce", part.name, size) for part in (mlp, attention)]
        return [mlp, total[0], attention, total[1], piece(layer, "norm1", output=layer.output)]
    if style == "column" and layer.name != job.layers[0].name:  # nobody needs the gradient of the model's input
        inputs = layer.params[0][1][1]
        total = collective("all_reduce", layer.name, layer.item * inputs)
        return [_dense(job, layer, style), total, piece(layer, "input", output=(inputs,))]
    return [_dense(job, layer, style) if style else layer]


def loss(job: Job, layer: Layer, normed: int) -> Cut:
    """This rank's part of the logits, and the loss: for each token the largest logit of all ranks, the sum of
    exponentials, and the target's log-probability, which one rank knows (torch's loss_parallel). `normed`: bytes kept
    of the norm before them."""
    context = layer.output[0]
    cut: Cut = [_logits(job, layer, normed)]
    for before, after in (("logits", "largest"), ("largest", "total"), ("total", "loss")):
        cut += [collective("all_reduce", f"head.{before}", FP32 * context), piece(layer, after, output=(context,))]
    return cut


def _logits(job: Job, layer: Layer, normed: int) -> Layer:
    context, vocabulary = layer.output
    flops, output = layer.flops // job.degree("tp"), (context, vocabulary // job.degree("tp"))
    saved = normed + layer.item * math.prod(output)
    return piece(layer, "logits", "linear", flops=flops, saved=saved, output=output, last_flops=flops)


def _dense(job: Job, layer: Layer, style: str) -> Layer:
    """A linear layer of which this rank has some of the outputs (column) or of the inputs (row)."""
    output = (layer.params[0][1][0],) if style == "column" else layer.output
    return dataclasses.replace(
        layer, flops=layer.flops // job.degree("tp"), saved=layer.item * math.prod(output), output=output
    )


def _halves(job: Job, layer: Layer) -> tuple[Layer, Layer]:
    """A block's two pairs of matrices, each with the norm before it: only what is inside a pair is cut."""
    (c, h), heads, ranks = layer.output, job.spec.heads, job.degree("tp")
    attention = piece(
        layer, "attention", "norm1", "qkv", "proj",
        flops=(2 * c * 4 * h * h + 2 * 2 * c * c * h) // ranks,
        saved=layer.item * c * (norm_saved(h) + 4 * h // ranks) + FP32 * c * heads // ranks,
        output=layer.output,
        products=layer.item * c * (4 * h // ranks + 2 * h) + FP32 * c * heads // ranks,
    )  # fmt: skip
    mlp = piece(
        layer, "mlp", "norm2", "up", "down",
        flops=2 * c * 8 * h * h // ranks,
        saved=layer.item * c * (h + norm_saved(h) + 8 * h // ranks + h),  # the sum before it and the one after
        output=layer.output,
        products=layer.item * c * (4 * h // ranks + 2 * h + h),  # of its own part and of all, and the sum after it
        last_flops=2 * c * 4 * h * h // ranks,
    )  # fmt: skip
    return attention, mlp
