"""A row as published -> one training in numbers (a Case), or why it cannot be one (Unusable).

Nothing is guessed in silence: what a row does not say and is taken for granted all the same is listed in `inferred`;
where it would decide the result, the row is not used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.model.presets import PRESETS
from engine.validate import words
from engine.validate.named import name_of, preset_of
from engine.validate.recipes import modules_ahead
from engine.validate.rows import MEASURED, Row, Unusable
from engine.validate.sources import as_its_source
from engine.validate.stacks import stack_of

SHAPE = ("layers", "hidden", "heads", "seq_len")
MAX_UNKNOWN_BUBBLE = 0.05  # of the step: where the number of stages of a rank is not said, and could matter no more
PER_NODE = 8
MOST = 10**9  # of anything that is counted here


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training, in numbers. Degrees multiply to `devices`; batches are in sequences."""

    row: Row
    preset: str | None = None  # the published model that it is, with sizes that have no field here
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    vocabulary: int
    gated: bool  # three matrices in the feed-forward part, as in SwiGLU, not two
    tied: bool
    experts: int = 0
    top_k: int = 0
    dense_layers: int = 0  # of those with experts, the first that have none
    mtp: int = 0  # modules that predict further tokens
    devices: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    stages_per_rank: int
    sequence_parallel: bool
    async_tp: bool  # tokens travel in parts while products work on others, as a row says
    zero: int
    shards: int  # of the replicas, those that share one copy of what `zero` shares
    micro_batch: int
    microbatches: int  # of one replica in a step
    schedule: str | None
    recompute: str
    precision: str
    device: str
    memory_size: float | None
    memory_rate: float | None
    power: float | None  # watts
    per_node: int
    link_rate: float | None
    island: int | None  # devices of a node that are joined each to each, where a node has several such groups
    network_rate: float | None
    inferred: tuple[str, ...] = field(default=())

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batch * self.microbatches

    @property
    def dense(self) -> bool:
        return not self.experts


OF_DEVICE = "device"  # memory as nvidia-smi has it, of everything


class Predicted(NamedTuple):
    seconds: float  # of a step
    memory: float  # bytes of the fullest rank that PyTorch has allocated
    room: float = 0.0  # bytes of a device that it can have
    beside: float = 0.0  # bytes of a device that CUDA and NCCL hold
    inferred: tuple[str, ...] = ()

    def held(self, kind: str | None) -> float:
        """Bytes as they are measured by this kind: of the whole device with what CUDA and NCCL hold."""
        return self.memory + (self.beside if kind == OF_DEVICE else 0.0)


def case_of(row: Row) -> Case:
    if row.kind != MEASURED:
        raise Unusable("not a measurement but worked out or read off a figure", row.kind)
    row, corrected = as_its_source(row)
    if preset_of(row.model) is None and not any(row.model.get(name) is not None for name in SHAPE[:3]):
        raise Unusable("the row gives no shape of its model", name_of(row.model))
    _strict(row)
    inferred = [*corrected]
    shape = _model(row, inferred)
    layout = _layout(row, inferred)
    if preset := shape.get("preset"):
        shape["mtp"] = _ahead(row, preset, layout["tp"], inferred)
    batch = _batch(row, layout["dp"], inferred)
    layout |= _schedule(row, layout["pp"], batch["microbatches"], inferred)
    texts = _texts(row, layout, inferred)
    return Case(row=row, **shape, **layout, **batch, **texts, inferred=tuple(inferred))


def _strict(row: Row) -> None:
    """What the collection itself marks as not to be relied on."""
    if row.model.get("layers_inferred"):
        raise Unusable("the number of layers was inferred from the reported rate, not published")
    if "OUTLIER" in row.notes:
        raise Unusable("the collection marks the row as an outlier", row.notes.partition(";")[0])
    if row.model.get("parallel_block"):
        raise Unusable("blocks whose attention and feed-forward part run side by side cannot be planned")
    if re.search(r"NOT a plain GPT", row.notes):
        raise Unusable("the source changed the model's architecture", "parallel block and sliding-window attention")
    if "_megascale_" in row.id:
        raise Unusable("the source changed the model's architecture", "MegaScale's own rows, by their name")
    change = re.search(r"cumulative ablation \+(.+)", row.notes)
    if change:
        raise Unusable("the source changed the model's architecture or its kernels, step by step", change[1])


def whole(part: dict[str, Any], name: str, default: int | None = None) -> int | None:
    """A whole number from 1 on, or `default` where there is none."""
    value = part.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise Unusable(f"{name.replace('_', ' ')} is not one whole number", str(value))
    return value


def words_of(part: dict[str, Any], name: str) -> str | None:
    """A text, or None where there is none."""
    value = part.get(name)
    if value is not None and not isinstance(value, str):
        raise Unusable(f"{name} is not a text", str(value))
    return value


