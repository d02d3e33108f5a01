"""A training of Megatron-Bridge -> what its recipe says of experts, which the row does not.

Each is read in the recipes of the release that a row is of (NVIDIA-NeMo/Megatron-Bridge: scripts/performance/configs,
since 26.06 src/megatron/bridge/perf_recipes), by model, device and layout.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Recipe(NamedTuple):
    # moe_flex_dispatcher_backend is deepep or hybridep: of a token's copies one goes to a device
    sends_once: bool = False
    overlaps: bool = False  # moe_a2a_overlap: exchanges beside passes of another micro-batch
    fused: bool = False  # cutedsl_fused_grouped_mlp, in a graph of the whole iteration


# Patterns of "release model device precision vpp micro-batch".
SENDS_ONCE = (
    r"^26\.\d\d\S* (deepseek_v3|kimi_k2|qwen3_30b) ",
    r"^26\.\d\d\S* qwen3_235b gb[23]00 ",
    r"^25\.09 deepseek_v3 h100 ",  # enable_deepep
)
OVERLAPS = (
    r"^26\.0[68]\S* (deepseek_v3|qwen3_\w+) gb[23]00 fp8 ",  # deepseek_v3: at 2 samples a micro-batch it was not
    r"^26\.04\.01 deepseek_v3 b200 fp8 v2 ",
    r"^25\.09 deepseek_v3 h100 ",
    r"^2[56]\.\d\d\S* qwen3_235b h100 ",
)
# deepseek_v3_pretrain_config: mtp_num_layers = 1. A row that is without says so by its name.
PREDICTS_AHEAD, WITHOUT = r" container.* deepseek_v3 ", r"w/o_MTP"
FUSED = (r"^26\.0[68]\S* (deepseek_v3|qwen3_\w+) gb[23]00 fp8 ",)


def modules_ahead(row_id: str, source: str, model: str) -> int:
    """That predict a further token each."""
    asked = re.search(PREDICTS_AHEAD, f"{source} {model} ") and not re.search(WITHOUT, row_id)
    return int("Megatron-Bridge" in source and bool(asked))


def recipe_of(source: str, model: str, device: str, precision: str, stages_per_rank: int, micro_batch: int) -> Recipe:
    found = re.search(r"Megatron-Bridge.*?(\d\d\.\d\d\S*) container", source)
    if found is None:
        return Recipe()
    text = f"{found[1]} {model} {device} {precision} v{stages_per_rank} m{micro_batch} "
    return Recipe(*(any(re.search(each, text) for each in patterns) for patterns in (SENDS_ONCE, OVERLAPS, FUSED)))
