"""One training in numbers -> the Spec and the machine that say the same to Lockstep, and its prediction.

This is all that stands between a published row and `engine.predict`: no cost is worked out here.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

from engine.asking.rules import SpecError
from engine.cost.catalogue import (
    DEVICES,
    GIBI,
    GIGA,
    MACHINES,
    MEMORY_REACHED,
    PCIE,
    SUSTAINED,
    TERA,
    network,
)  # fmt: skip
from engine.cost.hardware import EVERYBODY, Machine
from engine.graph.matching import PlanError
from engine.predict import predict
from engine.search.fits import room_of
from engine.spec import Spec
from engine.validate.case import Case, Predicted, whole
from engine.validate.recipes import recipe_of
from engine.validate.rows import Unusable
from engine.validate.stacks import FIRST, LATEST, SCORES, SECOND, TODAY, stack_of
from engine.validate.userbuffers import beside_products

GIGABIT = 1e9 / 8
CUDA_HAS = 0.99  # of a device's memory; the GB of its name are 2^30 bytes (engine/cost/catalogue.py: cuda)
LINK_REACHED = 0.8  # of NVLink's rate, what NCCL counts on (graph/topo.h): 20 of 25 GB/s for a link
# Watts of data sheets. Below its limit a device's clock goes with the cube root of its power: that goes with the clock
# and the square of the voltage, which rises with the clock (Chandrakasan et al. 1992, doi 10.1109/4.126534). Rates of
# Blackwell GPUs go with the power itself (engine/cost/catalogue.py), as where the voltage cannot fall further.
POWER = {"v100": 300, "a100": 400, "a100_40": 400, "h100": 700, "h200": 700, "b200": 1000, "gb200": 1200}
POWER |= {"a800": 400, "h800": 700, "b300": 1100, "gb300": 1400}
IN_PROPORTION = ("b200", "b300", "gb200", "gb300")
# Where large products were measured at a limit, that counts, of the peak in 16 and in 8 bits alike: H100s at 500 W
# (pytorch/ao, torchao/float8/roofline_utils.py: "custom to Meta's H100 variant", "experimental observation").
AT_LIMIT = {("h100", 500): 0.60}
# Of a device's peak in 16 bits, what the first FlashAttention reaches: 40 % forward and 30 % backward on an A100, the
# middles of 30 to 50 and 25 to 35 % (Dao 2023, arXiv:2307.08691, section 1). With the cost model's ratio of the two the
# same time is 36 % forward. A later device runs it with an A100's instructions, which reach 62 % of its peak (Luo et
# al. 2024, arXiv:2402.13499, section V).
FIRST_FLASH = 0.36
OLD_INSTRUCTIONS = {"a100": 1.0, "a100_40": 1.0, "a800": 1.0, "v100": 1.0}
ON_LATER_DEVICES = 0.62
# FlashAttention 2 on Hopper: 35 % (Shah et al. 2024, arXiv:2407.08608, abstract). It uses an A100's instructions, of
# which Blackwell's multiprocessors do as many (1,024 products a clock: 591 TFLOP/s of a GB200 at 1.9 GHz), and reaches
# 62 % of their peak there (Dao 2023, figure 5: 190 of 312 TFLOP/s), so 15 % of a GB200's.
SECOND_FLASH = {"h100": 0.35, "h200": 0.35, "h800": 0.35, "b200": 0.15, "b300": 0.15, "gb200": 0.15, "gb300": 0.15}
# Where results have to be the same in each run cuDNN's attention had no backward pass on Blackwell before version 9.18
# of 2026 (NVIDIA, TransformerEngine, pull request 2584), and PyTorch fills all that it allocates
# (torch.utils.deterministic.fill_uninitialized_memory; a sixth of a step: Megatron-LM, pull request 7093).
DETERMINISTIC = re.compile(r"deterministic mode")
# Tensors of a block, each gathered by itself: weight and bias of two norms and four products.
TENSORS = 12
# CUDA_LAUNCH_BLOCKING=1: the host makes the next kernel ready only when the last has ended, which takes what eager
# PyTorch takes for an op and a launch (about 25 us, assumed); and a kernel of the cost model stands for about two eager
# ones (bias, transposition, cast).
BLOCKED, BLOCKING = re.compile(r"CUDA_LAUNCH_BLOCKING=1"), 50e-6
# Eager PyTorch has a kernel for each operation of a norm, a rotation and an activation. In a block of Llama 3, tokens
# of two bytes are read or written: by an RMSNorm 18 (made fp32, squared, averaged, scaled, made bf16, times a weight),
# by one kernel 2; by a rotation in complex fp32 12.5, not 3; by SwiGLU 17.5, not 10.5; by sums 6: 72, not 23.5.
EAGER, UNFUSED = re.compile(r"(?:\b|_)eager(?:\b|_)"), 72 / 23.5
# AdamW written out in PyTorch: of a parameter in fp32, weight decay 8 bytes, its two averages 20 each, their root,
# quotient and sum 8 each, and its step 16: 88, and not the 30 of one kernel that writes 16-bit weights too.
STEPWISE_OPTIMIZER = 88 / 30
RINGS = re.compile(r"NCCL_ALGO=Ring")  # and no sums in switches
# Their optimizer steps before it knows the norm of all gradients, and takes the step back where that is too large.
HIDES_ITS_RAMP = ("zb_h2", "zb_2p", "zbv")
ZERO_BUBBLE = (*HIDES_ITS_RAMP, "interleaved_zero_bubble")
FUSED_LOSS = "cross-entropy fusion on"
SHARED = ("ddp", "zero1", "zero2", "fsdp")  # the mode in which replicas share what a stage of ZeRO says


def predicted(case: Case) -> Predicted:
    """Raises Unusable where Lockstep cannot plan the row, with the rule in words."""
    spec, inferred = spec_of(case)
    try:
        found = _predict(spec, machine_of(case))
    except PlanError as error:
        raise Unusable("Lockstep cannot simulate it", str(error).partition("\n")[0]) from None
    except SpecError as error:
        raise Unusable(f"Lockstep cannot plan it: {error.code.replace('_', ' ')}", str(error)) from None
    if not math.isfinite(found.seconds) or found.seconds <= 0:
        raise Unusable("the prediction is not a time", str(found.seconds))
    return found._replace(inferred=inferred)


@functools.lru_cache(maxsize=4096)  # rows that differ only in what was measured
def _predict(spec: Spec, machine: Machine) -> Predicted:
    prediction = predict(spec, on=machine)
    room = float(room_of(prediction.job, machine))
    peak = float(max(prediction.simulation.peak_memory))
    return Predicted(prediction.period, peak, room, machine.memory_size - room)


def spec_of(case: Case) -> tuple[Spec, tuple[str, ...]]:
    stack = stack_of(case.row)
    inferred = ["software as of today: attention never writes its scores"] if stack == TODAY else []
    settings = _model(case) | _layout(case, inferred) | {"flash": stack.attention != SCORES, "master_weights": True}
    settings["dropout"] = True if stack.dropout and not case.gated else None  # Llama and its like have none
    settings["fused_loss"] = True if FUSED_LOSS in case.row.notes else None
    settings["torch_loss"] = stack.loss
    # The runtime of zero-bubble schedules issues messages as ops of their own, beside what it computes.
    settings["overlap"] = None if stack.overlaps or case.schedule in ZERO_BUBBLE else False
    if case.sequence_parallel and stack.tp_overlaps:
        settings["tp_overlap"] = True
    if case.async_tp:  # smaller products, and copies between them, take back part of what is hidden: 8 % are gained
        inferred.append("products beside tokens of tensor ranks that travel in parts (async TP) taken as plain ones")
    settings["early_stop"] = False if stack.whole_blocks and case.recompute == "full" else None
    settings["every_other"] = True if stack.every_other and case.recompute == "selective" else None
    settings["keep_qkv"] = True if stack.keeps_qkv and case.recompute == "full" else None
    settings["sync_every_microstep"] = True if stack.each_micro_batch and "accumulate" in settings else None
    settings["backward_prefetch"] = False if stack.gathers_late else None
    settings["reduce_fp32"] = True if stack.reduces_fp32 and case.precision != "fp16" else None
    if stack.heads_by_exchange and case.cp > 1:
        settings["attention"] = "ulysses"
    settings["scatter_gather"] = True if stack.scatters and case.tp > 1 and case.pp > 1 else None
    if case.schedule not in HIDES_ITS_RAMP:
        settings["clip"] = 1.0  # the norm at which all of these clip gradients, by default
    try:
        return Spec(**settings), tuple(inferred)
    except SpecError as error:
        raise Unusable(f"Lockstep has no such setting: {error.setting.replace('_', '-')}", str(error)) from None


def _model(case: Case) -> dict[str, Any]:
    common = {
        "context": case.context,
        "layers": case.layers,
        "vocabulary": _padded(case.vocabulary, case.tp),
        "dataset": "synthetic",
        "optimizer": "adamw",
        "precision": case.precision,
        "recompute": None if case.recompute == "none" else case.recompute,
        "machine": case.device,
    }
    if case.preset:
        return common | {"model": case.preset, "dense_layers": case.dense_layers or None, "mtp": case.mtp or None}
    return common | _sizes(case)


def _sizes(case: Case) -> dict[str, Any]:
    sizes = {
        "model": "moe" if case.experts else "gpt",
        "hidden": case.hidden,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "ffn": case.ffn,
        "activation": "swiglu" if case.gated else "gelu",
        "positions": "rotary" if case.gated else "learned",
        "tied": case.tied,
    }
    return sizes | ({"experts": case.experts, "top_k": case.top_k} if case.experts else {})


def _padded(vocabulary: int, tp: int) -> int:
    """Rounded up to 128 for each tensor rank, as Megatron-LM does (--make-vocab-size-divisible-by)."""
    return math.ceil(vocabulary / (128 * tp)) * 128 * tp


def _layout(case: Case, inferred: list[str]) -> dict[str, Any]:
    common = {"devices": case.devices, "global_batch": case.global_batch}
    if case.pp == 1 and case.microbatches > 1:
        common["accumulate"] = case.microbatches
    if case.tp == case.pp == case.cp == case.ep == 1:
        if case.devices == 1:
            return common | {"mode": "single"}
        mode = SHARED[case.zero]
        if mode == "fsdp" and case.shards < case.dp:
            shards = {"mode": "hsdp", "fsdp": case.shards, "dp": case.dp // case.shards}
            return common | shards
        return common | {"mode": mode}
    degrees = {"mode": "hybrid", "tp": case.tp, "pp": case.pp, "cp": case.cp}
    replicas, shards = case.dp, case.shards
    if case.experts:
        degrees |= (experts := _experts(case, inferred))
        replicas = case.dp // experts["ep"]
        shards = math.gcd(replicas, max(1, case.shards // experts["ep"]))
    shared = case.zero == 3 or (case.zero and case.pp > 1)
    degrees |= {"fsdp": shards, "dp": replicas // shards} if shared else {"dp": replicas, "fsdp": 1}
    if case.zero in (1, 2) and (not shared or case.experts):  # of what ranks with other experts have alike, the state
        degrees["share_optimizer"] = True
    if case.zero > 1 and case.pp > 1:
        degrees["share_gradients"] = True
    if case.sequence_parallel:
        degrees["sequence_parallel"] = True
    if case.pp == 1:
        return common | degrees
    schedule = {"schedule": case.schedule, "microbatches": case.microbatches, "stages_per_rank": case.stages_per_rank}
    return common | degrees | schedule | {"split": _split(case, inferred)}


def _experts(case: Case, inferred: list[str]) -> dict[str, int]:
    """Ranks that share experts out are counted among replicas in Megatron-LM, and where tensor ranks have experts whole
    (etp 1), among these too: ep there is ep x tp here, where a mesh has an axis for replicas with other experts."""
    cut = whole(case.row.parallel, "etp")
    if cut is None and case.dp % case.ep and case.dp * case.tp % case.ep == 0:
        inferred.append("experts whole beside tensor ranks: there are fewer replicas than ranks that share them out")
        cut = 1
    if cut not in (None, 1, case.tp):
        raise Unusable("experts that are cut for some of the tensor ranks cannot be planned", str(cut))
    share = case.tp if cut == 1 else 1
    if case.ep % share or case.dp % (case.ep // share):
        raise Unusable("experts are shared out over a part of the tensor ranks, or over context ranks")
    return {"ep": case.ep // share} | ({"expert_tp": 1} if share > 1 else {})


def _split(case: Case, inferred: list[str]) -> tuple[int, ...]:
    """Layers of each stage, the embedding and the head among them."""
    stages = case.pp * case.stages_per_rank
    if case.layers % stages == 0:
        blocks = [case.layers // stages] * stages
    elif (case.layers + 2) % stages == 0:
        inferred.append("the embedding and the head each take the place of a block in their stage")
        blocks = [(case.layers + 2) // stages] * stages
        blocks[0], blocks[-1] = blocks[0] - 1, blocks[-1] - 1
    else:
        inferred.append("stages with as many blocks as the largest, the last with what is left")
        most = math.ceil(case.layers / stages)
        blocks = [max(0, min(most, case.layers - most * stage)) for stage in range(stages)]
    # A module that predicts a further token is a layer and a block more, with the head.
    blocks[0], blocks[-1] = blocks[0] + 1, blocks[-1] + 1 + 2 * case.mtp
    if min(blocks) < 1:
        raise Unusable("some stages of the pipeline would be empty", f"{case.layers} layers, {stages} stages")
    return tuple(blocks)


def machine_of(case: Case) -> Machine:
    """The catalogue's, with the links and the memory that the row names."""
    stack = stack_of(case.row)
    found = machine_with(
        case.device,
        per_node=case.per_node,
        link_rate=case.link_rate,
        island=case.island,
        network_rate=case.network_rate,
        memory_size=case.memory_size,
        memory_rate=case.memory_rate,
        power=case.power,
        attention=SECOND if DETERMINISTIC.search(case.row.notes) else stack.attention,
        by_tensor=stack.by_tensor,
        blocking=bool(BLOCKED.search(case.row.notes)),
    )
    eager = case.gated and EAGER.search(f"{case.row.id} {case.row.notes}")
    if case.preset:
        recipe = recipe_of(
            case.row.source, case.preset, case.device, case.precision, case.stages_per_rank, case.micro_batch
        )
        found = replace(
            found,
            sent_once=case.top_k if recipe.sends_once else 0,
            overlaps_exchanges=recipe.overlaps,
            fused_experts=recipe.fused,
        )
    switch = None if RINGS.search(case.row.notes) else found.switch
    return replace(
        found,
        unfused=UNFUSED if eager else 1.0,
        switch=switch,
        copies_tokens=stack.copies_tokens and not case.async_tp,  # that sends parts to where they belong
        stepwise_loss=stack.stepwise_loss and FUSED_LOSS not in case.row.notes,
        fills=bool(DETERMINISTIC.search(case.row.notes)),
        stepwise_optimizer=STEPWISE_OPTIMIZER if stack.stepwise_optimizer else 1.0,
        **({"does": stack.does} | (beside_products(case) if case.sequence_parallel and stack.tp_overlaps else {})),
    )