def _model(row: Row, inferred: list[str]) -> dict[str, Any]:
    model = row.model
    if (preset := preset_of(model)) is not None:
        return _published(model, preset)
    sizes = {name: whole(model, name) for name in SHAPE}
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise Unusable(f"not published: {', '.join(missing).replace('seq_len', 'sequence length')} of the model")
    if sizes["hidden"] % sizes["heads"]:
        raise Unusable("the heads do not divide the hidden size", f"{sizes['hidden']} / {sizes['heads']}")
    gated = str(model.get("activation") or "").lower() in ("swiglu", "silu", "geglu")
    vocabulary, ffn = whole(model, "vocab"), whole(model, "ffn")
    kv_heads = whole(model, "kv_heads")
    experts, top_k = whole(model, "experts", 0), whole(model, "top_k")
    if experts and (not top_k or ffn is None):
        raise Unusable("not published: width of the experts, or how many a token goes to")
    if vocabulary is None:
        vocabulary = stack_of(row).vocabulary
        inferred.append(f"vocabulary {vocabulary}: that of its software's examples")
    if ffn is None:
        if gated:
            raise Unusable("not published: width of the feed-forward part of the model")
        ffn = 4 * sizes["hidden"]
        inferred.append("feed-forward part 4 times as wide as the model")
    if kv_heads is None:
        kv_heads = sizes["heads"]
        inferred.append("as many key and value heads as heads")
    if sizes["heads"] % kv_heads:
        raise Unusable("the key and value heads do not divide the heads", f"{sizes['heads']} / {kv_heads}")
    if model.get("activation") is None:
        inferred.append("activation GELU, without a gate")
    return {
        "layers": sizes["layers"],
        "hidden": sizes["hidden"],
        "heads": sizes["heads"],
        "kv_heads": kv_heads,
        "ffn": ffn,
        "context": sizes["seq_len"],
        "vocabulary": vocabulary,
        "gated": gated,
        "tied": bool(model.get("tied_embeddings")),
        "experts": experts,
        "top_k": top_k or 0,
    }


def _published(model: dict[str, Any], preset: str) -> dict[str, Any]:
    """A model by its name, of as many layers and tokens as the row has."""
    known = PRESETS[preset].sizes
    return {
        "preset": preset,
        "layers": whole(model, "layers", known["layers"]),
        "context": whole(model, "seq_len", known["context"]),
        "dense_layers": whole(model, "dense_layers", known.get("dense_layers", 0)),
        "kv_heads": known.get("kv_heads", known["heads"]),
        "gated": known["activation"] == "swiglu",
        **{name: known[name] for name in ("hidden", "heads", "ffn", "vocabulary", "tied", "experts", "top_k")},
    }


def _ahead(row: Row, preset: str, tp: int, inferred: list[str]) -> int:
    """Modules that predict further tokens, which cannot be planned beside tensor ranks."""
    modules = modules_ahead(row.id, row.source, preset)
    if modules and tp > 1:
        inferred.append("without the module that predicts a second token, a fiftieth of the work")
        return 0
    return modules


def _layout(row: Row, inferred: list[str]) -> dict[str, Any]:
    parallel = row.parallel
    devices = whole(parallel, "gpus") or whole(parallel, "devices")
    if devices is None:
        raise Unusable("not published: number of devices")
    degrees = {axis: whole(parallel, axis) for axis in ("tp", "pp", "cp", "ep")}
    unknown = [axis for axis in ("tp", "pp") if degrees[axis] is None]
    if unknown:
        raise Unusable(f"not published: {' and '.join(unknown)} of the layout")
    degrees = {axis: degree or 1 for axis, degree in degrees.items()}
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = whole(parallel, "dp")
    if dp is None:
        if devices % split:
            raise Unusable("the degrees do not multiply to the number of devices", f"{split} of {devices}")
        dp = devices // split
        inferred.append("dp: what the other degrees leave")
    if split * dp != devices:
        raise Unusable("the degrees do not multiply to the number of devices", f"{split * dp} of {devices}")
    zero = words.zero_stage(parallel.get("zero"))
    if zero is None:
        zero = 0
        if dp > 1:
            inferred.append("replicas share nothing (ZeRO 0)")
    shards = words.shard_group(parallel.get("zero")) or whole(parallel, "fsdp") or dp
    if dp % shards:
        raise Unusable("the ranks that share a copy do not divide the replicas", f"{dp} / {shards}")
    sp = parallel.get("sp")
    if sp is None and degrees["tp"] > 1:
        sp = stack_of(row).sequence_parallel
        inferred.append(f"{'' if sp else 'no '}sequence parallelism beside tp")
    return {
        "devices": devices,
        **degrees,
        "dp": dp,
        "sequence_parallel": bool(sp) and degrees["tp"] > 1,
        "async_tp": bool(parallel.get("async_tp")),
        "zero": zero,
        "shards": shards if zero else 1,
    }


