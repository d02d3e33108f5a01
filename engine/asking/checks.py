"""A spec with its defaults filled in and a model's layers -> the rules that join settings, each checked.

What a mode leaves open, and only the layers or the devices decide (degrees, split, microbatches), is filled in here.
"""

from __future__ import annotations

import math

from engine import schedules
from engine.asking.faults import FAULTS, WITH_PEERS, Fault
from engine.asking.pipeline_checks import check_pipeline, name_of, without_pipeline
from engine.asking.rules import SpecError, nearest
from engine.asking.settings import (
    CONTEXT_SETTINGS,
    DATA_MODES,
    MAX_RING,
    MODE_MODELS,
    MODE_SETTINGS,
    MODEL_AXES,
    MODEL_REASONS,
    ONE_BUCKET_MB,
    ONE_PROCESS_MODES,
    PLANNED_ONLY,
    STAGE_MODES,
    TENSOR_MODES,
    TOKEN_MODELS,
    degrees,
    replicas,
)
from engine.model.presets import family
from engine.model.shapes import Layer, num_params
from engine.modes.context.deal import num_chunks
from engine.plan import AXES
from engine.spec import MAX_DEVICES, Spec

COUNTABLE = 2**63  # FLOPs or bytes
STANDING = 18  # bytes of a parameter at most: itself, its gradient, and an optimizer's state with a copy of it, in fp32


def check_mode(spec: Spec, layers: tuple[Layer, ...]) -> Spec:
    if spec.mode == "single" and spec.devices != 1:
        raise SpecError(
            "devices_of_mode", "devices", spec.devices, suggest=[1], mode="single", wanted="exactly 1 device"
        )
    models = MODE_MODELS.get(spec.mode, (spec.model,))
    if spec.model not in models:
        raise SpecError("model_of_mode", "model", spec.model, suggest=models, mode=spec.mode)
    for (model, setting, value), reason in MODEL_REASONS.items():
        if spec.model == model and getattr(spec, setting) == value:
            raise SpecError("option_of_model", setting, value, model=model, reason=reason)
    if spec.recompute == "selective" and not any(layer.products for layer in layers):
        raise SpecError("nothing_to_recompute", "recompute", "selective", suggest=["none", "full"], model=spec.model)
    if spec.keep_qkv and (cut := next((axis for axis in ("tp", "cp", "ep") if degrees(spec).get(axis, 1) > 1), None)):
        other = cut if cut in MODE_SETTINGS[spec.mode] else f"mode {spec.mode}"
        raise SpecError("exclusive", "keep_qkv", spec.keep_qkv, other=other)
    if spec.mode in TENSOR_MODES or degrees(spec).get("tp", 1) > 1:
        _check_shards(spec, layers)
    if spec.mode == "context":
        return check_context(spec)
    if spec.mode == "hybrid":
        spec = _check_context_axis(_check_sequences(_check_expert_axis(spec)))
    if spec.mode == "expert" and spec.experts % spec.devices:
        raise _experts_left(spec)
    if spec.mode == "hsdp":
        return _check_degrees(spec)
    if spec.mode == "hybrid" and spec.pp == 1:
        return without_pipeline(spec)
    if spec.mode == "hybrid":
        if spec.schedule_file is None:
            spec = spec.with_(schedule=spec.schedule or MODE_SETTINGS["pipeline"]["schedule"])
        if spec.schedule == "dualpipe":  # its two copies of the model are replicas already
            good = [name for name in schedules.TABLE if name not in PLANNED_ONLY]
            raise SpecError("schedule_of_mode", "schedule", spec.schedule, suggest=good, mode=spec.mode)
    elif spec.mode not in STAGE_MODES:
        return spec
    return check_pipeline(spec, layers)


def _check_context_axis(spec: Spec) -> Spec:
    """Sequences are dealt out to ranks that otherwise are replicas of one model."""
    if spec.cp == 1:
        for name in CONTEXT_SETTINGS:
            if getattr(spec, name) is not None:
                raise SpecError("needs_axis", name, getattr(spec, name), axis="cp")
        return spec
    if spec.model not in TOKEN_MODELS:
        raise SpecError("model_of_mode", "model", spec.model, suggest=MODE_MODELS["context"], mode="context")
    return check_context(spec.with_(attention=spec.attention or MODE_SETTINGS["context"]["attention"]), "cp")


