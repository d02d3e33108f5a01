"""Kernels cost what arithmetic, tiles and bytes say; a backward pass is the two products of each product."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.cost import kernels
from engine.cost.kernels import ATTENTION, MATMUL, Kernel
from engine.cost.machine import machine
from engine.cost.matmul import ELEMENTWISE, kernel_seconds, kernels_seconds
from engine.job import prepare
from engine.model import chain
from engine.model.decoder import Decoder
from engine.predict import predict
from engine.spec import Spec

A100 = machine("a100").at("bf16")


def rate(kernel: Kernel, on=A100) -> float:
    return kernel.flops / kernel_seconds(kernel, on) / on.flop_rate


def test_a_large_square_product_is_near_the_rate_of_a_large_one():
    assert 0.93 < rate(Kernel(MATMUL, 8192, 8192, 8192)) <= 1


def test_a_product_is_as_slow_as_its_waves_and_its_edges():
    """108 tiles of 256 x 128 fill an A100 once; one row of tiles more takes a second wave, almost empty."""
    full, over = Kernel(MATMUL, 27 * 256, 4 * 128, 8192), Kernel(MATMUL, 27 * 256 + 1, 4 * 128, 8192)
    assert rate(over) < 0.95 * rate(full)
    assert rate(Kernel(MATMUL, 8192, 8192, 64)) < 0.5 * rate(Kernel(MATMUL, 8192, 8192, 8192))  # little depth


def test_a_thin_product_is_bound_by_reading_its_matrix():
    """One row through a matrix of 8192 x 8192 in two bytes: 134 MB at the memory's rate."""
    thin = kernel_seconds(Kernel(MATMUL, 1, 8192, 8192), A100)
    assert thin >= 2 * 8192**2 / A100.memory_rate + A100.op_overhead


def test_causal_attention_is_half_of_the_square_and_flops_count_it():
    whole, half = (Kernel(ATTENTION, 8192, 8192, 128, batch=32, half=half) for half in (False, True))
    assert whole.flops == 4 * 32 * 8192**2 * 128 == 2 * half.flops
    assert kernel_seconds(half, A100) / kernel_seconds(whole, A100) == pytest.approx(0.5, rel=0.03)


def test_fp8_speeds_up_products_and_not_attention():
    h100 = machine("h100")
    product, attention = Kernel(MATMUL, 8192, 8192, 8192), Kernel(ATTENTION, 4096, 4096, 128, batch=32)
    assert 1.6 < kernel_seconds(product, h100.at("bf16")) / kernel_seconds(product, h100.at("fp8")) < 2
    logits = kernels.wide_matmul(8192, 8192, 8192, 2)
    for same in (attention, logits):
        assert kernel_seconds(same, h100.at("bf16")) == kernel_seconds(same, h100.at("fp8"))


def test_what_a_tile_does_beside_its_products_takes_as_long_in_8_bits():
    """Seconds against depth are a line; where it meets no depth is the same in both (46 and 40 us on an H800)."""
    h100, least = machine("h100"), {}
    for precision in ("bf16", "fp8"):
        short, long = (kernel_seconds(Kernel(MATMUL, 8192, 8192, k), h100.at(precision)) for k in (4096, 8192))
        least[precision] = 2 * short - long - h100.op_overhead
    assert least["bf16"] == pytest.approx(least["fp8"]) and 30e-6 < least["bf16"] < 50e-6


def test_what_a_deterministic_kernel_writes_is_filled_before():
    """A product's result of 2 MB, an output of attention, the three that its way back makes, a third of what only moves
    bytes; a weight's gradient is added to what is there."""
    a100 = machine("a100")
    fills, size = replace(a100, fills=True), 2 * 1024 * 1024
    product = kernels.matmul(1024, 1024, 4096, 2)
    attention = Kernel(ATTENTION, 1024, 1024, 128, batch=8, weight=False)
    for kernel, written in (
        (product, size),
        (kernels.weight_gradient((product,), 1)[0], 0),
        (attention, size),
        (kernels.input_gradient((attention,), 1)[0], 3 * size),
        (kernels.memory(3 * size, 3 * size), size),
    ):
        more = kernel_seconds(kernel, fills) - kernel_seconds(kernel, a100)
        assert more == pytest.approx(a100.op_overhead + written / a100.memory_rate)


def test_operations_of_a_loss_each_go_over_the_logits():
    """Of a logit in two bytes: made four, which are read or written 4 times, or 9 where each operation is a kernel."""
    spec = prepare(Spec(mode="single", devices=1, model="llama3_8b", context=1024)).spec
    once, twice = (kernels.forward(Decoder.of(spec, 2).loss_kernels(128_256), samples)[0] for samples in (1, 2))
    assert (once.bytes, once.backward) == (1024 * 128_256 * (2 + 4 * 4), 1024 * 128_256 * (3 * 4 + 2))
    h100 = machine("h100")
    apart = replace(h100, stepwise_loss=True)
    for loss, samples in ((once, 1), (twice, 2)):
        more = kernel_seconds(loss, apart) - kernel_seconds(loss, h100)
        assert more == pytest.approx(samples * 1024 * 128_256 * 5 * 4 / (ELEMENTWISE * h100.memory_rate))
        (back,) = kernels.input_gradient((loss,), 1)
        assert kernel_seconds(back, apart) == kernel_seconds(back, h100)


