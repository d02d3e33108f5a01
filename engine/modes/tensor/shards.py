"""A job -> which of its linear layers are cut by columns (outputs) and which by rows (inputs), and what a rank holds.

A layer cut by columns is followed by one cut by rows: what lies between them stays cut, and only the output of the
second has to be summed over the ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). The vocabulary is cut, too:
each rank embeds the tokens that it has, and computes their logits.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Container, Iterator, Mapping
from typing import Any

from engine.job import Job
from engine.presets import family
from engine.shapes import Layer

BLOCK = {"qkv": "column", "proj": "row", "gate": "column", "up": "column", "down": "row"}
ATTENTION, MLP = ("norm1", "qkv", "proj"), ("norm2", "gate", "up", "down")  # modules of a block's two parts
CUT = {("vocabulary", "weight"): 0, ("column", "weight"): 0, ("column", "bias"): 0, ("row", "weight"): 1}  # the dim


def styles(job: Job) -> Mapping[str, str]:
    """Module name -> column, row, or vocabulary (rows of an embedding); what is not named is whole on every rank."""
    if job.degree("tp") == 1:
        return {}
    if family(job.spec.model) == "gpt":
        inside = frozenset(name.split(".")[0] for name, _ in job.layers[1].params)
        return _of_blocks(tuple(layer.name for layer in job.layers[1:-1]), inside)
    linear = [layer.name for layer in job.layers if len(layer.params[0][1]) == 2]
    pairs = zip(linear[::2], linear[1::2], strict=False)  # an odd one at the end stays whole
    return {name: style for pair in pairs for name, style in zip(pair, ("column", "row"), strict=True)}


@functools.lru_cache(maxsize=64)  # asked for each layer
def _of_blocks(blocks: tuple[str, ...], inside: frozenset[str]) -> Mapping[str, str]:
    """`inside`: names of the modules that each block has."""
    cut = {f"{block}.{name}": style for block in blocks for name, style in BLOCK.items() if name in inside}
    return types.MappingProxyType({"embed.token": "vocabulary", **cut, "head.linear": "column"})


def norms_of(layer: Layer) -> dict[str, tuple[int, ...]]:
    """A layer's norms, and the shapes of their weights."""
    return {name.split(".")[0]: shape for name, shape in layer.params if name.startswith("norm")}


def parameters_in(job: Job, modules: Container[str]) -> int:
    """How many parameters these modules have."""
    names = [f"{layer.name}.{name}" for layer in job.layers for name, _ in layer.params]
    return sum(name.rpartition(".")[0] in modules for name in names)


def held(job: Job) -> tuple[Layer, ...]:
    """The model's layers with the shapes of the parameters that one rank holds."""
    return tuple(_held(job))


def _held(job: Job) -> Iterator[Layer]:
    style, degree = styles(job), job.degree("tp")
    cut: dict[tuple, tuple] = {}  # parameters by those of the whole layer: blocks are alike

    def local(layer: Layer, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        module, _, parameter = f"{layer.name}.{name}".rpartition(".")
        cut = CUT.get((style.get(module), parameter))
        return tuple(size // degree if dim == cut else size for dim, size in enumerate(shape))

    for layer in job.layers:
        like = "block" if layer.name.startswith("block") else layer.name
        if (like, layer.params) not in cut:
            cut[like, layer.params] = tuple((name, local(layer, name, shape)) for name, shape in layer.params)
        yield dataclasses.replace(layer, params=cut[like, layer.params])


def gradient_bytes(job: Job, layer: Layer) -> int:
    """Of a layer of `held`, its gradients as autograd leaves them: each rank gets those of all rows of an embedding,
    though it keeps its own."""
    rows = [shape for name, shape in layer.params if styles(job).get(f"{layer.name}.{name[:-7]}") == "vocabulary"]
    others = 0 if job.spec.master_weights else job.degree("tp") - 1
    return layer.param_bytes + others * layer.item * sum(map(math.prod, rows))


def piece(
    layer: Layer, name: str, *modules: str, output: tuple[int, ...], flops: int = 0, saved: int = 0, **more: Any
) -> Layer:
    """A part of a layer between two collectives, with the parameters of some of its modules. `more`: its `kernels`, and
    `products` and `last_flops` where it can be computed again."""
    params = tuple((key, shape) for key, shape in layer.params if key.split(".")[0] in modules)
    return Layer(f"{layer.name}.{name}", params, flops, output, saved, layer.item, **more)
