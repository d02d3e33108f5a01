"""A row, and what its own source has otherwise than the collection -> the row as its source has it.

Rows are taken at their word, unless the text that a row names as its source says something else. That is listed as
inferred, with where it stands. Here are facts of layouts only, and no numbers to fit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from engine.validate.named import name_of
from engine.validate.rows import Row


class Said(NamedTuple):
    where: str  # pattern of the source of a row
    text: str
    of: str = ""  # pattern of the name of its model
    model: tuple[tuple[str, Any], ...] = ()  # what it has of it, and of the layout
    parallel: tuple[tuple[str, Any], ...] = ()


SAID = (
    # Megatron-LM has --sequence-parallel off unless asked for (arguments.py). This test's configuration, beside the
    # values that it measured, never asked for it, in none of the commits that we could read (1739859b, 2efc870f). What
    # is allocated between steps says nothing of it, and is met: 20.66 GB measured, 20.65 planned.
    Said(
        r"gpt3_7b_tp4_pp1_memory_speed/",
        "no sequence parallelism, which the model_config.yaml of the source does not ask for",
        parallel=(("sp", False),),
    ),
    # run_pretrain_deepseekv2.sh: MOE_LAYER_FREQ is 0 once and 1 for all other layers, in each of its models.
    Said(
        r"SimuMax",
        "one block without experts, as the source's script has it",
        of=r"deepseek",
        model=(("dense_layers", 1),),
    ),
)


# Times that do not grow with the bytes are those of a host that starts the calls: this file has 92.8, 93.3, 92.6 and
# 95.8 us for 1, 2, 3 and 4 MiB. (nccl-tests with one process for 8 A100s, which starts 8 kernels a call, takes 39 to 41
# us up to 64 KiB, with a process for each 18 to 32.)
OF_THE_HOST = r"AR_GPU8_1M_1024M_LUT", 4 << 20


def is_of_the_host(row: Row, size: float) -> bool:
    """Whether a call of so many bytes took as long as it takes to start it."""
    where, most = OF_THE_HOST
    return size <= most and re.search(where, row.source) is not None


def as_its_source(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row, and what was put right in it, in words."""
    found = [
        said
        for said in SAID
        if re.search(said.where, row.source)
        and re.search(said.of, name_of(row.model), re.IGNORECASE)
        and not (set(said.model) <= row.model.items() and set(said.parallel) <= row.parallel.items())
    ]
    for said in found:
        row = replace(row, model=row.model | dict(said.model), parallel=row.parallel | dict(said.parallel))
    return row, tuple(said.text for said in found)
