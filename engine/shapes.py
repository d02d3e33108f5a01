"""A model's name and sizes -> its layers: parameters, FLOPs and activation sizes, without torch.

A model is a chain of layers, and a layer is the smallest piece that a device can hold, so a stage is a run of layers.
`engine.real.models` builds the same chain as modules; a test holds the two equal parameter by parameter.
FLOPs count a multiply-add as two and the forward pass only; a backward pass takes twice that (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from engine.spec import Spec

FP32 = 4  # bytes
ITEM_BYTES = {"fp32": FP32, "bf16": 2}  # of a number, by the name of its precision
# A model's vocabulary is rounded up to a multiple of this, so that tensor parallelism can cut it: a text has as many
# distinct characters as it has. Tokens that no text has are never a target.
VOCABULARY_MULTIPLE = 48


@dataclass(frozen=True, slots=True)
class Layer:
    """One link of the chain. `output` and `saved` are for one sample (an image, or one sequence of tokens)."""

    name: str
    params: tuple[tuple[str, tuple[int, ...]], ...]  # in the order in which the module registers them
    flops: int  # forward, one sample
    output: tuple[int, ...]  # shape
    saved: int  # bytes kept for the backward pass: its output and what it makes on the way, not its input
    item: int = FP32  # bytes of a number
    products: int = 0  # bytes of its output and the results of its matrix products, where those are less than `saved`
    last_flops: int = 0  # of a product at its end, of which backward does not need the result

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for _, shape in self.params)

    @property
    def param_bytes(self) -> int:
        return self.item * self.num_params

    @property
    def output_bytes(self) -> int:
        return self.item * math.prod(self.output)


def model_layers(spec: Spec, vocabulary: int) -> tuple[Layer, ...]:
    """The chain of `spec.model`, for a resolved spec. `vocabulary`: number of classes or of distinct tokens."""
    item = ITEM_BYTES[spec.precision or "fp32"]
    if spec.model == "cnn":
        return _cnn(vocabulary, item)
    if spec.model == "mlp":
        return _mlp(spec.layers, spec.hidden, vocabulary, item)
    tokens = math.ceil(vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if spec.model == "moe":
        return _moe(spec, tokens)
    return _gpt(spec.layers, spec.hidden, spec.heads, spec.context, tokens, item)


def _conv(name: str, inputs: int, outputs: int, side: int, item: int) -> Layer:
    """A 5x5 convolution without padding, ReLU and a 2x2 max pool, on a side x side image."""
    after = side - 4
    pooled = after // 2
    # ReLU's output, the pool's places and values
    saved = item * outputs * (after**2 + pooled**2) + 8 * outputs * pooled**2
    return Layer(
        name,
        (("weight", (outputs, inputs, 5, 5)), ("bias", (outputs,))),
        2 * 25 * inputs * outputs * after**2,
        (outputs, pooled, pooled),
        saved,
        item,
        products=item * (inputs * side**2 + outputs * after**2),
    )


def _linear(name: str, inputs: int, outputs: int, item: int) -> Layer:
    """With a ReLU, whose output is kept; or the last one, of whose output the loss keeps the logarithms."""
    params = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return Layer(name, params, 2 * inputs * outputs, (outputs,), item * outputs, item)


def _cnn(classes: int, item: int) -> tuple[Layer, ...]:
    """LeNet's shape (LeCun et al. 1998) in the widths of the Caffe example: 20, 50, 500."""
    return (
        _conv("conv1", 1, 20, 28, item),
        _conv("conv2", 20, 50, 12, item),
        _linear("fc1", 800, 500, item),
        _linear("fc2", 500, classes, item),
    )


def _mlp(layers: int, hidden: int, classes: int, item: int) -> tuple[Layer, ...]:
    widths = [784] + [hidden] * layers
    sizes = enumerate(itertools.pairwise(widths), start=1)
    hidden_layers = [_linear(f"fc{i}", a, b, item) for i, (a, b) in sizes]
    return (*hidden_layers, _linear("out", hidden, classes, item))


