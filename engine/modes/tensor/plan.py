"""A job under tensor parallelism -> its plan: every layer cut where its ranks have to sum what they computed.

What DTensor does: the output of a layer cut by rows is a part of a sum on each rank, and is all-reduced; so is, on the
way back, the gradient of the input of a layer cut by columns, where anybody needs it. Each is waited for at once.
"""

import dataclasses
from collections.abc import Iterable

from engine import chain
from engine.job import Job
from engine.modes.tensor.cuts import Cut, Way, collective, names_in, units
from engine.modes.tensor.pieces import decoder, dense, halves, logits_of, loss, with_loss
from engine.modes.tensor.shards import gradient_bytes, held, parameters_in, piece, styles
from engine.plan import Mesh, Op, Plan, Program
from engine.shapes import Layer


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
    cut = units(job, layers, job.micro_batch, forward, backward)
    passes = [op for unit in cut for op in unit.forward] + [op for unit in reversed(cut) for op in unit.backward]
    ops = chain.microsteps(job, lambda k, synced: passes)
    laid_out = parameters_in(job, styles(job)) + len(after)  # as DTensors: what is cut, and the norms of sequences
    clip = chain.clip(layers, job.spec, [("tp", laid_out)] if ranks > 1 else [])
    ops += [*(after if ranks > 1 else []), *clip, chain.optimizer(layers, job.spec)]
    shares = tuple(mine.param_bytes / layer.param_bytes for mine, layer in zip(layers, job.layers, strict=True))
    memory = chain.standing_memory(layers, job.spec)
    if not job.spec.master_weights:
        memory["gradients"] = sum(gradient_bytes(job, layer) for layer in layers)
    program = Program(tuple(ops), tuple(range(len(layers))), memory, shares=shares if job.degree("tp") > 1 else ())
    return Plan(Mesh(("tp",), (ranks,)), (program,), (0,) * ranks, tuple(layer.name for layer in layers))


def output_of(job: Job, layer: Layer, forward: Way) -> Layer:
    """The last piece of a layer in forward: its output is what a rank passes on."""
    if job.degree("tp") == 1:
        return layer
    if layer.name == "head":
        return logits_of(job, layer, 0)
    return dataclasses.replace(forward(job, layer)[-1], behind=layer.behind)


def forward(job: Job, layer: Layer) -> Cut:
    style, whole = styles(job).get(layer.name), layer.output
    if layer.name == "embed":
        return [
            piece(layer, "tokens", "token", output=whole, kernels=layer.kernels),
            collective("all_reduce", "embed.tokens", layer.output_bytes),
            piece(layer, "sum", "position", output=whole, saved=layer.saved, copied=layer.copied),
        ]
    if layer.name == "head":
        return loss(job, layer, decoder(job).norm_saved())
    if layer.name.startswith("block"):
        attention, mlp, size = *halves(job, layer), layer.output_bytes
        total = [collective("all_reduce", part.name, size) for part in (attention, mlp)]
        after = piece(layer, "sum", output=whole, kernels=decoder(job).sum_kernels())
        return [attention, total[0], mlp, total[1], after]
    if style == "row":
        total = collective("all_reduce", layer.name, layer.output_bytes)
        return [dense(job, layer, style), total, piece(layer, "output", output=whole)]
    return [dense(job, layer, style) if style else layer]


def backward(job: Job, layer: Layer) -> Cut:
    style = styles(job).get(layer.name)
    if layer.name == "embed":
        return [piece(layer, "sum", "token", "position", output=layer.output)]
    if layer.name == "head":
        logits, total = logits_of(job, layer, 0), collective("all_reduce", "head.logits", job.layers[-2].output_bytes)
        before = piece(layer, "norm", "norm", output=job.layers[-2].output, kernels=decoder(job).norm_kernels())
        return [with_loss(job, logits), total, before]
    if layer.name.startswith("block"):
        (attention, mlp), sizes, ranks = halves(job, layer), decoder(job), job.degree("tp")
        # A norm, and the sum before it, go back where their gradients have been summed: in the piece after.
        outside = (*sizes.norm_kernels(), *sizes.sum_kernels())
        mlp = dataclasses.replace(mlp, kernels=sizes.mlp_kernels(ranks))
        attention = dataclasses.replace(attention, kernels=(*sizes.attention_kernels(ranks), *outside))
        total = [collective("all_reduce", part.name, layer.output_bytes) for part in (mlp, attention)]
        return [mlp, total[0], attention, total[1], piece(layer, "norm1", output=layer.output, kernels=outside)]
    if style == "column" and layer.name != job.layers[0].name:  # nobody needs the gradient of the model's input
        inputs = layer.params[0][1][1]
        total = collective("all_reduce", layer.name, layer.item * inputs)
        return [dense(job, layer, style), total, piece(layer, "input", output=(inputs,))]
    return [dense(job, layer, style) if style else layer]