def _check_sequences(spec: Spec) -> Spec:
    """Tokens are shared out among tensor ranks, between the matrices that these share."""
    if spec.tp == 1 or spec.model not in MODE_MODELS["sequence"]:
        if spec.sequence_parallel is not None and spec.tp == 1:
            raise SpecError("needs_axis", "sequence_parallel", spec.sequence_parallel, axis="tp")
        if spec.sequence_parallel:
            raise SpecError("model_of_mode", "model", spec.model, suggest=MODE_MODELS["sequence"], mode="sequence")
        return spec
    return spec.with_(sequence_parallel=bool(spec.sequence_parallel))


def _check_expert_axis(spec: Spec) -> Spec:
    """Experts are shared out among ranks that have the same of all the rest, or a part of it."""
    if family(spec.model) != "moe":
        if spec.ep > 1:
            raise SpecError("model_of_mode", "model", spec.model, suggest=MODE_MODELS["expert"][:1], mode="expert")
        if spec.expert_tp is not None:
            raise SpecError("does_not_apply", "expert_tp", spec.expert_tp, to=f"the model {spec.model}")
        return spec
    works = MODEL_AXES[spec.model]
    for other in (axis for axis in AXES if axis not in works):
        if getattr(spec, other) > 1:
            names = {"model": spec.model, "works": ", ".join(works)}
            raise SpecError("axis_of_model", other, getattr(spec, other), suggest=[1], **names)
    if spec.experts % spec.ep:
        good = nearest([d for d in range(1, spec.experts + 1) if spec.experts % d == 0], spec.ep, 8)
        sizes = f"experts {spec.experts}"
        raise SpecError("devices_divide", "ep", spec.ep, suggest=good, model=spec.model, sizes=sizes)
    if spec.tp == 1:
        if spec.expert_tp is not None:
            raise SpecError("needs_axis", "expert_tp", spec.expert_tp, axis="tp")
        return spec
    if spec.expert_tp not in (None, 1, spec.tp):
        raise SpecError("expert_tp_of_tp", "expert_tp", spec.expert_tp, suggest=[1, spec.tp], tp=spec.tp)
    if spec.expert_tp == 1 and spec.experts % (spec.ep * spec.tp):
        each = spec.experts // spec.tp  # of a tensor rank, to be dealt out over ep
        wrong, good = "ep", nearest([d for d in range(1, each + 1) if each % d == 0], spec.ep)
        if spec.experts % spec.tp:
            wrong, good = "expert_tp", [spec.tp]
        names = {"ranks": spec.ep * spec.tp, "experts": spec.experts}
        raise SpecError("whole_experts", wrong, getattr(spec, wrong), suggest=good, **names)
    return spec.with_(expert_tp=spec.expert_tp or spec.tp)


def _check_shards(spec: Spec, layers: tuple[Layer, ...]) -> None:
    """What is cut must be cut into equal parts: attention by heads, of keys too, the vocabulary by tokens, other layers
    by the features between a pair, as an MLP's are where their number is given."""
    if spec.model in TOKEN_MODELS:
        context = spec.context // degrees(spec).get("cp", 1)  # of a rank that deals it out among others
        sizes = {"heads": spec.heads, "context": context, "vocabulary": layers[-1].output[-1]}
        sizes |= {name: size for name in ("kv_heads", "ffn", "dense_ffn") if (size := getattr(spec, name)) is not None}
    else:
        sizes = {"features": next(layer.output[-1] for layer in layers if len(layer.output) == 1)}
    if spec.mode != "sequence" and not spec.sequence_parallel and spec.expert_tp != 1:
        sizes.pop("context", None)
    if spec.expert_tp == 1 and not (spec.shared_experts or spec.dense_layers):
        sizes.pop("ffn", None)
    shared, ranks = math.gcd(*sizes.values()), degrees(spec)["tp"]
    if shared % ranks:
        good = nearest([d for d in range(1, shared + 1) if shared % d == 0], ranks, 8)
        what = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise SpecError("devices_divide", name_of("tp", spec), ranks, suggest=good, model=spec.model, sizes=what)