def _batch(row: Row, dp: int, inferred: list[str]) -> dict[str, int]:
    batch = row.batch
    micro, total = whole(batch, "micro"), whole(batch, "global")
    steps = whole(batch, "num_micro") or whole(batch, "grad_accum")
    if micro is None and total and steps:
        if total % (dp * steps):
            raise Unusable("the batch does not divide into its micro-batches", f"{total} / ({dp} x {steps})")
        micro = total // (dp * steps)
    if micro is None:
        raise Unusable("not published: size of a micro-batch")
    if total is None and steps is None:
        steps = 1
        inferred.append("one micro-batch in a step: the batch is not published")
    if total is not None:
        if total % (dp * micro):
            raise Unusable("the batch does not divide into its micro-batches", f"{total} / ({dp} x {micro})")
        if steps is not None and steps != total // (dp * micro):
            raise Unusable(
                "the batch and the number of micro-batches do not agree", f"{total}, {dp} x {micro} x {steps}"
            )
        steps = total // (dp * micro)
    return {"micro_batch": micro, "microbatches": steps}


def _schedule(row: Row, pp: int, microbatches: int, inferred: list[str]) -> dict[str, Any]:
    stages = whole(row.parallel, "vpp")
    if pp == 1:
        return {"schedule": None, "stages_per_rank": 1}
    schedule = words.schedule(row.schedule) or ("interleaved_1f1b" if (stages or 1) > 1 else "1f1b")
    if row.schedule is None or "stated" in row.schedule or "published" in row.schedule:
        inferred.append(f"schedule {schedule}")
    if stages is None:
        # Between plain 1F1B, idle (pp - 1) / microbatches of the work, and no idle time at all lies every other.
        bubble = (pp - 1) / (microbatches + pp - 1)
        if schedule in ("interleaved_1f1b", "1f1b") and ("interleaved" in str(row.schedule) or row.schedule is None):
            if bubble > MAX_UNKNOWN_BUBBLE:
                raise Unusable(
                    "not published: stages of a rank in the schedule",
                    f"they decide up to {100 * bubble:.0f} % of the step",
                )
            inferred.append(f"one stage a rank: interleaving could save {100 * bubble:.1f} % at most")
            schedule = "1f1b"
        stages = 1
    if schedule == "1f1b" and stages > 1:
        schedule = "interleaved_1f1b"
    if schedule == "interleaved_1f1b" and stages == 1:
        schedule = "1f1b"
    return {"schedule": schedule, "stages_per_rank": stages}


def _texts(row: Row, layout: dict[str, Any], inferred: list[str]) -> dict[str, Any]:
    name = words_of(row.hardware, "gpu") or ""
    device = words.device(name)
    per_node = whole(row.hardware, "nvlink_domain") or whole(row.hardware, "gpus_per_node")
    if device in words.RACKS and per_node == words.TRAY:
        per_node = words.RACKS[device]
        inferred.append(f"{per_node} devices joined by NVLink: trays of {words.TRAY} are of a rack")
    if per_node is None:
        per_node = PER_NODE
        inferred.append(f"{PER_NODE} devices in a node")
    island = words.island(words_of(row.hardware, "intra"))
    if island is not None and per_node % island:
        raise Unusable("groups of devices that are joined each to each do not fill a node", f"{island} of {per_node}")
    stack, inter = stack_of(row), words_of(row.hardware, "inter")
    network = words.network_rate(inter, whole(row.hardware, "gpus_per_node") or per_node)
    if network is None and layout["devices"] > per_node:
        inferred.append("network between nodes as the machine catalogue has it")
    if network is not None:
        network /= words.interference(row.notes) * (words.cards(inter) if stack.one_card else 1)
    precision = words.precision(row.precision)
    if precision is None:
        precision = "fp16"
        inferred.append("numbers of 16 bits")
    recompute = words.recompute(row.recompute)
    if recompute is None:
        recompute = stack.recompute
        inferred.append(
            "nothing is recomputed" if recompute == "none" else f"as its software does: {recompute} recomputing"
        )
    return {
        "device": device,
        "memory_size": words.memory_size(name),
        "memory_rate": words.memory_rate(name),
        "power": words.power_cap(name) or whole(row.hardware, "power_w"),
        "per_node": per_node,
        "link_rate": words.link_rate(words_of(row.hardware, "intra")),
        "island": island if island != per_node else None,
        "network_rate": network,
        "precision": precision,
        "recompute": recompute,
    }
