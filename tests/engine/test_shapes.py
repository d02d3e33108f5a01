"""Layers have the sizes that papers and arithmetic give them; `balance` is as good as trying every split."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from engine.job import prepare
from engine.model.shapes import balance
from engine.spec import Spec


def layers_of(model: str, **settings):
    return prepare(Spec(mode="single", devices=1, model=model, **settings)).layers


def num_params(layer) -> int:
    return sum(math.prod(shape) for _, shape in layer.params)


def test_the_cnn_has_the_431080_parameters_of_caffes_lenet():
    layers = layers_of("cnn")
    assert [layer.name for layer in layers] == ["conv1", "conv2", "fc1", "fc2"]
    assert [num_params(layer) for layer in layers] == [520, 25_050, 400_500, 5_010]
    assert sum(layer.param_bytes for layer in layers) == 4 * 431_080
    assert [layer.output for layer in layers] == [(20, 12, 12), (50, 4, 4), (500,), (10,)]


def test_the_cnns_flops_are_two_for_each_multiplication():
    """conv1: 20 maps of 24 x 24, each from 25 inputs; conv2: 50 maps of 8 x 8, each from 25 x 20; then two matrices."""
    assert [layer.flops for layer in layers_of("cnn")] == [
        2 * 20 * 24 * 24 * 25,
        2 * 50 * 8 * 8 * 500,
        2 * 800 * 500,
        2 * 500 * 10,
    ]


def test_what_the_cnn_keeps_for_backward():
    """conv: ReLU's output before the pool, the pool's indices, which torch keeps as int64, and its output, which is the
    next one's input; fc1: ReLU's output; fc2: the logarithms of the probabilities, for the loss."""
    conv1, conv2, fc1, fc2 = layers_of("cnn")
    assert conv1.saved == 4 * (20 * 24 * 24 + 20 * 12 * 12) + 8 * 20 * 12 * 12
    assert conv2.saved == 4 * (50 * 8 * 8 + 50 * 4 * 4) + 8 * 50 * 4 * 4
    assert (fc1.saved, fc2.saved) == (4 * 500, 4 * 10)


def test_an_mlp_is_its_hidden_layers_and_an_output():
    layers = layers_of("mlp", layers=3, hidden=32)
    assert [layer.name for layer in layers] == ["fc1", "fc2", "fc3", "out"]
    assert [num_params(layer) for layer in layers] == [785 * 32, 33 * 32, 33 * 32, 33 * 10]
    assert [layer.flops for layer in layers] == [2 * 784 * 32, 2 * 32 * 32, 2 * 32 * 32, 2 * 32 * 10]


@pytest.mark.parametrize(("hidden", "context"), [(64, 16), (128, 64), (256, 512)])
def test_a_gpt_block_costs_what_narayanan_and_others_count(hidden, context):
    """24 s h^2 + 4 s^2 h FLOPs forward (2021, arXiv:2104.04473, appendix), and 12 h^2 parameters plus two norms."""
    embed, *blocks, head = layers_of("gpt", layers=3, hidden=hidden, context=context, dataset="synthetic")
    assert len(blocks) == 3
    for block in blocks:
        assert block.flops == 24 * context * hidden**2 + 4 * context**2 * hidden
        assert num_params(block) == 12 * hidden**2 + 2 * hidden
        assert block.output == (context, hidden)
    vocabulary = 96  # 64 tokens, and as many rows more as make it a multiple of 48
    assert num_params(embed) == (vocabulary + context) * hidden and embed.flops == 0
    assert num_params(head) == (vocabulary + 1) * hidden
    assert head.flops == 2 * context * hidden * vocabulary
    assert head.output == (context, vocabulary)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (8, 1), (8, 8)])
def test_a_mixture_of_experts_has_all_of_them_and_computes_with_a_few(experts, top_k):
    """4 h^2 parameters of attention, E h of the router, 8 h^2 of each expert; FLOPs of k experts a token."""
    sizes = {"hidden": 64, "context": 16, "dataset": "synthetic", "experts": experts, "top_k": top_k}
    _, block, _ = layers_of("moe", layers=1, **sizes)
    h, c = 64, 16
    assert num_params(block) == 4 * h * h + 2 * h + experts * h + experts * 8 * h * h
    assert block.flops == 8 * c * h * h + 4 * c * c * h + 2 * c * h * experts + top_k * 16 * c * h * h


def worst(costs, sizes) -> float:
    ends = list(itertools.accumulate(sizes))
    return max(sum(costs[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def every_split(items: int, parts: int):
    for cuts in itertools.combinations(range(1, items), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, items)))


@pytest.mark.parametrize("most", [1, 3, 100])
def test_balance_is_as_good_as_the_best_of_all_splits(most):
    """Costs are small whole numbers, so that sums are exact and many splits are equally good; some cost nothing."""
    draw = random.Random(most)
    for _ in range(150):
        costs = [float(draw.randint(0, most)) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(costs))
        sizes = balance(costs, parts)
        assert len(sizes) == parts and sum(sizes) == len(costs) and min(sizes) >= 1
        assert worst(costs, sizes) == min(worst(costs, split) for split in every_split(len(costs), parts))


def test_balance_breaks_ties_towards_fewer_items_first():
    assert balance([1.0] * 5, 3) == (1, 2, 2)
    assert balance([1.0] * 6, 4) == (1, 1, 2, 2)
    assert balance([0.0] * 4, 2) == (1, 3)
    assert balance([9.0, 1.0, 1.0, 1.0], 2) == (1, 3)


def test_balance_is_not_just_equal_numbers_of_items():
    """Negative control: three items each would cost 11."""
    assert balance([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == (1, 5)


def test_balance_of_a_thousand_layers_does_not_take_long():
    """The best split of equal items into a divisor of their number is even; a cubic search would take minutes."""
    assert balance([3.0] * 1024, 512) == (2,) * 512


@pytest.mark.parametrize("parts", [0, 4, -1])
def test_items_cannot_be_split_into_more_parts_than_there_are(parts):
    with pytest.raises(ValueError, match=f"cannot split 3 items into {parts}"):
        balance([1.0, 1.0, 1.0], parts)
