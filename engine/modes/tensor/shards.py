"""A job -> which of its linear layers are cut by columns (outputs) and which by rows (inputs), and what a rank holds.

A layer cut by columns is followed by one cut by rows: what lies between them stays cut, and only the output of the
second has to be summed over the ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). The vocabulary is cut, too:
each rank embeds the tokens that it has, and computes their logits. Experts are cut like any MLP, unless ranks have them
whole, each of them others; their router, and what makes a latent of a token, is whole on every rank.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from engine.asking.settings import TOKEN_MODELS
from engine.job import Job
from engine.model.shapes import Layer

# By the last word of a module's name, so that experts, and what they share, are cut as an MLP is.
BLOCK = {"qkv": "column", "proj": "row", "gate": "column", "up": "column", "down": "row"}
BLOCK |= {"q_up": "column", "kv_up": "column"}
ENDS = {"embed.token": "vocabulary", "head.linear": "column"}
# Of a block every rank has these whole, and computes a part of their gradients, as it has a part of what follows them.
LATENT = ("q_down", "q_norm", "kv_down", "kv_norm")
PARTIAL = (*LATENT, "router")
ATTENTION, MLP = ("qkv", *LATENT, "q_up", "kv_up", "proj"), ("gate", "up", "down")  # modules of its two parts
NORMED_ATTENTION = ("norm1", *ATTENTION)
CUT = {("vocabulary", "weight"): 0, ("column", "weight"): 0, ("column", "bias"): 0, ("row", "weight"): 1}  # the dim


def style_of(job: Job, module: str) -> str | None:
    """Column, row, or vocabulary (rows of an embedding); None where it is whole on every rank."""
    if job.degree("tp") == 1:
        return None
    if job.whole_experts and ".experts." in module:
        return None
    if job.spec.model in TOKEN_MODELS:
        inside = BLOCK.get(module.rpartition(".")[2]) if module.startswith("block") else None
        return inside or ENDS.get(module)
    linear = [layer.name for layer in job.layers if len(layer.params[0][1]) == 2]
    paired = linear[: len(linear) // 2 * 2]  # an odd one at the end stays whole
    return ("column", "row")[paired.index(module) % 2] if module in paired else None


def styles(job: Job) -> dict[str, str]:
    """Module name -> style, of all that are cut."""
    modules = dict.fromkeys(
        f"{layer.name}.{name}".rpartition(".")[0] for layer in job.layers for name, _ in layer.params
    )
    return {module: style for module in modules if (style := style_of(job, module))}


def partial(layer: Layer, *, sequences: bool) -> dict[str, tuple[int, ...]]:
    """Modules that every rank has whole and of whose gradients each computes a part, with the shapes of their weights.
    `sequences`: norms too, which then have seen a part of the tokens."""
    words = ((name.split(".")[0], shape) for name, shape in layer.params)
    return {word: shape for word, shape in words if word in PARTIAL or (sequences and word.startswith("norm"))}


def held(job: Job) -> tuple[Layer, ...]:
    """The model's layers with the shapes of the parameters that one rank holds."""
    return tuple(_held(job))


def _held(job: Job) -> Iterator[Layer]:
    degree = job.degree("tp")
    cut: dict[tuple, tuple] = {}  # parameters by those of the whole layer: blocks are alike

    def local(layer: Layer, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        module, _, parameter = f"{layer.name}.{name}".rpartition(".")
        cut = CUT.get((style_of(job, module), parameter))
        return tuple(size // degree if dim == cut else size for dim, size in enumerate(shape))

    for layer in job.layers:
        like = "block" if layer.name.startswith("block") else layer.name
        if (like, layer.params) not in cut:
            cut[like, layer.params] = tuple((name, local(layer, name, shape)) for name, shape in layer.params)
        yield dataclasses.replace(layer, params=cut[like, layer.params])


def gradient_bytes(job: Job, layer: Layer) -> int:
    """Of a layer of `held`, its gradients as autograd leaves them: each rank gets those of all rows of an embedding,
    though it keeps its own."""
    rows = [shape for name, shape in layer.params if style_of(job, f"{layer.name}.{name[:-7]}") == "vocabulary"]
    others = 0 if job.spec.master_weights else job.degree("tp") - 1
    return layer.param_bytes + others * layer.item * sum(map(math.prod, rows))


def piece(
    layer: Layer, name: str, *modules: str, output: tuple[int, ...], flops: int = 0, saved: int = 0, **more: Any
) -> Layer:
    """A part of a layer between two collectives, with the parameters of some of its modules. `more`: its `kernels`, and
    `products` and `last_flops` where it can be computed again."""
    params = tuple((key, shape) for key, shape in layer.params if key.split(".")[0] in modules)
    return Layer(f"{layer.name}.{name}", params, flops, output, saved, layer.item, **more)
