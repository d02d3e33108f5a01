"""A kernel and a GPU -> seconds: products by their shape, attention by its pairs, everything else by its bytes.

A product is cut into tiles, one to a multiprocessor at a time (NVIDIA, "Matrix Multiplication Background User's Guide",
sections 3 and 4). Three things keep it from the rate of a large one: tiles at the edges that are not full; the last
wave, in which not all multiprocessors have a tile; and what each tile does beside its products: it waits for its first
operands, and writes its result. Smaller tiles fill edges and waves better, and read their operands more often; of all
tiles the one that is done first is taken, as cuBLAS's heuristics do. And no product is faster than its operands are
read from memory and its result is written (Williams et al. 2009, doi 10.1145/1498765.1498785).
"""

from __future__ import annotations

import functools
import math

from engine.cost.hardware import Machine
from engine.cost.kernels import ATTENTION, ATTENTION_BACKWARD, MATMUL, MEMORY, Kernel, Kernels

# (rows, columns, rate beside that of the first, which reads its operands least often), as in CUTLASS's profiler.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
# What a tile does beside its products takes as long as so many more terms of each sum: a wait of about 1 us for the
# first operands, and a result of 64 kB to be written at a multiprocessor's share of the memory's rate. It is as long in
# 8 bits: lines through the times of products of [8192, k] and [k, 8192] on an H800 begin at 46 us in 16 bits, and at 40
# in 8 (tile-lang, benchmark/matmul and matmul_fp8).
BESIDE = 192
# Of the rate of attention forward, what it reaches backward, where it makes the scores again (Dao 2023,
# arXiv:2307.08691, section 4.1: 73 % and 63 % of an A100's peak at most).
FLASH = {ATTENTION: 1.0, ATTENTION_BACKWARD: 0.86}
# Of the rate of a large copy, what norms, softmax, activations and sums reach, forward and backward: they reduce over
# rows, and have operands of several shapes. Fitted on A100s (docs/decisions).
ELEMENTWISE = 0.70
# Queries that a block of attention handles together: pairs behind them that a mask spares are spared by blocks.
FLASH_BLOCK = 128
# Bytes at whose multiples rows of operands have to begin for a product's usual rate, and the part of it that is left
# where they do not (NVIDIA, "Matrix Multiplication Background", section 2.1); a head of 108 numbers, not of 104 or 112.
# Batches of products run without tensor cores then: 19.5 of 312 TFLOP/s of an A100 (data sheet). That they do was
# inferred from published rows with heads of 108, and held to others, with heads of 150 (docs/decisions/published.md).
ALIGNMENT, UNALIGNED, UNALIGNED_BATCH = 16, 0.25, 1 / 16
FP32 = 4  # bytes
# Products of experts, each with its own matrix, are launched one by one (Transformer Engine's GroupedLinear: cuBLAS on
# four streams): none takes less than its host needs for it. 160 products of [154, 1536] and [1536, 5120] took 9 us each
# on a B200, and 80 of twice as many tokens too (SimuMax, configs/system/b200_bf16_ceperm.json, group_matmul).
LAUNCHED_EACH = 9e-6


@functools.lru_cache(maxsize=65_536)  # layers of a model share their kernels
def kernels_seconds(kernels: Kernels, machine: Machine) -> float:
    return sum(kernel_seconds(kernel, machine) for kernel in kernels)


@functools.lru_cache(maxsize=65_536)
def kernel_seconds(kernel: Kernel, machine: Machine) -> float:
    if kernel.only and kernel.only not in machine.does:
        return 0.0
    filled = (
        machine.op_overhead + _written(kernel, machine.stepwise_loss) / machine.memory_rate if machine.fills else 0.0
    )
    return machine.op_overhead + _working(kernel, machine) + filled


