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


# The first whose pattern is found in a row's source, set, schedule and notes.
STACKS = (
    # Megatron-LM before 2023 and its DeepSpeed fork: scores, softmax and weighted sum are kernels of their own, the
    # softmax fused with scale and mask (Narayanan et al. 2021, section 4.2). Gradients are all-reduced when the last
    # micro-batch is through (Korthikanti et al. 2022, section 6.3: "data-parallel all-reduce is not overlapped").
    (r"DeepSpeed ZeRO-3", Stack("DeepSpeed ZeRO-3 of 2021", flash=False, overlaps=False)),
    (r"bigscience|Megatron-DeepSpeed", Stack("Megatron-DeepSpeed of 2022", flash=False, overlaps=False)),
    (r"SC21|2104\.04473|Korthikanti|2205\.05198|5281919420", Stack("Megatron-LM before 2023", False, False)),
    (r"vTrain", Stack("Megatron-LM before 2023", flash=False, overlaps=False)),
    (r"Zero Bubble", Stack("Megatron-LM of 2023", flash=False, overlaps=False)),
    # FlashAttention is the default of each of these.
    (r"llm-foundry", Stack("LLM Foundry", flash=True, overlaps=True)),
    (r"torchtitan", Stack("TorchTitan", flash=True, overlaps=True)),
    (r"dgxc-benchmarking", Stack("NeMo", flash=True, overlaps=True)),
    (r"Megatron-Bridge", Stack("Megatron-Core", flash=True, overlaps=True)),
    (r"MegaScale", Stack("Megatron-LM of 2023", flash=True, overlaps=False)),
)
TODAY = Stack("not known", flash=True, overlaps=True)


def stack_of(row: Row) -> Stack:
    text = " ".join((row.source, row.group, str(row.schedule or ""), row.notes))
    return next((stack for pattern, stack in STACKS if re.search(pattern, text, re.IGNORECASE)), TODAY)