def machine_with(
    device: str,
    *,
    per_node: int,
    link_rate: float | None = None,
    island: int | None = None,
    network_rate: float | None = None,
    memory_size: float | None = None,
    memory_rate: float | None = None,
    power: float | None = None,
    attention: str = LATEST,
    by_tensor: bool = False,
    blocking: bool = False,
) -> Machine:
    """Rates in bytes a second, of data sheets, and watts; what is None stays as the catalogue has it. `island`:
    devices of a node that NVLink joins, with PCIe between such groups. `attention`:
    the kernel that does it. `by_tensor`: what leaves a node is gathered tensor by tensor. `blocking`: a kernel is made
    ready when the one before has ended."""
    known = MACHINES[device]
    outer = network(network_rate / GIGABIT) if network_rate else known.tiers[-1][1]
    if by_tensor:
        slower = {name: TENSORS * getattr(outer, name) for name in ("latency", "chunk", "word")}
        slower["tree"] = tuple(TENSORS * seconds for seconds in outer.tree)
        outer = replace(outer, **slower)
    changes: dict[str, Any] = {"node_size": per_node, "outer": ((EVERYBODY, outer),)}
    if island:
        changes |= {"node_size": island, "outer": ((per_node, PCIE), (EVERYBODY, outer)), "switch": None}
    if link_rate:
        changes["link_rate"] = LINK_REACHED * link_rate
    if memory_size:
        changes["memory_size"] = round(CUDA_HAS * memory_size / GIGA * GIBI)
    if memory_rate:
        changes["memory_rate"] = MEMORY_REACHED * memory_rate
    if measured := AT_LIMIT.get((device, power)):
        peak, gpu = known.peak_flop_rate, DEVICES[device]
        changes |= {"flop_rate": SUSTAINED * measured * peak, "fp8_gain": gpu.fp8 * TERA / peak}
    elif power and device in POWER:
        less = min(1.0, power / POWER[device])
        changes["flop_rate"] = known.flop_rate * (less if device in IN_PROPORTION else less ** (1 / 3))
    if blocking:
        changes["op_overhead"] = BLOCKING
    peak = known.peak_flop_rate * known.fp16_gain
    if attention == FIRST:
        changes["flash_rate"] = peak * FIRST_FLASH * OLD_INSTRUCTIONS.get(device, ON_LATER_DEVICES)
    if attention == SECOND and device in SECOND_FLASH:
        changes["flash_rate"] = peak * SECOND_FLASH[device]
    return replace(known, **changes)