def _working(kernel: Kernel, machine: Machine) -> float:
    if kernel.kind == MEMORY:
        times = 1.0 if kernel.only else machine.unfused
        moved = times * kernel.bytes + (kernel.stepwise if machine.stepwise_loss else 0)
        return moved / (ELEMENTWISE * machine.memory_rate)
    if kernel.kind == MATMUL:
        return _multiplying(kernel, machine) + _cast(kernel, machine)
    masked = 1 + FLASH_BLOCK / kernel.n if kernel.half else 1.0
    rate = machine.flash_rate * FLASH[kernel.kind] / (machine.fp16_gain if kernel.item == FP32 else 1.0)
    work = kernel.flops * min(2.0, masked) / rate
    tensors = 4 if kernel.kind == ATTENTION else 8  # q, k, v and the output; backward all of them and their gradients
    traffic = tensors * kernel.item * kernel.batch * kernel.m * kernel.k
    return max(work, traffic / machine.memory_rate)


def _multiplying(kernel: Kernel, machine: Machine) -> float:
    """Of experts a gradient is added to what is there when its products are through: each has few tokens to sum over,
    and a large result. 16 such products on a B200 took as long as both one after the other (SimuMax, the same file)."""
    moving, experts = _traffic(kernel) / machine.memory_rate, kernel.weight and kernel.batch > 1
    if experts and kernel.of_weight:
        seconds = _product(kernel, machine, beside=0) + moving
    else:
        seconds = max(_product(kernel, machine, BESIDE), moving)
    return max(seconds, kernel.batch * LAUNCHED_EACH) if experts and not machine.fused_experts else seconds


def _written(kernel: Kernel, stepwise: bool) -> float:
    """Bytes of the tensors that a kernel makes: weights' gradients are added to what is there, and of what only moves
    bytes two are read for one that is written."""
    if kernel.kind == MEMORY:
        return (kernel.bytes + (kernel.stepwise if stepwise else 0)) / 3
    if kernel.kind == MATMUL:
        return 0.0 if kernel.of_weight else kernel.item * kernel.batch * kernel.m * kernel.n
    return (1 if kernel.kind == ATTENTION else 3) * kernel.item * kernel.batch * kernel.m * kernel.k


def _product(kernel: Kernel, machine: Machine, beside: float) -> float:
    """`beside`: terms of a sum that what a tile does besides takes as long as, in 16 bits."""
    one = _rate(kernel, machine) / machine.sms  # of a multiprocessor
    beside *= machine.fp8_gain / machine.bf16_gain if _in_8_bits(kernel, machine) else 1.0
    sms = machine.sms - (dict(machine.taken).get(kernel.named, 0) if kernel.named else 0)
    best = math.inf
    for rows, columns, rate in TILES:
        tiles = kernel.batch * math.ceil(kernel.m / rows) * math.ceil(kernel.n / columns)
        waves = math.ceil(tiles / sms)
        best = min(best, waves * 2 * rows * columns * (kernel.k + beside) / (rate * one))
    return best if _aligned(kernel) else best / (UNALIGNED if kernel.weight else UNALIGNED_BATCH)


def _in_8_bits(kernel: Kernel, machine: Machine) -> bool:
    return machine.precision == "fp8" and kernel.weight and not kernel.wide


def _rate(kernel: Kernel, machine: Machine) -> float:
    if machine.precision != "fp8" or _in_8_bits(kernel, machine):
        return machine.flop_rate
    return machine.flop_rate * machine.bf16_gain / machine.fp8_gain


def _cast(kernel: Kernel, machine: Machine) -> float:
    """Seconds in which a product's operand is made 8 bits wide; those of a weight's gradient were before."""
    if not kernel.bytes or not _in_8_bits(kernel, machine):
        return 0.0
    return machine.op_overhead + kernel.bytes / (ELEMENTWISE * machine.memory_rate)


def _aligned(kernel: Kernel) -> bool:
    """Whether rows of the operands begin at multiples of what a tensor core's loads take: of a weight's gradient these
    are what a token is given and what becomes of it, and the sum goes over tokens."""
    rows = (kernel.n, kernel.m if kernel.of_weight else kernel.k)
    return all(size * kernel.item % ALIGNMENT == 0 for size in rows)


def _traffic(kernel: Kernel) -> float:
    """Operands read and the result written; a weight's gradient is added to what is there, in fp32."""
    m, n, k = kernel.m, kernel.n, kernel.k
    result = 2 * FP32 if kernel.of_weight else kernel.item
    return kernel.batch * (kernel.item * (m * k + k * n) + result * m * n)
