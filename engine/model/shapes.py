"""A model's name and sizes -> its layers: parameters, FLOPs and activation sizes, without torch.

A model is a chain of layers, and a layer is the smallest piece that a device can hold, so a stage is a run of layers.
`engine.real.models` builds the same chain as modules; a test holds the two equal parameter by parameter.
FLOPs count a multiply-add as two and the forward pass only; a backward pass takes twice that (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1).
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.cost.kernels import Kernels, matmul, memory
from engine.model.decoder import FP32 as FP32
from engine.model.decoder import ITEM_BYTES as ITEM_BYTES
from engine.model.decoder import Decoder
from engine.model.presets import family
from engine.spec import Spec

# A model's vocabulary is rounded up to a multiple of this, so that tensor parallelism can cut it: a text has as many
# distinct characters as it has. Tokens that no text has are never a target.
VOCABULARY_MULTIPLE = 48
# A vocabulary that was given is rounded up where its ranks could not share it, to this for each of them, as Megatron-LM
# does (make-vocab-size-divisible-by).
PADDING = 128


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
    qkv: int = 0  # bytes of `saved` that are queries, keys and values
    copied: int = 0  # bytes of `saved` that are its output, of which the next layer keeps a copy instead
    products_copied: int = 0  # and of `products`, where the next layer is not computed again when this one is
    logarithms: int = 0  # bytes of `saved` that are of the loss behind it, in place of its output
    behind: int = 0  # bytes of `saved` that are made after its last product, but for its output
    beside: int = 0  # bytes of a sample that are there while the layer goes back, and no longer
    beside_once: int = 0  # and those that do not grow with samples
    frozen: bool = False  # it is not trained
    stops: bool = False  # nor is any layer before it, so that nothing goes back through it
    kernels: Kernels = ()  # of the forward pass of one sample; none where only FLOPs and bytes are known

    @property
    def num_params(self) -> int:
        return _count(self.params)

    @property
    def num_expert_params(self) -> int:
        return _count(tuple((name, shape) for name, shape in self.params if name.startswith("experts.")))

    @property
    def param_bytes(self) -> int:
        return self.item * self.num_params

    @property
    def output_bytes(self) -> int:
        return self.item * math.prod(self.output)

    @property
    def left(self) -> int:
        """Bytes that are kept of a sample even if all of the layer is computed again: the next one's input."""
        return self.logarithms or self.output_bytes


