"""The model that a row names and gives no shape of -> its published shape, or why that cannot be planned.

A row's own numbers count where it has any: tests of others are of a few layers of a model.
"""

from __future__ import annotations

import re
from typing import Any

from engine.validate.rows import Unusable

# The first whose pattern is in a row's name of its model.
NAMED = (
    (r"deepseek.?v2(?!.?lite)", "deepseek_v2"),
    (r"deepseek.?v3", "deepseek_v3"),
    (r"kimi.?k2", "kimi_k2"),
    (r"qwen3.?30b", "qwen3_30b"),
    (r"qwen3.?235b", "qwen3_235b"),
)
REFUSED = (
    (r"gpt.?oss", "attention to a window of tokens in every other layer cannot be planned"),
    (r"nemotron.?3", "layers with a state (Mamba) cannot be planned"),
)


def name_of(model: dict[str, Any]) -> str:
    return str(model.get("arch") or model.get("name") or "")


def preset_of(model: dict[str, Any]) -> str | None:
    """None where a row's name of its model says nothing."""
    name = name_of(model)
    for pattern, why in REFUSED:
        if re.search(pattern, name, re.IGNORECASE):
            raise Unusable(why, name)
    return next((preset for pattern, preset in NAMED if re.search(pattern, name, re.IGNORECASE)), None)
