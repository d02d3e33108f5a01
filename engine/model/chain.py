"""Layers and a number of samples -> the compute ops of one pass through them, layer by layer or as one stage.

Shared by the plans of all modes, so that the same layer costs the same wherever it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.asking.frozen import trained
from engine.asking.settings import degree
from engine.cost import kernels
from engine.graph.columns import unroll
from engine.job import Job
from engine.model.shapes import FP32, Layer
from engine.plan import Op
from engine.spec import Spec

# Copies of the parameters that an optimizer keeps: SGD its momentum, AdamW two moments (Kingma & Ba 2015).
OPTIMIZER_COPIES = {"sgd": 1, "adamw": 2}
# And AdamW a count of its steps, for each parameter tensor, even one of which this device holds no row.
STEP_COUNTER = {"sgd": 0, "adamw": FP32}
# What it does with each parameter: decay, momentum and step; AdamW's two averages, root, quotient and step.
OPTIMIZER_FLOPS = {"sgd": 4, "adamw": 12}


ENDS = ("embed", "head")  # what is before all blocks, and behind them


def kept(layer: Layer, spec: Spec | None, *, sent: bool = False) -> int:
    """Bytes that a layer keeps of one sample from its forward to its backward pass, as far as it is computed again.
    `sent`: its output goes to another device, and is kept here for its gradient."""
    if layer.stops:
        return layer.output_bytes if sent else layer.saved
    if not _is_wrapped(layer, spec):
        return layer.saved + (layer.output_bytes - layer.left if sent else -layer.copied)
    if spec.recompute == "full":
        return layer.left + (layer.qkv if spec.keep_qkv else 0)
    return layer.products - (0 if sent else layer.products_copied) if layer.products else layer.saved


def is_recomputed(layer: Layer, spec: Spec | None) -> bool:
    """Whether a layer is computed again before it goes back: only one that keeps less for it."""
    return not layer.stops and _is_wrapped(layer, spec) and kept(layer, spec) < layer.saved


def _is_wrapped(layer: Layer, spec: Spec | None) -> bool:
    """Whether a checkpoint is around it. Ours is around every layer. Published trainings have one around each block: a
    head's product is taken once forward and twice backward (Narayanan et al. 2021, arXiv:2104.04473, equation 3)."""
    if spec is None or spec.recompute in (None, "none"):
        return False
    return not (spec.master_weights and spec.paced is None and layer.name in ENDS)


def forward(
    layers: Sequence[Layer],
    samples: int,
    *,
    stage: int = 0,
    microbatch: int = 0,
    spec: Spec | None = None,
    sent: bool = False,
) -> list[Op]:
    """`sent`: the last output goes to another device."""
    return [
        Op(
            kind="forward",
            stage=stage,
            microbatch=microbatch,
            part=layer.name,
            flops=layer.flops * samples,
            bytes=layer.param_bytes + samples * (layer.saved + layer.output_bytes),
            saved=kept(layer, spec, sent=sent and layer is layers[-1]) * samples,
            kernels=kernels.forward(layer.kernels, samples),
        )
        for layer in layers
    ]


def backward(
    layers: Sequence[Layer],
    samples: int,
    *,
    stage: int = 0,
    microbatch: int = 0,
    spec: Spec | None = None,
    sent: bool = False,
    stays: bool = False,
) -> list[Op]:
    """From the last layer to the first: what was not kept is computed again; then twice the FLOPs of forward, which
    reads what was saved, and writes the parameters' gradients; of a frozen layer half of it. `sent`: the last output
    went to another device. `stays`: all outputs are there until a later half of the backward."""
    where = {"stage": stage, "microbatch": microbatch}
    ops = []
    for layer in (layer for layer in reversed(layers) if not layer.stops):
        if is_recomputed(layer, spec):
            still = stays or (sent and layer is layers[-1])
            there = kept(layer, spec, sent=still) + gone(layer, spec) - (layer.left if still else 0)
            again = recompute(layer, samples, spec, **where)
            ops.append(dataclasses.replace(again, saved=max(0, layer.saved - there) * samples))
        traffic = 2 * layer.param_bytes + 2 * samples * (layer.saved + layer.output_bytes)
        work = {"flops": 2 * layer.flops * samples, "kernels": kernels.backward(layer.kernels, samples)}
        work["scratch"] = layer.beside * samples + layer.beside_once
        op = Op(kind="backward", part=layer.name, bytes=traffic, **work, **where)
        if layer.frozen:  # attention has no weights: all of its backward is for the input
            flops = (layer.flops + int(kernels.attention_flops(layer.kernels))) * samples
            op = dataclasses.replace(halves(op)[0], kind=op.kind, flops=flops)
        ops.append(op)
    return ops