@functools.lru_cache(maxsize=4096)  # layers of a model share their shapes, and are asked for their sizes often
def _count(params: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    return sum(math.prod(shape) for _, shape in params)


def num_params(layers: Sequence[Layer]) -> int:
    """Of all together; blocks share what names their parameters, of which with experts there are hundreds."""
    alike = {id(layer.params): layer for layer in layers}
    times = collections.Counter(id(layer.params) for layer in layers)
    return sum(number * alike[one].num_params for one, number in times.items())


def model_layers(spec: Spec, vocabulary: int) -> tuple[Layer, ...]:
    """The chain of `spec.model`, for a resolved spec. `vocabulary`: number of classes or of distinct tokens."""
    item = ITEM_BYTES[spec.precision or "fp32"]
    if spec.model == "cnn":
        return _cnn(vocabulary, item)
    if spec.model == "mlp":
        return _mlp(spec.layers, spec.hidden, vocabulary, item)
    tokens = math.ceil(vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if spec.vocabulary is not None:
        ranks = spec.devices if spec.mode in ("tensor", "sequence") else spec.tp or 1
        multiple = PADDING * ranks if spec.vocabulary % ranks else 1
        tokens = math.ceil(spec.vocabulary / multiple) * multiple
    return _decoder(Chain.of(spec), Decoder.of(spec, item), tokens)


def _conv(name: str, inputs: int, outputs: int, side: int, item: int) -> Layer:
    """A 5x5 convolution without padding, ReLU and a 2x2 max pool, on a side x side image."""
    after = side - 4
    pooled = after // 2
    # ReLU's output and the pool's places; and the pool's values
    behind = item * outputs * after**2 + 8 * outputs * pooled**2
    saved = behind + item * outputs * pooled**2
    return Layer(
        name,
        (("weight", (outputs, inputs, 5, 5)), ("bias", (outputs,))),
        2 * 25 * inputs * outputs * after**2,
        (outputs, pooled, pooled),
        saved,
        item,
        products=item * outputs * (after**2 + pooled**2),
        behind=behind,
    )


def _linear(name: str, inputs: int, outputs: int, item: int) -> Layer:
    """With a ReLU, whose output is kept."""
    params = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return Layer(name, params, 2 * inputs * outputs, (outputs,), item * outputs, item)


def _output(name: str, inputs: int, outputs: int, item: int) -> Layer:
    """The last one, of whose output the loss keeps the logarithms, in fp32."""
    layer = _linear(name, inputs, outputs, item)
    return replace(layer, saved=FP32 * outputs, logarithms=FP32 * outputs, behind=FP32 * outputs)


def _cnn(classes: int, item: int) -> tuple[Layer, ...]:
    """LeNet's shape (LeCun et al. 1998) in the widths of the Caffe example: 20, 50, 500."""
    return (
        _conv("conv1", 1, 20, 28, item),
        _conv("conv2", 20, 50, 12, item),
        _linear("fc1", 800, 500, item),
        _output("fc2", 500, classes, item),
    )


def _mlp(layers: int, hidden: int, classes: int, item: int) -> tuple[Layer, ...]:
    widths = [784] + [hidden] * layers
    sizes = enumerate(itertools.pairwise(widths), start=1)
    hidden_layers = [_linear(f"fc{i}", a, b, item) for i, (a, b) in sizes]
    return (*hidden_layers, _output("out", hidden, classes, item))


class Chain(NamedTuple):
    """Of a spec, what says which layers a decoder has, beside their sizes."""

    model: str
    layers: int
    positions: str | None
    tied: bool | None
    mtp: int | None
    dense_layers: int | None
    dense_ffn: int | None
    experts: int | None
    top_k: int | None
    shared_experts: int | None
    in_stages: bool

    @classmethod
    def of(cls, spec: Spec) -> Chain:
        in_stages = spec.mode in ("layer_split", "pipeline") or (spec.pp or 1) > 1
        return cls(*(getattr(spec, name) for name in cls._fields[:-1]), in_stages)


@functools.lru_cache(maxsize=256)  # a search asks for those of one model on many meshes
def _decoder(spec: Chain, sizes: Decoder, vocabulary: int) -> tuple[Layer, ...]:
    """A pre-norm decoder (Radford et al. 2019) with RMSNorm, no biases, and, unless asked for otherwise, learned
    positions and an untied head. A tied head is a copy of the embedding where it is on another device."""
    h, c, item = sizes.hidden, sizes.context, sizes.item
    embed_params = (("token.weight", (vocabulary, h)),)
    if spec.positions in (None, "learned"):
        embed_params += (("position.weight", (c, h)),)
    known = {"item": item, "copied": sizes.copied()}
    embed = Layer("embed", embed_params, 0, (c, h), sizes.sum_saved(), **known, kernels=sizes.embed_kernels())
    dense = [_block(sizes), _block(sizes, spec.dense_ffn)]
    routed = _routed(dense[0], sizes, spec) if family(spec.model) == "moe" else dense[0]
    beside, blocks = sizes.mlp_beside() if sizes.fused else 0, []
    for i in range(spec.layers):
        params, flops, saved, products, last, kernels = dense[1] if i < (spec.dense_layers or 0) else routed
        work = {"products": products, "last_flops": last, "beside": beside, "kernels": kernels}
        work["qkv"] = item * c * sizes.qkv()
        block = Layer(f"block{i + 1}", params, flops, (c, h), saved, **known, **work)
        blocks.append(block)
    for module in range(spec.mtp or 0):  # DeepSeek-AI 2024, arXiv:2412.19437, section 2.2
        blocks += [
            _ahead(spec, sizes, vocabulary, module),
            replace(blocks[-1], name=f"block{spec.layers + module + 1}"),
        ]
    blocks[-1:] = [replace(block, products_copied=sizes.copied()) for block in blocks[-1:]]  # by the head's norm
    # A copy of a tied embedding is held by the last of several stages.
    copied = not spec.tied or spec.in_stages
    head_params = (("norm.weight", (h,)), *((("linear.weight", (vocabulary, h)),) if copied else ()))
    times = 1 + (spec.mtp or 0)  # each module's tokens go through the same head
    flops, logits = times * 2 * c * h * vocabulary, times * sizes.logits_saved(vocabulary)
    kernels = (*sizes.norm_kernels(), *sizes.logits_kernels(vocabulary), *sizes.loss_kernels(vocabulary)) * times
    work = {"last_flops": flops, "kernels": kernels, "logarithms": logits, "behind": logits}
    kept = times * sizes.norm_saved() + logits  # a norm of its own for each
    head = Layer("head", head_params, flops, (c, vocabulary), kept, item, **work)
    if sizes.fused:
        beside, once = sizes.logits_beside(vocabulary)
        head = replace(head, beside=beside, beside_once=once)
    return (embed, *blocks, head)


def _ahead(spec: Chain, sizes: Decoder, vocabulary: int, module: int) -> Layer:
    """What a module that predicts a further token does before its block: it joins what the block before it gives and
    that token's embedding, each after a norm. The embedding is the model's own, of which the last stage has a copy."""
    h, c, item = sizes.hidden, sizes.context, sizes.item
    params = (("norm1.weight", (h,)), ("norm2.weight", (h,)), ("join.weight", (h, 2 * h)))
    if spec.in_stages and not module:
        params += (("token.weight", (vocabulary, h)),)
    kernels = (*sizes.embed_kernels(), *2 * sizes.norm_kernels(), matmul(c, h, 2 * h, item, given=0))
    saved, output = 2 * sizes.norm_saved() + sizes.sum_saved(), item * c * h
    work = {"products": output, "last_flops": 2 * c * 2 * h * h, "copied": sizes.copied(), "kernels": kernels}
    return Layer(f"ahead{module + 1}", params, 2 * c * 2 * h * h, (c, h), saved - sizes.copied(), item, **work)


_Block = tuple[tuple, int, int, int, int, Kernels]  # params, flops, saved, products, last_flops, kernels


def _block(sizes: Decoder, ffn: int | None = None) -> _Block:
    """Attention and a dense MLP."""
    h, c, item = sizes.hidden, sizes.context, sizes.item
    params = (*sizes.attention_params(), ("norm2.weight", (h,)), *sizes.mlp_params(ffn))
    # Kept: two norms, attention's, the sum, the MLP's, the last sum.
    saved = 2 * (sizes.norm_saved() + sizes.sum_saved()) + sizes.attention_saved() + sizes.mlp_saved(ffn=ffn)
    saved -= sizes.copied()
    # Its output, what attention keeps, and the results of its last matrix and of those of the MLP.
    last = 2 * c * h * (ffn or sizes.ffn)
    products = item * c * 3 * h + sizes.mlp_products(ffn=ffn) + sizes.attention_saved()
    products -= sizes.attention_repeated() + sizes.mlp_repeated(ffn=ffn)
    if sizes.repeats_scores:
        products = saved - sizes.scores_saved()
    flops = sizes.attention_flops() + sizes.mlp_flops(ffn=ffn)
    kernels = (
        *sizes.norm_kernels(), *sizes.attention_kernels(), *sizes.sum_kernels(),
        *sizes.norm_kernels(), *sizes.mlp_kernels(ffn=ffn), *sizes.sum_kernels(),
    )  # fmt: skip
    return params, flops, saved, products, last, kernels


def _routed(dense: _Block, sizes: Decoder, spec: Chain) -> _Block:
    """A block with a mixture of experts for its MLP (Fedus et al. 2021, arXiv:2101.03961): a router gives every token
    to `top_k` of the experts, and none is dropped. What experts share (DeepSeek-AI 2024, arXiv:2401.06066) all get."""
    h, c, k, item = sizes.hidden, sizes.context, spec.top_k, sizes.item
    shared = (spec.shared_experts or 0) * sizes.ffn
    experts, mlp = range(spec.experts), sizes.mlp_params()
    params = [*sizes.attention_params(), ("norm2.weight", (h,)), ("router.weight", (spec.experts, h))]
    params += [(f"shared.{name}", shape) for name, shape in (sizes.mlp_params(shared) if shared else ())]
    params += [(f"experts.{e}.{name}", shape) for e in experts for name, shape in mlp]
    flops = dense[1] + (k - 1) * sizes.mlp_flops() + 2 * c * h * spec.experts
    # Kept of a token: the router's probabilities, in fp32, and its choices (int64 thrice: which, in which order, and
    # back); of each of its copies the input, the MLP's, and the output.
    inside = sizes.mlp_saved()
    saved = dense[2] - inside + c * (FP32 * spec.experts + item * k * (1 + 2 * h)) + k * inside + 8 * c * 3 * k
    if shared:
        flops, saved = flops + sizes.mlp_flops(ffn=shared), saved + sizes.mlp_saved(ffn=shared)
    kernels = (
        *sizes.norm_kernels(), *sizes.attention_kernels(), *sizes.sum_kernels(), *sizes.norm_kernels(),
        *expert_kernels(sizes, spec.experts, c * k / spec.experts), *sizes.sum_kernels(),
        *(sizes.mlp_kernels(ffn=shared) if shared else ()),
    )  # fmt: skip
    # Of products the router's, in fp32, its experts' for each copy, and those of what they share, for the dense MLP's.
    made, whole = sizes.mlp_products(), item * c * h
    products = dense[3] + (k - 1) * (made + whole) + FP32 * c * spec.experts
    products += sizes.mlp_products(ffn=shared) + whole if shared else 0
    if sizes.repeats_scores:
        products = saved - sizes.scores_saved()
    # No product is at its end: what experts put out is weighted, which backward needs it for.
    return tuple(params), flops, saved, products, 0, kernels


def expert_kernels(sizes: Decoder, experts: int, tokens: float, ranks: int = 1) -> Kernels:
    """Copies sorted to experts and back, and each expert's matrices, for as many copies as it gets of a sample."""
    copies = sizes.item * experts * tokens * sizes.hidden
    inside = (kernel._replace(batch=experts) for kernel in sizes.mlp_kernels(ranks, tokens=max(1, round(tokens))))
    return (memory(2 * copies, 2 * copies), *inside, memory(3 * copies, 3 * copies))


def num_experts(layer: Layer) -> int:
    """How many experts a layer has; 0 where it has none."""
    return sum(name.startswith("experts.") and name.endswith(".up.weight") for name, _ in layer.params)


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """How many consecutive items each of `parts` parts gets, none empty, so that the costliest part is cheapest.

    Exact, by dynamic programming over prefixes. Ties are broken towards fewer items in the earlier parts, so the
    result is deterministic. Raises ValueError when there are fewer items than parts.
    """
    return _balance(tuple(costs), parts)


@functools.lru_cache(maxsize=4096)  # many jobs split one model into as many stages
def _balance(costs: tuple[float, ...], parts: int) -> tuple[int, ...]:
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