def check_context(spec: Spec, setting: str = "devices") -> Spec:
    """Whether each rank gets as many tokens as any other. `setting`: the one that says over how many they are dealt.

    Ulysses attends to the whole context on every rank, in its order: there is nothing to balance, and two chunks a rank
    would have to be sorted first.
    """
    degree = degrees(spec).get("cp", 1)
    if spec.attention == "ulysses":
        if spec.balance == "head_tail":
            raise SpecError("does_not_apply", "balance", spec.balance, suggest=["none"], to="the attention ulysses")
        heads = spec.heads // degrees(spec).get("tp", 1)  # that a tensor rank has
        shared = math.gcd(heads, spec.context)
        if shared % degree:
            good = nearest([d for d in range(1, shared + 1) if shared % d == 0], degree, 8)
            sizes = {"heads": heads, "context": spec.context}
            raise SpecError("heads_of_ulysses", setting, degree, suggest=good, **sizes)
        return spec.with_(balance="none")
    spec = spec.with_(balance=spec.balance or "head_tail")
    chunks, most = num_chunks(1, spec.balance), MAX_RING if spec.attention == "ring" else MAX_DEVICES
    good = [d for d in range(1, min(spec.context, most) + 1) if d == 1 or spec.context % (chunks * d) == 0]
    if degree > most:
        raise SpecError("ring_too_long", setting, degree, suggest=nearest(good, degree), high=most)
    if degree not in good:
        sizes = {"chunks": chunks, "context": spec.context}
        raise SpecError("context_divides", setting, degree, suggest=nearest(good, degree, 8), **sizes)
    return spec


def _experts_left(spec: Spec) -> SpecError:
    """Suggests numbers of devices that can also share the batch."""
    shared = math.gcd(spec.experts, spec.global_batch)
    good = nearest([d for d in range(1, shared + 1) if shared % d == 0], spec.devices, 8)
    sizes = f"experts {spec.experts}"
    return SpecError("devices_divide", "devices", spec.devices, suggest=good, model=spec.model, sizes=sizes)


