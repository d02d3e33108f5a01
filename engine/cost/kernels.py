"""What a layer computes -> the kernels of its passes: matmuls by shape, attention, and what only moves bytes.

The backward pass of a product Y[m, n] = X[m, k] W[k, n] is two products of the same size: the input's gradient
dX[m, k] = dY[m, n] W^T and the weight's gradient dW[k, n] = X^T dY (m is summed). Zero-bubble schedules run them as two
ops (Qi et al. 2024, arXiv:2401.10241, section 2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY = "matmul", "attention", "attention_backward", "memory"


class Kernel(NamedTuple):
    """`matmul`: `batch` products of [m, k] and [k, n]; where `weight`, the second one is a parameter, and samples add
    to m, else to the batch. `attention`: `batch` heads of m queries and n keys of k numbers, without writing the scores
    (Dao et al. 2022, arXiv:2205.14135); `half`: only keys that are not later than the query. `memory`: `bytes` read and
    written, `backward` in the backward pass; of a product, in which its operand is cast where it is made of 8 bits.
    `item`: bytes of a number."""

    kind: str
    m: int = 0
    n: int = 0
    k: int = 0
    batch: float = 1
    item: int = 2
    weight: bool = True
    half: bool = False
    of_weight: bool = False  # makes a weight's gradient
    bytes: float = 0
    backward: float = 0
    stepwise: float = 0  # bytes more where each operation of a loss is a kernel of its own
    wide: bool = False  # a product that stays in 16 bits where others are in 8
    only: str = ""  # of bytes that move only in software that does so: one of those below
    named: str = ""  # a product of a layer, beside which tokens of tensor ranks may travel

    @property
    def flops(self) -> float:
        """A multiply-add is two. Attention is two products, backward five: it makes the scores again (Dao 2023)."""
        products = {MATMUL: 1.0, ATTENTION: 2.0, ATTENTION_BACKWARD: 5.0}.get(self.kind, 0.0)
        return products * 2 * self.batch * self.m * self.n * self.k / (2 if self.half else 1)


Kernels = tuple[Kernel, ...]
# What is gathered of a layer is copied to a tensor for each parameter, and gradients of these into the one that is
# reduced (torch's fully_shard: split_with_sizes_copy and chunk_cat, both on the stream that computes); or parameters
# are views of one flat tensor, of whose gradient those of the views are made one (FullyShardedDataParallel: the way
# back of torch.split).
EACH_PARAMETER, FLAT_PARAMETER = "each parameter", "flat parameter"
# What tensor ranks send each other in turn, while a product works on the next part, is summed when all is there
# (Transformer Engine, comm_gemm_overlap.cpp: CommOverlapP2PBase::split_overlap_rs).
SUMMED_LAST = "summed last"
# Products of a block, and the gradient of one's weight.
QKV, PROJ, DOWN = "qkv", "proj", "down"
OF_WEIGHT = " weight"
MOVED = ("bytes", "backward", "stepwise")


# Bytes in which a number becomes 8 bits wide: read in 16, and written as it is and transposed, since Hopper's tensor
# cores take 8 bits in one order only (Micikevicius et al. 2022, arXiv:2209.05433; Transformer Engine, cast_transpose).
CAST = 4


def matmul(m: int, n: int, k: int, item: int, *, given: float = 1.0, back: float = 1.0, named: str = "") -> Kernel:
    """A product with a parameter, of one sample. In 8 bits its operand and its result's gradient are cast, or the
    `given` and `back` parts of them: nothing is where a norm writes its result so, and of tokens that ranks share each
    casts its own before they are gathered. The matrix is cast once a step, which is left out."""
    return Kernel(MATMUL, m, n, k, item=item, bytes=CAST * given * m * k, backward=CAST * back * m * n, named=named)


def wide_matmul(m: int, n: int, k: int, item: int) -> Kernel:
    """One that stays in 16 bits where others are in 8: logits (Transformer Engine's and torchao's recipes)."""
    return Kernel(MATMUL, m, n, k, item=item, wide=True)


def memory(forward: float, backward: float, *, only: str = "") -> Kernel:
    """Bytes that a pass reads and writes, of one sample."""
    return Kernel(MEMORY, bytes=forward, backward=backward, only=only)


def _times(kernel: Kernel, samples: int) -> Kernel:
    if kernel.kind == MEMORY:
        return kernel._replace(**{name: getattr(kernel, name) * samples for name in MOVED})
    if kernel.kind == MATMUL and kernel.weight:
        cast = {"bytes": kernel.bytes * samples, "backward": kernel.backward * samples}
        return kernel._replace(m=kernel.m * samples, **cast)
    return kernel._replace(batch=kernel.batch * samples)


def of_part(kernels: Kernels, parts: int) -> Kernels:
    """Of a layer that does as much for each token: those of one of so many equal parts of a sample."""
    return tuple(
        kernel._replace(m=kernel.m // parts, **{name: getattr(kernel, name) / parts for name in MOVED})
        for kernel in kernels
    )


@functools.lru_cache(maxsize=4096)
def forward(kernels: Kernels, samples: int) -> Kernels:
    return tuple(_times(kernel, samples) for kernel in kernels)


@functools.lru_cache(maxsize=4096)
def recomputed(kernels: Kernels, samples: int, *, selective: bool, whole: bool) -> Kernels:
    """What is done again before backward: all, or all up to the last product, whose result it does not need; or,
    selectively, no products with parameters, but attention where its scores were not kept (Korthikanti et al. 2022,
    arXiv:2205.05198, section 5)."""
    again = forward(kernels, samples)
    if selective:
        return tuple(kernel for kernel in again if kernel.kind == MEMORY or not kernel.weight)
    if whole:
        return again
    last = max((i for i, kernel in enumerate(again) if kernel.kind == MATMUL and kernel.weight), default=len(again))
    return again[:last]


def without_qkv(kernels: Kernels) -> tuple[Kernels, Kernels]:
    """A block's kernels without those that make queries, keys and values of what its first norm gives; and these."""
    attends = next((i for i, kernel in enumerate(kernels) if kernel.kind != MEMORY and not kernel.weight), 0)
    first = next((i for i, kernel in enumerate(kernels[:attends]) if kernel.kind == MATMUL), attends)
    return kernels[:first] + kernels[attends:], kernels[first:attends]