def backward_by_layer(layers: Sequence[Layer], samples: int, *, spec: Spec) -> list[list[Op]]:
    """The same, one list a layer, from the last to the first."""
    return [backward([layer], samples, spec=spec) for layer in reversed(layers) if not layer.stops]


def gone(layer: Layer, spec: Spec) -> int:
    """Bytes of a sample that a layer has kept and that are no more when it is computed again: the next one, whose input
    they were, has gone back. (One on another device has not: what was sent there stays for its gradient.) Selectively
    the result of a last product, not taken again, is there in their place."""
    return 0 if spec.recompute == "selective" and layer.last_flops else layer.left


def recompute(layer: Layer, samples: int, spec: Spec, **where: int) -> Op:
    """The layer's forward once more, up to the last thing that backward needs; of products selectively none, or every
    other one."""
    last = 0 if spec.early_stop is False else layer.last_flops
    traffic = layer.param_bytes + samples * (layer.saved + layer.output_bytes)
    if spec.recompute == "selective" and spec.every_other:
        work = kernels.every_other(layer.kernels, samples)
        flops = int(sum(kernel.flops for kernel in work))
    else:
        spares = spec.recompute == "full" and spec.keep_qkv
        made, less = kernels.without_qkv(layer.kernels) if spares else (layer.kernels, ())
        work = kernels.recomputed(made, samples, selective=spec.recompute == "selective", whole=not last)
        flops = layer.flops - last - int(sum(kernel.flops for kernel in less))
        flops = 0 if spec.recompute == "selective" else flops * samples
    return Op(kind="recompute", part=layer.name, flops=flops, bytes=traffic, kernels=work, **where)


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer as a rank computes it: with the parameters that it then has, and the ops of its passes."""

    layer: Layer
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    inner: bool = False  # of a layer whose other half is the unit before: experts, which ranks share otherwise
    sums: tuple[Op, ...] = ()  # which complete its gradients on this rank, before anything else is done with them


def units(
    layers: Sequence[Layer],
    samples: int,
    *,
    stage: int = 0,
    spec: Spec | None = None,
    sent: bool = False,
    stays: bool = False,
) -> list[Unit]:
    """Layers that a rank computes whole."""
    known, out = {"stage": stage, "spec": spec}, []
    for layer in layers:
        known["sent"] = sent and layer is layers[-1]
        ways = (forward([layer], samples, **known), backward([layer], samples, **known, stays=stays))
        out.append(Unit(layer, *map(tuple, ways)))
    return out


def whole_stage(ops: Sequence[Op]) -> Op:
    """The ops of one pass through a stage's layers, as one op."""
    return Op(
        kind=ops[0].kind,
        stage=ops[0].stage,
        microbatch=ops[0].microbatch,
        flops=sum(op.flops for op in ops),
        bytes=sum(op.bytes for op in ops),
        saved=sum(op.saved for op in ops),
        remains=sum(op.remains for op in ops),
        scratch=max(op.scratch for op in ops),
        kernels=tuple(kernel for op in ops for kernel in op.kernels),
    )