def _gpt(layers: int, hidden: int, heads: int, context: int, vocabulary: int, item: int) -> tuple[Layer, ...]:
    """A pre-norm decoder (Radford et al. 2019) with RMSNorm, no biases, learned positions, an untied head."""
    h, c = hidden, context
    embed_params = (("token.weight", (vocabulary, h)), ("position.weight", (c, h)))
    embed = Layer("embed", embed_params, 0, (c, h), item * c * h, item)
    block_params = (
        ("norm1.weight", (h,)),
        ("qkv.weight", (3 * h, h)),
        ("proj.weight", (h, h)),
        ("norm2.weight", (h,)),
        ("up.weight", (4 * h, h)),
        ("down.weight", (h, 4 * h)),
    )
    matmuls = 2 * c * (3 * h * h + h * h + 8 * h * h)
    attention = 2 * 2 * c * c * h  # scores and weighted sum, the full square
    # Kept: two norms, q k v, a log-sum-exp a head, attention's output, the sum, up's output and GELU's, the last sum.
    saved = item * c * (2 * norm_saved(h) + 3 * h + h + h + 8 * h + h) + FP32 * c * heads
    block = (block_params, matmuls + attention, (c, h), saved, item)
    # Its output, q k v, attention's output and log-sum-exps, and those of proj, up and down.
    again = {"products": item * c * (h + 3 * h + h + h + 4 * h + h) + FP32 * c * heads}
    again["last_flops"] = 2 * c * 4 * h * h
    blocks = tuple(Layer(f"block{i + 1}", *block, **again) for i in range(layers))
    head_params = (("norm.weight", (h,)), ("linear.weight", (vocabulary, h)))
    flops, saved = 2 * c * h * vocabulary, item * c * (norm_saved(h) + vocabulary)
    head = Layer("head", head_params, flops, (c, vocabulary), saved, item, last_flops=flops)
    return (embed, *blocks, head)


def _moe(spec: Spec, vocabulary: int) -> tuple[Layer, ...]:
    """The gpt with a mixture of experts for each block's MLP (Fedus et al. 2021, arXiv:2101.03961): a router gives
    every token to `top_k` of the experts, and none is dropped."""
    h, c, k = spec.hidden, spec.context, spec.top_k
    embed, *blocks, head = _gpt(spec.layers, h, spec.heads, c, vocabulary, FP32)
    (*kept, (_, up), (_, down)), experts = blocks[0].params, range(spec.experts)
    params = [*kept, ("router.weight", (spec.experts, h))]
    params += [(f"experts.{e}.{name}.weight", shape) for e in experts for name, shape in (("up", up), ("down", down))]
    mlp = 2 * c * 8 * h * h
    # Kept of a token: the router's probabilities and its choices (int64 thrice: which, in which order, and back); of
    # each of its copies the input, up's output and GELU's, and the output.
    saved = FP32 * c * (spec.experts + k * (1 + 10 * h)) + 8 * c * 3 * k - FP32 * c * 8 * h
    change = {"flops": blocks[0].flops + (k - 1) * mlp + 2 * c * h * spec.experts, "saved": blocks[0].saved + saved}
    return (embed, *(replace(block, params=tuple(params), **change) for block in blocks), head)


def num_experts(layer: Layer) -> int:
    """How many experts a layer has; 0 where it has none."""
    return sum(name.startswith("experts.") and name.endswith(".up.weight") for name, _ in layer.params)


def norm_saved(hidden: int) -> int:
    """Numbers that an RMSNorm keeps of each token: its output, that without the weight, and the scale."""
    return 2 * hidden + 1


def balance(costs: list[float], parts: int) -> tuple[int, ...]:
    """How many consecutive items each of `parts` parts gets, none empty, so that the costliest part is cheapest.

    Exact, by dynamic programming over prefixes. Ties are broken towards fewer items in the earlier parts, so the
    result is deterministic. Raises ValueError when there are fewer items than parts.
    """
    n = len(costs)
    if not 1 <= parts <= n:
        raise ValueError(f"cannot split {n} items into {parts} non-empty parts")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # Longer prefixes cost more, and what is left after them less. So for each end the best start is where the two
    # cross or the one before, and all ends are searched at once: parts * n * log n steps.
    total = np.array(prefix)
    best, cut = np.where(np.arange(n + 1) == 0, 0.0, np.inf), np.zeros((parts + 1, n + 1), dtype=np.int64)
    for part in range(1, parts + 1):
        end = np.arange(part, n + 1)
        cross = np.clip(part - 1 + np.searchsorted(best[part - 1 :] + total[part - 1 :], total[end]), part - 1, end - 1)
        # Of starts that differ by items which cost nothing, the first.
        before = np.maximum(np.searchsorted(total, total[np.maximum(cross - 1, 0)]), part - 1)
        worst = [np.maximum(best[start], total[end] - total[start]) for start in (before, cross)]
        cut[part, end] = np.where(worst[0] <= worst[1], before, cross)
        best = np.full(n + 1, np.inf)
        best[end] = np.minimum(*worst)
    sizes, end = [], n
    for part in range(parts, 0, -1):
        sizes.append(end - int(cut[part, end]))
        end = int(cut[part, end])
    return tuple(reversed(sizes))