@functools.lru_cache(maxsize=4096)
def every_other(kernels: Kernels, samples: int) -> Kernels:
    """What is done again where the results of attention and of every other product are kept, from the first on, and
    nothing else (TorchTitan's activation_checkpoint, `selective` by `op`)."""
    again, products = [], 0
    for kernel in forward(kernels, samples):
        products += kernel.kind == MATMUL and kernel.weight
        if kernel.kind == MEMORY or (kernel.kind == MATMUL and kernel.weight and products % 2 == 0):
            again.append(kernel)
    return tuple(again)


@functools.lru_cache(maxsize=4096)
def input_gradient(kernels: Kernels, samples: int) -> Kernels:
    """What the layer before waits for."""
    return tuple(made for kernel in reversed(forward(kernels, samples)) for made in _input_gradient(kernel))


def _input_gradient(kernel: Kernel) -> Iterable[Kernel]:
    if kernel.kind == MEMORY:
        yield kernel._replace(bytes=kernel.backward, stepwise=0)
    elif kernel.kind == ATTENTION:
        yield kernel._replace(kind=ATTENTION_BACKWARD)
    else:
        yield kernel._replace(n=kernel.k, k=kernel.n, bytes=kernel.backward, named="")
        if not kernel.weight:  # both factors are activations
            yield kernel._replace(m=kernel.n, n=kernel.k, k=kernel.m)


@functools.lru_cache(maxsize=4096)
def weight_gradient(kernels: Kernels, samples: int) -> Kernels:
    """What nobody waits for but the optimizer."""
    products = [kernel for kernel in reversed(forward(kernels, samples)) if kernel.kind == MATMUL and kernel.weight]
    return tuple(
        kernel._replace(
            m=kernel.k, k=kernel.m, bytes=0, of_weight=True, named=kernel.named and kernel.named + OF_WEIGHT
        )
        for kernel in products
    )


def halves(kernels: Kernels) -> tuple[Kernels, Kernels]:
    """Those of a backward pass for the gradient of the input, and for those of weights."""
    return tuple(k for k in kernels if not k.of_weight), tuple(k for k in kernels if k.of_weight)


def attention_flops(kernels: Kernels) -> float:
    """Of a forward pass those of products of tokens with tokens, over the full square: no parameter is in them."""
    core = (kernel for kernel in kernels if kernel.m and not kernel.weight)
    return sum((4 if k.kind == ATTENTION else 2) * k.batch * k.m * k.n * k.k for k in core)


def operands(kernels: Kernels) -> int:
    """Bytes of what weights' gradients are made of: inputs of products, and gradients of their outputs. Of a block they
    are 32 of the 34 + 5 a s / h that its forward keeps of a number (Qi et al. 2024, table 1)."""
    return int(sum(kernel.item * kernel.batch * kernel.k * (kernel.m + kernel.n) for kernel in halves(kernels)[1]))


@functools.lru_cache(maxsize=4096)
def backward(kernels: Kernels, samples: int) -> Kernels:
    return input_gradient(kernels, samples) + weight_gradient(kernels, samples)