def _check_degrees(spec: Spec) -> Spec:
    """Replicas times shards are the devices. Where neither is given, two replicas if they can be cut further."""
    devices = spec.devices
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for name in ("fsdp", "dp"):
        degree = getattr(spec, name)
        if degree is not None and devices % degree:
            raise SpecError("degree_divides", name, degree, suggest=nearest(divisors, degree), devices=devices)
    if spec.dp is None and spec.fsdp is None:
        spec = spec.with_(dp=2 if devices % 2 == 0 and devices > 2 else 1)
    if spec.fsdp is None:
        return spec.with_(fsdp=devices // spec.dp)
    if spec.dp is None:
        return spec.with_(dp=devices // spec.fsdp)
    if spec.dp * spec.fsdp != devices:
        good, given = [devices // spec.fsdp], {"other": "fsdp", "degree": spec.fsdp, "devices": devices}
        raise SpecError("degrees_of_devices", "dp", spec.dp, suggest=good, **given)
    return spec


def check_size(spec: Spec, layers: tuple[Layer, ...]) -> None:
    """FLOPs and bytes are counted in 64 bits: those of a pass through a layer or a stage, which is three times as much
    backward at most, and all that a device might hold. They grow at least as fast as batch, context and layers do."""
    parts, each = replicas(spec) * (spec.accumulate or 1), spec.microbatches or 1
    samples = spec.global_batch // parts
    flops = 3 * (sum if spec.mode in STAGE_MODES or spec.microbatches else max)(layer.flops for layer in layers)
    kept = sum(layer.saved + layer.beside for layer in layers)
    standing = STANDING * num_params(layers)
    one, most = max(flops, kept), max(flops * (samples // each), kept * samples)
    if max(standing, most) < COUNTABLE:
        return
    if max(standing, one) < COUNTABLE:
        setting, step = "global_batch", parts * each
    elif standing < one and spec.model in TOKEN_MODELS:
        setting, step = "context", 1
    else:
        setting, step, most = "layers", 1, max(standing, most)
    value = getattr(spec, setting)
    good = value * COUNTABLE // (most + 1) // step * step
    good = 1 << good.bit_length() - 1 if setting == "context" and good else good
    raise SpecError("not_countable", setting, value, suggest=[good] if good > 1 else [], number=f"{most:.2g}")


def check_fault(spec: Spec, fault: Fault, steps: int) -> None:
    """It must be on a process and in a step that there will be: else nothing would break, and nobody be told."""
    processes = 1 if spec.mode in ONE_PROCESS_MODES else spec.devices
    if fault.rank >= processes or fault.step >= steps:
        at, there = f"@{fault.rank}:{fault.step}", f"@{min(fault.rank, processes - 1)}:{min(fault.step, steps - 1)}"
        kinds = ", ".join(FAULTS)
        raise SpecError("bad_fault", "fault", spec.fault, suggest=[spec.fault.replace(at, there)], kinds=kinds)
    if fault.kind in WITH_PEERS and processes == 1:
        good = [f"{kind}@{fault.rank}:{fault.step}" for kind in ("raise", "exit", "kill")]
        raise SpecError("fault_with_peers", "fault", spec.fault, suggest=good)
    if fault.kind == "mean" and (spec.masked is None or replicas(spec) * degrees(spec).get("cp", 1) == 1):
        raise SpecError("fault_of_targets", "fault", spec.fault)


def check_compression(spec: Spec) -> Spec:
    """Rules of gradient compression; before defaults are filled in, since what is one bucket depends on it."""
    if spec.compress_rank is not None and spec.compress != "powersgd":
        raise SpecError("does_not_apply", "compress_rank", spec.compress_rank, to=f"compress {spec.compress or 'none'}")
    if spec.compress in (None, "none"):
        return spec
    if spec.precision == "bf16":
        raise SpecError("compress_of_bf16", "compress", spec.compress, suggest=["none"])
    if spec.compress == "powersgd" and spec.bucket_mb not in (None, ONE_BUCKET_MB):
        raise SpecError("one_bucket", "bucket_mb", spec.bucket_mb)
    if spec.compress == "powersgd" and spec.sync_every_microstep:
        raise SpecError("exclusive", "sync_every_microstep", True, other="compress powersgd")
    if spec.compress == "powersgd" and spec.find_unused:
        raise SpecError("unused_of_powersgd", "find_unused", True, suggest=["false"])
    return spec


def check_batch(spec: Spec, num_train: int) -> None:
    """Rules about the batch as a whole; how a rank's part of it is cut into micro-steps comes last."""
    parts = spec.devices if spec.mode in DATA_MODES else replicas(spec)
    if spec.global_batch > num_train:
        step = parts * (spec.microbatches or 1) if spec.mode == "hybrid" else math.lcm(parts, spec.microbatches or 1)
        good = [num_train // step * step] if num_train >= step else []
        raise SpecError(
            "batch_too_large", "global_batch", spec.global_batch, suggest=good, samples=num_train, dataset=spec.dataset
        )
    if spec.global_batch % parts:
        below = spec.global_batch // parts * parts
        good = [b for b in (below, below + parts) if 0 < b <= num_train]
        if spec.mode == "hybrid":
            raise SpecError("batch_by_replicas", "global_batch", spec.global_batch, suggest=good, replicas=parts)
        raise SpecError("batch_by_devices", "global_batch", spec.global_batch, suggest=good, devices=parts)
    local = spec.global_batch // parts
    if local % (spec.accumulate or 1):
        good = nearest([d for d in range(1, local + 1) if local % d == 0], spec.accumulate)
        raise SpecError("batch_by_microsteps", "accumulate", spec.accumulate, suggest=good, batch=local)
