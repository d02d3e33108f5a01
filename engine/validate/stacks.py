"""What a row says of its software -> the properties of it that decide times and are not settings of a layout.

A row names its software in its source, its set or its schedule. Each property is documented there; none is fitted. A
row whose software is not known gets those of today's, which is then listed as inferred.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.validate.rows import Row


class Stack(NamedTuple):
    name: str
    flash: bool  # attention in one kernel, which never writes its scores (Dao et al. 2022, arXiv:2205.14135)
    overlaps: bool  # gradients are reduced, and layers gathered, while others compute
    whole_blocks: bool  # full recomputation repeats a block to its end, as Megatron-LM's checkpoint does
    first_flash: bool  # attention in one kernel as in 2022, before FlashAttention 2
    tp_overlaps: bool  # tokens of tensor ranks travel in parts while products work on others
    one_card: bool  # what is gathered leaves a node by one network card at a time
    dropout: bool  # of 0.1, as Megatron-LM has it by default (arguments.py), where the model is a GPT
    scatters: bool  # tensor ranks send their own parts of a message between stages (Narayanan et al. 2021, section 4.1)


# Megatron-LM before 2023 and its DeepSpeed fork: scores, softmax and weighted sum are kernels of their own, the softmax
# fused with scale and mask (Narayanan et al. 2021, section 4.2). Gradients are all-reduced when the last micro-batch is
# through (Korthikanti et al. 2022, section 6.3: "data-parallel all-reduce is not overlapped").
EARLY = {
    "flash": False,
    "first_flash": False,
    "overlaps": False,
    "whole_blocks": True,
    "tp_overlaps": False,
    "one_card": False,
    "dropout": True,
    "scatters": True,
}
# Since then FlashAttention is the default, and communication overlaps.
LATE = EARLY | {"flash": True, "overlaps": True}
PYTORCH = LATE | {"whole_blocks": False, "scatters": False, "dropout": False}
# The first whose pattern is found in a row's source, set, schedule and notes.
STACKS = (
    (r"no_scatter_gather", Stack("Megatron-LM of 2021 without scattered messages", **(EARLY | {"scatters": False}))),
    # Parameters are fetched while the layer before computes; each is gathered as a list of shards, which NCCL sends as
    # a broadcast from every rank in turn, so that a node's cards do not work side by side.
    (
        r"DeepSpeed ZeRO-3",
        Stack("DeepSpeed ZeRO-3 of 2021", **(EARLY | {"overlaps": True, "one_card": True})),
    ),
    (r"bigscience|Megatron-DeepSpeed", Stack("Megatron-DeepSpeed of 2022", **EARLY)),
    (r"SC21|2104\.04473|Korthikanti|2205\.05198|5281919420|vTrain", Stack("Megatron-LM before 2023", **EARLY)),
    (r"Zero Bubble", Stack("Megatron-LM of 2023", **EARLY)),
    (r"MegaScale", Stack("Megatron-LM of 2023", **(LATE | {"overlaps": False}))),
    # Its table is of spring 2023, with attention as a Triton kernel after the first FlashAttention (attn_impl: triton),
    # and PyTorch 1.13 and 2.0, whose checkpoint repeats a block to its end (early stop came with 2.1).
    (r"llm-foundry", Stack("LLM Foundry of 2023", **(PYTORCH | {"first_flash": True, "whole_blocks": True}))),
    (r"torchtitan", Stack("TorchTitan", **PYTORCH)),
    # NVIDIA's recipes turn Transformer Engine's userbuffers on (tp_comm_overlap).
    (r"dgxc-benchmarking|Megatron-Bridge", Stack("NeMo", **(LATE | {"tp_overlaps": True}))),
    (r"Megatron-LM", Stack("Megatron-Core", **LATE)),
)
TODAY = Stack("not known", **LATE)


def stack_of(row: Row) -> Stack:
    text = " ".join((row.source, row.group, str(row.schedule or ""), row.notes))
    return next((stack for pattern, stack in STACKS if re.search(pattern, text, re.IGNORECASE)), TODAY)