def test_operands_are_cast_to_8_bits_but_those_that_a_norm_writes_so():
    """Each number of a product's input and of its result's gradient: 2 bytes read, 2 x 1 written. Of two tensor ranks'
    the gradient behind a cut matrix is cast by each for its own tokens."""
    spec = Spec(mode="single", devices=1, model="llama3_8b", layers=1, context=1024)
    sizes = Decoder.of(prepare(spec).spec, 2)
    up, _, down, _ = sizes.mlp_kernels(ranks=2)
    inside = 14_336 // 2
    assert (up.bytes, up.backward) == (0, 4 * 1024 * 2 * inside)
    assert (down.bytes, down.backward) == (4 * 1024 * inside, 4 * 1024 * 4096 // 2)
    h100, moved = machine("h100"), 4 * 1024 * inside
    plain = down._replace(bytes=0, backward=0)
    more = kernel_seconds(down, h100.at("fp8")) - kernel_seconds(plain, h100.at("fp8"))
    assert more == pytest.approx(h100.op_overhead + moved / (ELEMENTWISE * h100.memory_rate))
    assert kernel_seconds(down, h100.at("bf16")) == kernel_seconds(plain, h100.at("bf16"))
    given = [kernel for kernel in kernels.input_gradient((down,), 3) if kernel.kind == MATMUL]
    assert [kernel.bytes for kernel in given] == [3 * down.backward]
    assert [kernel.bytes for kernel in kernels.weight_gradient((down,), 3)] == [0]


@pytest.mark.parametrize("samples", [1, 3])
def test_backward_is_the_two_products_of_each_product(samples):
    layer = prepare(Spec(mode="single", devices=1, model="llama3_8b", context=1024)).layers[1]
    ahead, back = kernels.forward(layer.kernels, samples), kernels.backward(layer.kernels, samples)
    products = [sum(k.flops for k in each if k.kind == MATMUL) for each in (ahead, back)]
    assert products[1] == 2 * products[0]
    inputs, weights = kernels.halves(back)
    assert sum(k.flops for k in weights) == products[0] and all(k.kind == MATMUL for k in weights)
    assert {(k.m, k.n, k.k) for k in weights} == {(k.k, k.n, k.m) for k in ahead if k.kind == MATMUL}
    assert sum(k.flops for k in inputs) == products[0] + 2.5 * sum(k.flops for k in ahead if k.kind == ATTENTION)


def test_a_layers_kernels_have_its_flops():
    """But attention's, of which kernels count what causal attention computes, and layers the full square."""
    block = prepare(Spec(mode="single", devices=1, model="gpt3_175b")).layers[1]
    square = 4 * 2048**2 * 12_288
    assert sum(kernel.flops for kernel in block.kernels) == block.flops - square / 2
    unfused = prepare(Spec(mode="single", devices=1, model="gpt3_175b", flash=False)).layers[1]
    assert sum(kernel.flops for kernel in unfused.kernels) == block.flops


@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_ranks_that_share_a_layer_share_its_products(mode):
    spec = Spec(mode=mode, devices=4, model="llama3_8b", context=1024, layers=2, global_batch=1, machine="h100")
    (program,) = predict(spec).plan.programs
    whole = [kernel for layer in prepare(spec).layers for kernel in layer.kernels]
    of = {kind: [k for op in program.ops if op.kind == kind for k in op.kernels] for kind in ("forward", "backward")}
    products = sum(kernel.flops for kernel in whole)
    assert sum(kernel.flops for kernel in of["forward"]) == products / 4
    assert (
        sum(k.flops for k in of["backward"] if k.kind == MATMUL) == sum(k.flops for k in whole if k.kind == MATMUL) / 2
    )


def test_recomputing_ends_where_backward_needs_no_more_unless_all_is_done_again():
    spec = Spec(mode="single", devices=1, model="gpt3_175b", layers=1, global_batch=1, recompute="full")
    repeated = {
        stop: sum(
            kernel.flops
            for layer in prepare(spec).layers[1:2]
            for kernel in chain.recompute(layer, 1, spec.with_(early_stop=stop)).kernels
        )
        for stop in (None, False)
    }
    assert repeated[False] - repeated[None] == 2 * 2048 * 12_288 * 4 * 12_288  # the last matrix of the MLP


def test_the_optimizer_moves_30_bytes_of_a_parameter_with_master_weights():
    """AdamW in fp32: the gradient read; weight and two moments read and written; the weight of two bytes written."""
    spec = Spec(mode="single", devices=1, model="gpt3_175b", layers=1, optimizer="adamw", master_weights=True)
    job = prepare(spec)
    held = sum(layer.num_params for layer in job.layers)
    assert chain.optimizer(job.layers, job.spec).bytes == 30 * held
    memory = chain.standing_memory(job.layers, job.spec)
    assert sum(memory[name] for name in ("parameters", "gradients", "optimizer")) == 18 * held
    assert memory["weight gradients"] == 2 * 12 * 12_288**2  # of a block's matrices


def test_a_kernel_never_takes_less_than_its_launch():
    nothing = replace(A100, flop_rate=math.inf, memory_rate=math.inf, flash_rate=math.inf)
    layer = prepare(Spec(mode="single", devices=1, model="llama3_8b")).layers[1]
    assert kernels_seconds(layer.kernels, nothing) == pytest.approx(len(layer.kernels) * A100.op_overhead)
