"""A job under tensor parallelism -> its plan: every layer cut where its ranks have to sum what they computed.

What DTensor does: the output of a layer cut by rows is a part of a sum on each rank, and is all-reduced; so is, on the
way back, the gradient of the input of a layer cut by columns, where anybody needs it. Each is waited for at once.
"""

import dataclasses
import math
from collections.abc import Sequence

from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer, num_experts
from engine.modes.expert.pieces import mixture
from engine.modes.tensor.cuts import Cut, Way, collective, names_in, units
from engine.modes.tensor.pieces import (
    attention_of,
    decoder,
    dense,
    logits_of,
    loss,
    mlp_of,
    second_half,
    with_loss,
)
from engine.modes.tensor.shards import gradient_bytes, held, partial, piece, style_of, styles
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    return assemble(job, forward, backward, sequences=False)


def parts(job: Job, kind: str, name: str) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind."""
    return names_of(job, forward, backward, kind, name)


def names_of(job: Job, forward: Way, backward: Way, kind: str, name: str) -> tuple[str, ...]:
    if job.degree("tp") == 1:
        return (name,)
    (layer,) = [layer for layer in held(job) if layer.name == name]
    return names_in(job, layer, (forward, backward), kind)


def gradient_sums(layer: Layer, *, sequences: bool) -> tuple[Op, ...]:
    """What completes a layer's gradients after its backward pass, in the order of its parameters."""
    known = {"kind": "all_reduce", "payload": "gradient", "axis": "tp"}
    sizes = {f"{layer.name}.{name}": shape for name, shape in partial(layer, sequences=sequences).items()}
    return tuple(Op(part=name, bytes=layer.item * math.prod(shape), **known) for name, shape in sizes.items())


def assemble(job: Job, forward: Way, backward: Way, *, sequences: bool) -> Plan:
    """One program for all ranks: they do the same, each with its own shards. One rank has nothing to sum: there no
    layer is cut."""
    layers, ranks = held(job), job.degree("tp")
    after = [op for layer in layers for op in gradient_sums(layer, sequences=sequences)]
    cut = units(job, layers, job.micro_batch, forward, backward)
    passes = [op for unit in cut for op in unit.forward] + [op for unit in reversed(cut) for op in unit.backward]
    steps = chain.microsteps(job, lambda k, synced: passes)
    cut = styles(job)
    laid_out = len(after) + sum(
        f"{layer.name}.{n}".rpartition(".")[0] in cut for layer in layers for n, _ in layer.params
    )
    clip = chain.clip(layers, job.spec, [("tp", laid_out)] if ranks > 1 else [])
    ops = joined(steps, after if ranks > 1 else [], clip, [chain.optimizer(layers, job.spec)])
    shares = tuple(mine.param_bytes / layer.param_bytes for mine, layer in zip(layers, job.layers, strict=True))
    memory = chain.standing_memory(layers, job.spec)
    if not job.spec.master_weights:
        memory["gradients"] = sum(gradient_bytes(job, layer) for layer in layers)
    program = Program(ops, tuple(range(len(layers))), memory, shares=shares if job.degree("tp") > 1 else ())
    return Plan(Mesh(("tp",), (ranks,)), (program,), (0,) * ranks, tuple(layer.name for layer in layers))


def output_of(job: Job, layer: Layer, forward: Way) -> Layer:
    """The last piece of a layer in forward: its output is what a rank passes on."""
    if job.degree("tp") == 1:
        return layer
    if layer.name == "head":
        return logits_of(job, layer, 0)
    return dataclasses.replace(forward(job, layer)[-1], behind=layer.behind)


def inside_of(job: Job, layer: Layer) -> Layer:
    """What is between a block's second norm and the sum over ranks: its MLP, or all of its experts."""
    return mixture(job, layer) if num_experts(layer) else mlp_of(job, layer)


def forward(job: Job, layer: Layer, inside: Sequence[Layer] = ()) -> Cut:
    """`inside`: the pieces of what is inside of a block's second half, where it is cut there."""
    style, whole = style_of(job, layer.name), layer.output
    if layer.name == "embed":
        return [
            piece(layer, "tokens", "token", output=whole, kernels=layer.kernels),
            collective("all_reduce", "embed.tokens", layer.output_bytes),
            piece(layer, "sum", "position", output=whole, saved=layer.saved, copied=layer.copied),
        ]
    if layer.name == "head":
        return loss(job, layer, decoder(job).norm_saved())
    if layer.name.startswith("block"):
        attention, second = attention_of(job, layer), second_half(job, layer, inside or [inside_of(job, layer)])
        total = collective("all_reduce", attention.name, layer.output_bytes)
        after = piece(layer, "sum", output=whole, kernels=decoder(job).sum_kernels())
        return [attention, total, *_meeting(job, layer, second, back=False), after]
    if style == "row":
        total = collective("all_reduce", layer.name, layer.output_bytes)
        return [dense(job, layer, style), total, piece(layer, "output", output=whole)]
    return [dense(job, layer, style) if style else layer]


def _meeting(job: Job, layer: Layer, pieces: Sequence[Layer], *, back: bool) -> Cut:
    """The second half of a block, in the order of its way, where ranks sum what they have parts of. Of whole experts
    each has the tokens that it has sent there, which are gathered."""
    apart = ("router" if back else "combine") if job.whole_experts else ""
    cut: Cut = []
    for part in reversed(pieces) if back else pieces:
        cut.append(part)
        if apart and part.name == f"{layer.name}.{apart}":
            cut.append(collective("all_gather", part.name, layer.output_bytes // job.degree("tp")))
        elif part is pieces[0 if back else -1] or part.name.endswith(".shared"):
            cut.append(collective("all_reduce", part.name, layer.output_bytes))
    return cut


def backward(job: Job, layer: Layer, inside: Sequence[Layer] = ()) -> Cut:
    style = style_of(job, layer.name)
    if layer.name == "embed":
        return [piece(layer, "sum", "token", "position", output=layer.output)]
    if layer.name == "head":
        logits, total = logits_of(job, layer, 0), collective("all_reduce", "head.logits", job.layers[-2].output_bytes)
        before = piece(layer, "norm", "norm", output=job.layers[-2].output, kernels=decoder(job).norm_kernels())
        return [with_loss(job, logits), total, before]
    if layer.name.startswith("block"):
        inside, sizes, ranks = inside or [inside_of(job, layer)], decoder(job), job.degree("tp")
        # A norm, and the sum before it, go back where their gradients have been summed: in the piece after.
        outside = (*sizes.norm_kernels(), *sizes.sum_kernels())
        both = zip(second_half(job, layer, inside), inside, strict=True)
        second = [dataclasses.replace(part, kernels=own.kernels) for part, own in both]
        attention = dataclasses.replace(attention_of(job, layer), kernels=(*sizes.attention_kernels(ranks), *outside))
        total = collective("all_reduce", attention.name, layer.output_bytes)
        after = piece(layer, "norm1", output=layer.output, kernels=outside)
        return [*_meeting(job, layer, second, back=True), attention, total, after]
    if style == "column" and layer.name != job.layers[0].name:  # nobody needs the gradient of the model's input
        inputs = layer.params[0][1][1]
        total = collective("all_reduce", layer.name, layer.item * inputs)
        return [dense(job, layer, style), total, piece(layer, "input", output=(inputs,))]
    return [dense(job, layer, style) if style else layer]
