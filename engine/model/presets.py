"""Names of published models -> their sizes, each from what its authors published: what a person can plan, not run.

A preset is a family (`gpt`: dense decoders; `moe`: decoders with experts) and defaults for the family's sizes. Biases
are left out: a few millionths of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    family: str
    sizes: dict[str, Any]  # settings of a Spec
    params: float  # as published
    source: str
    precision: str = "bf16"  # in which it was trained


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): widths of the two vectors from
    which queries, and keys and values, are made; of a head's key without and with positions, and of its value."""

    query: int
    key_value: int
    plain: int
    rotary: int
    value: int


GPT = {"positions": "learned", "activation": "gelu", "tied": True}
LLAMA = {"positions": "rotary", "activation": "swiglu", "tied": False}
QWEN3 = LLAMA | {"kv_heads": 4, "head_dim": 128, "vocabulary": 151_936, "context": 4096, "experts": 128, "top_k": 8}
LLAMA3 = LLAMA | {"kv_heads": 8, "vocabulary": 128_256, "context": 8192}

PRESETS = {
    "gpt3_175b": Preset(
        "gpt",
        GPT | {"layers": 96, "hidden": 12_288, "heads": 96, "vocabulary": 50_257, "context": 2048},
        174.6e9,
        "Brown et al. 2020, arXiv:2005.14165, table 2.1; parameters: Narayanan et al. 2021, arXiv:2104.04473, table 1",
        "fp16",
    ),
    "llama3_8b": Preset(
        "gpt",
        LLAMA3 | {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14_336},
        8.03e9,
        "Grattafiori et al. 2024, arXiv:2407.21783, table 3; parameters: the model card",
    ),
    "llama3_70b": Preset(
        "gpt",
        LLAMA3 | {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28_672},
        70.6e9,
        "Grattafiori et al. 2024, arXiv:2407.21783, table 3; parameters: the model card",
    ),
    "llama3_405b": Preset(
        "gpt",
        LLAMA3 | {"layers": 126, "hidden": 16_384, "heads": 128, "ffn": 53_248},
        405.9e9,
        "Grattafiori et al. 2024, arXiv:2407.21783, table 3; parameters: the model card",
    ),
    "mixtral_8x7b": Preset(
        "moe",
        LLAMA
        | {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocabulary": 32_000}
        | {"context": 32_768, "experts": 8, "top_k": 2},
        46.7e9,
        "Jiang et al. 2024, arXiv:2401.04088, table 1; parameters: the announcement of the model",
    ),
    "qwen3_30b": Preset(
        "moe",
        QWEN3 | {"layers": 48, "hidden": 2048, "heads": 32, "ffn": 768},
        30.53e9,
        "Yang et al. 2025, arXiv:2505.09388, table 2; widths and vocabulary: config.json of Qwen/Qwen3-30B-A3B; "
        "parameters: its files",
    ),
    "qwen3_235b": Preset(
        "moe",
        QWEN3 | {"layers": 94, "hidden": 4096, "heads": 64, "ffn": 1536},
        235.1e9,
        "Yang et al. 2025, arXiv:2505.09388, table 2; widths and vocabulary: config.json of Qwen/Qwen3-235B-A22B; "
        "parameters: its files",
    ),
    "deepseek_v2": Preset(
        "moe",
        LLAMA
        | {"layers": 60, "hidden": 5120, "heads": 128, "ffn": 1536, "vocabulary": 102_400, "context": 4096}
        | {"experts": 160, "top_k": 6, "shared_experts": 2, "dense_layers": 1, "dense_ffn": 12_288},
        235.7e9,
        "DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.2; the dense block's width: config.json of "
        "deepseek-ai/DeepSeek-V2; parameters: its files",
    ),
    "deepseek_v3": Preset(
        "moe",
        LLAMA
        | {"layers": 61, "hidden": 7168, "heads": 128, "ffn": 2048, "vocabulary": 129_280, "context": 4096}
        | {"experts": 256, "top_k": 8, "shared_experts": 1, "dense_layers": 3, "dense_ffn": 18_432},
        671e9,
        "DeepSeek-AI 2024, arXiv:2412.19437, section 4.2; without the module that predicts a second token (`mtp`)",
    ),
    "kimi_k2": Preset(
        "moe",
        LLAMA
        | {"layers": 61, "hidden": 7168, "heads": 64, "ffn": 2048, "vocabulary": 163_840, "context": 4096}
        | {"experts": 384, "top_k": 8, "shared_experts": 1, "dense_layers": 1, "dense_ffn": 18_432},
        1.026e12,
        "Kimi Team 2025, arXiv:2507.20534, table 2; the dense block's width and the vocabulary: config.json of "
        "moonshotai/Kimi-K2-Base; parameters: its files",
    ),
}
# arXiv:2405.04434, section 3.1.2; arXiv:2412.19437, section 4.2; Kimi K2 has the latter's (its config.json).
LATENT = dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), Latent(1536, 512, 128, 64, 128))


def family(model: str) -> str:
    """The kind of model that a preset is an example of; any other model is one of its own."""
    return PRESETS[model].family if model in PRESETS else model