def halves(op: Op, *, first: bool = False) -> tuple[Op, Op]:
    """A backward as two ops: for the gradient of the input, and for those of the weights; of a first stage, which has
    no use for the former, the second does all. Where kernels are not known they share the work."""
    inputs, traffic = (0, 0) if first else (op.flops // 2, op.bytes // 2)
    there, back = ((), op.kernels) if first else kernels.halves(op.kernels)
    rest = {"flops": op.flops - inputs, "bytes": op.bytes - traffic, "kernels": back}
    return (
        dataclasses.replace(op, kind="backward_input", flops=inputs, bytes=traffic, kernels=there),
        dataclasses.replace(op, kind="backward_weight", **rest),
    )


def load(sample_bytes: int, samples: int, *, kept: int | None = None) -> Op:
    """`kept`: bytes of a sample that this device needs, where it is not all."""
    saved = (sample_bytes if kept is None else kept) * samples
    return Op(kind="load", payload="batch", bytes=sample_bytes * samples, saved=saved)


def load_ends(job: Job, samples: int, *, is_first: bool, is_last: bool) -> Op:
    """The batch on a device with the model's first layers, which need inputs, or its last, which need targets."""
    kept = is_first * (job.sample_bytes - job.target_bytes) + is_last * job.target_bytes
    return load(job.sample_bytes, samples, kept=kept)


def microsteps(job: Job, passes: Callable[[int, bool], Sequence[Op]]) -> Sequence[Op]:
    """The loads and `passes(k, whether gradients are reduced after it)` of every micro-step k, which all its ops carry:
    in columns, where micro-steps are made of the same ops.

    Where there is just one, its index says nothing, and a load and a collective carry none.
    """
    count, begin = job.microsteps, load(job.sample_bytes, job.micro_batch)
    if count == 1:
        return [begin, *passes(0, True)]
    made: dict[tuple[int, ...], str] = {}  # which ops they are -> a name
    steps, order = {}, []
    for k in range(count):
        ops = [begin, *passes(k, bool(job.spec.sync_every_microstep) or k == count - 1)]
        name = made.setdefault(tuple(map(id, ops)), str(k))
        steps.setdefault(name, ops)  # and kept, so that no other has its place
        order.append((name, k))
    return unroll(steps, order)


def optimizer(layers: Sequence[Layer], spec: Spec) -> Op:
    """Reads parameters and gradients, writes parameters; and reads and writes each copy that the optimizer keeps."""
    layers = trained(layers)
    size = sum(layer.param_bytes for layer in layers)
    numbers = sum(layer.num_params for layer in layers)
    copies = OPTIMIZER_COPIES[spec.optimizer]
    traffic = size * (3 + 2 * copies)
    if spec.master_weights:  # the fp32 ones are read and written, and copied to those that compute
        traffic = _shared_out(layers, spec) * FP32 * (3 + 2 * copies) + size
    return Op(kind="optimizer", bytes=traffic, flops=numbers * OPTIMIZER_FLOPS[spec.optimizer])


def clip(layers: Sequence[Layer], spec: Spec, axes: Sequence[tuple[str, int]] = ()) -> list[Op]:
    """If gradients are clipped: their norms on this device, their sums over the axes along which they are cut, with so
    many numbers each, and the scaling. An axis of one device needs no sum, and is not to be given."""
    if spec.clip is None:
        return []
    layers = trained(layers)
    size = sum(layer.param_bytes for layer in layers)
    total = Op(kind="all_reduce", part="norm", payload="control")
    sums = [dataclasses.replace(total, axis=axis, bytes=FP32 * count) for axis, count in axes]
    numbers = sum(layer.num_params for layer in layers)
    norm = Op(kind="optimizer", part="norm", bytes=size, flops=2 * numbers)
    return [norm, *sums, Op(kind="optimizer", part="clip", bytes=2 * size, flops=numbers)]


def standing_memory(layers: Sequence[Layer], spec: Spec) -> dict[str, int]:
    """Bytes by category that a device keeps for the layers it holds, the whole step long.

    With weights of two bytes beside others in fp32, gradients add up in fp32, and state is the fp32 weights and the
    moments: 2 + 4 + 12 bytes of a parameter (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1, where gradients
    have 2), of which replicas may share the last (ZeRO-1). Each product that is a weight's gradient is made in a
    tensor of two bytes, one for each matrix of a block, which Transformer Engine keeps (get_dummy_wgrad).
    """
    size, layers = sum(layer.param_bytes for layer in layers), trained(layers)
    if spec.master_weights:
        numbers = FP32 * sum(layer.num_params for layer in layers)
        state = FP32 * (1 + OPTIMIZER_COPIES[spec.optimizer]) * _shared_out(layers, spec)
        held = {"parameters": size, "gradients": numbers, "optimizer": state}
        return held | {"weight gradients": made_in(layers)}
    counters = STEP_COUNTER[spec.optimizer] * sum(len(layer.params) for layer in layers)
    learned = sum(layer.param_bytes for layer in layers)
    copies = learned * OPTIMIZER_COPIES[spec.optimizer]
    return {"parameters": size, "gradients": learned, "optimizer": copies + counters}


def _shared_out(layers: Sequence[Layer], spec: Spec) -> int:
    """Parameters of which a rank has the optimizer's state. Replicas share it, and those that have tokens of the same
    sequences; and of all but experts those, too, that share these out."""
    numbers = sum(layer.num_params for layer in layers)
    if not spec.share_optimizer:
        return numbers
    replicas = degree(spec, "dp") * degree(spec, "cp")
    experts = sum(layer.num_expert_params for layer in layers)
    return math.ceil(experts / replicas) + math.ceil((numbers - experts) / (replicas * degree(spec, "ep")))


def made_in(layers: Sequence[Layer]) -> int:
    """Bytes of one tensor of each matrix that blocks have; experts share theirs."""
    matrices = {
        (name.split(".", 2)[-1] if name.startswith("experts.") else name, shape, layer.item)
        for layer in layers
        if layer.name.startswith("block")
        for name, shape in layer.params
        if len(shape) == 2
    }
    return sum(item * math.prod(shape) for _, shape, item in matrices)
