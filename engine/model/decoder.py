"""The sizes of a decoder (gpt, moe, and the published models like them) -> what its parts hold, compute, keep and run.

Each part is asked for one sample, on one of `ranks` ranks that share its matrices (Shoeybi et al. 2019,
arXiv:1909.08053): heads and the middle of the MLP are cut, the tokens' own width is not. `tokens`: those of the sample
that the rank has where the matrices are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cost import kernels
from engine.cost.kernels import Kernel, Kernels
from engine.model.presets import LATENT, Latent
from engine.spec import Spec

FP32 = 4  # bytes
ITEM_BYTES = {"fp32": FP32, "bf16": 2, "fp16": 2, "fp8": 2}  # of a number kept; fp8 is made of bf16 for each product
GATED = ("swiglu",)  # activations with a third matrix


@dataclass(frozen=True, slots=True)
class Decoder:
    hidden: int
    heads: int
    kv_heads: int
    head: int  # numbers of one head
    ffn: int
    gated: bool
    context: int
    item: int
    rotary: bool
    flash: bool  # attention never writes its scores
    fused: bool  # norms keep what they are given, which is there already, and no copy of it
    dropout: bool  # behind attention and MLP, and of scores where these are written, with a mask of a byte each
    latent: Latent | None
    every_other: bool = False  # of products that are kept
    loss: str | None = None  # of TORCH_LOSSES; else as Megatron-LM has it
    logits_fused: bool = False  # the loss is one kernel, and keeps no copy of the logits

    @classmethod
    def of(cls, spec: Spec, item: int, tokens: int | None = None) -> Decoder:
        """Of a spec with the model's defaults filled in; what is left open is as in the first GPTs. `tokens`: of a
        sample, those that a rank has, if not all."""
        return cls(
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads or spec.heads,
            head=spec.head_dim or spec.hidden // spec.heads,
            ffn=spec.ffn or 4 * spec.hidden,
            gated=spec.activation in GATED,
            context=tokens or spec.context,
            item=item,
            rotary=spec.positions == "rotary",
            flash=spec.flash is not False,
            fused=bool(spec.master_weights),
            dropout=bool(spec.dropout),
            latent=LATENT.get(spec.model),
            every_other=bool(spec.every_other),
            loss=spec.torch_loss,
            logits_fused=bool(spec.fused_loss),
        )

    @property
    def repeats_scores(self) -> bool:
        """Whether recomputing selectively repeats nothing but scores (Korthikanti et al. 2022, section 5)."""
        return self.fused and not self.flash

    # --- attention ------------------------------------------------------------------------------------------------

    def queries(self, ranks: int = 1) -> int:
        """Width of a token's queries, and of what attention makes of them."""
        return self.heads * (self.latent.value if self.latent else self.head) // ranks

    def qkv(self, ranks: int = 1) -> int:
        """Width of a token's queries, keys and values together."""
        if self.latent:
            own = self.latent
            return self.heads * (2 * (own.plain + own.rotary) + own.value) // ranks
        return (self.heads + 2 * max(self.kv_heads, ranks)) * self.head // ranks

    def attention_params(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        h, own = self.hidden, self.latent
        if own is None:
            return (("norm1.weight", (h,)), ("qkv.weight", (self.qkv(), h)), ("proj.weight", (h, self.queries())))
        return (
            ("norm1.weight", (h,)),
            ("q_down.weight", (own.query, h)),
            ("q_norm.weight", (own.query,)),
            ("q_up.weight", (self.heads * (own.plain + own.rotary), own.query)),
            ("kv_down.weight", (own.key_value + own.rotary, h)),
            ("kv_norm.weight", (own.key_value,)),
            ("kv_up.weight", (self.heads * (own.plain + own.value), own.key_value)),
            ("proj.weight", (h, self.queries())),
        )

    def attention_products(self) -> tuple[int, int]:
        """Numbers in the matrices of attention, a token's multiplications: of those that ranks share, and of those that
        each has whole, which make a latent of a token."""
        products = [(name, math.prod(shape)) for name, shape in self.attention_params() if len(shape) == 2]
        whole = sum(size for name, size in products if "_down" in name)
        return sum(size for _, size in products) - whole, whole

    def attention_flops(self, ranks: int = 1) -> int:
        """Matrices, and scores and weighted sum over the full square of tokens."""
        c, (shared, whole) = self.context, self.attention_products()
        return 2 * c * whole + (2 * c * shared + 2 * 2 * c * c * self.scores_width()) // ranks

    def scores_width(self) -> int:
        """Of all heads, numbers that a query is multiplied with for a score, or a score with for the weighted sum: the
        mean of the two."""
        own = self.latent
        return self.heads * (own.plain + own.rotary + own.value) // 2 if own else self.queries()

    def attention_saved(self, ranks: int = 1) -> int:
        """Queries, keys and values, and attention's output; and what is between them."""
        return self.item * self.context * (self.qkv(ranks) + self.queries(ranks)) + self.scores_saved(ranks)

    def scores_saved(self, ranks: int = 1) -> int:
        """A log-sum-exp a head; or, where they are written, the scores' probabilities, with dropout a mask and what it
        left (Korthikanti et al. 2022, section 4.1: 5 a s^2 b bytes)."""
        c = self.context
        if self.flash:
            return FP32 * c * self.heads // ranks
        return (2 * self.item + 1 if self.dropout else self.item) * c * c * self.heads // ranks

    def attention_repeated(self, ranks: int = 1) -> int:
        """Bytes of every other product's results, one by one as PyTorch takes them: keys, and attention's last."""
        keys = max(self.kv_heads, ranks) * self.head // ranks
        return self.item * self.context * (keys + self.hidden) if self.every_other and not self.latent else 0

    def attention_kernels(self, ranks: int = 1) -> Kernels:
        before, after = self.around_attention(ranks)
        return (*before, *self._core(ranks), *after)

    def around_attention(self, ranks: int = 1) -> tuple[Kernels, Kernels]:
        """What makes queries, keys and values; and what takes the result."""
        c, item, h = self.context, self.item, self.hidden
        if self.latent is None:
            before = [kernels.matmul(c, self.qkv(ranks), h, item, given=0, named=kernels.QKV)]
        else:
            made = [(shape, ranks if "_up" in name else 1) for name, shape in self.attention_params()[:-1]]
            before = [kernels.matmul(c, s[0] // parts, s[1], item, given=0) for s, parts in made if len(s) == 2]
        if self.rotary:
            turned = item * c * self.qkv(ranks)
            before.append(kernels.memory(2 * turned, 2 * turned))
        after = (kernels.matmul(c, h, self.queries(ranks), item, back=1 / ranks, named=kernels.PROJ),)
        return tuple(before), after + self._summed_last(ranks, c)

    def _core(self, ranks: int) -> Kernels:
        """Scores, softmax, weighted sum; each query attends to the keys up to its own."""
        c, heads, item = self.context, self.heads // ranks, self.item
        width = (self.latent.plain + self.latent.rotary + self.latent.value) // 2 if self.latent else self.head
        common = {"batch": heads, "item": item, "weight": False}
        if self.flash:
            return (Kernel(kernels.ATTENTION, c, c, width, half=True, **common),)
        # Softmax and, as models of before fused attention were trained, dropout, with a mask of a byte: each reads and
        # writes the scores; backward softmax reads two and writes one.
        scores = c * c * heads
        return (
            Kernel(kernels.MATMUL, c, c, width, **common),
            kernels.memory(2 * item * scores, 3 * item * scores),
            kernels.memory((2 * item + 1) * scores, (2 * item + 1) * scores),
            Kernel(kernels.MATMUL, c, width, c, **common),
        )

    # --- multilayer perceptron --------------------------------------------------------------------------------------

    def mlp_params(self, ffn: int | None = None) -> tuple[tuple[str, tuple[int, ...]], ...]:
        h, width = self.hidden, ffn or self.ffn
        gate = (("gate.weight", (width, h)),) if self.gated else ()
        return (*gate, ("up.weight", (width, h)), ("down.weight", (h, width)))

    def mlp_flops(self, ranks: int = 1, ffn: int | None = None) -> int:
        return 2 * self.context * self.hidden * (ffn or self.ffn) * (3 if self.gated else 2) // ranks

    def mlp_saved(self, ranks: int = 1, ffn: int | None = None) -> int:
        """What the activation is given and what it gives; that of a gate is fused with the product."""
        return self.item * self.context * (ffn or self.ffn) * (3 if self.gated else 2) // ranks

    def mlp_beside(self, ranks: int = 1, ffn: int | None = None) -> int:
        """Gradients of what the activation gives and of what it is given, which exist while an MLP goes back."""
        return self.mlp_saved(ranks, ffn)

    def mlp_products(self, ranks: int = 1, ffn: int | None = None) -> int:
        """Bytes of the results of its matrices but the last."""
        return self.item * self.context * (ffn or self.ffn) * (2 if self.gated else 1) // ranks

    def mlp_repeated(self, ranks: int = 1, ffn: int | None = None) -> int:
        """Bytes of every other product's results: the second one's of two or three."""
        width = (ffn or self.ffn) // ranks if self.gated else self.hidden
        return self.item * self.context * width if self.every_other else 0

    def mlp_kernels(self, ranks: int = 1, ffn: int | None = None, tokens: int | None = None) -> Kernels:
        c, h, item, width = tokens or self.context, self.hidden, self.item, (ffn or self.ffn) // ranks
        made = item * c * width
        inputs = 2 if self.gated else 1  # of the activation: read, and its gradients written
        return (
            kernels.matmul(c, inputs * width, h, item, given=0),
            kernels.memory((inputs + 1) * made, (2 * inputs + 1) * made),
            kernels.matmul(c, h, width, item, back=1 / ranks, named=kernels.DOWN),
            *self._summed_last(ranks, c),
        )

    def _summed_last(self, ranks: int, tokens: int) -> Kernels:
        """What every rank has made of a rank's tokens is read, and their sum is written."""
        size = self.item * tokens * self.hidden
        return (kernels.memory(size + size / ranks, 0, only=kernels.SUMMED_LAST),) if ranks > 1 else ()

    # --- what is done to each token ---------------------------------------------------------------------------------

    def norm_saved(self, tokens: int | None = None) -> int:
        """Bytes that a norm keeps: its output, which is a product's input, and its scale. Where it is taken in steps,
        in fp32, also the value before the weight, and of an input of two bytes a copy; else it needs its input, which
        is kept as what it is the output of."""
        in_fp32 = 1 + (0 if self.fused else self.hidden * (1 + self.copies))
        return (tokens or self.context) * (self.item * self.hidden + FP32 * in_fp32)

    def scale_saved(self) -> int:
        """Of that, what the gradient of its input needs: the scale, and a copy of the input."""
        return FP32 * self.context * (1 + self.hidden * self.copies)

    @property
    def copies(self) -> bool:
        """Whether norms keep a copy of what they are given, so that nothing else needs it."""
        return not self.fused and self.item < FP32

    def sum_saved(self, tokens: int | None = None) -> int:
        """Bytes of a sum of what went round a part of a block and what came through, and of a mask."""
        return (self.item + self.dropout) * (tokens or self.context) * self.hidden

    def copied(self, tokens: int | None = None) -> int:
        """Bytes of a sum that nothing keeps, since the norm behind it keeps a copy."""
        return self.item * (tokens or self.context) * self.hidden * self.copies

    def norm_kernels(self, tokens: int | None = None) -> Kernels:
        """Reads and writes; backward reads two and writes one."""
        size = self.item * (tokens or self.context) * self.hidden
        return (kernels.memory(2 * size, 3 * size),)

    def sum_kernels(self, tokens: int | None = None) -> Kernels:
        """Two read, one written; backward adds the gradient that went round to the one that came through."""
        size = self.item * (tokens or self.context) * self.hidden
        return (kernels.memory(3 * size, 3 * size),)

    def embed_kernels(self, tokens: int | None = None) -> Kernels:
        """Rows read and written; backward reads them, and adds to others."""
        size = self.item * (tokens or self.context) * self.hidden
        return (kernels.memory(2 * size, 3 * size),)

    def logits_kernels(self, vocabulary: int, ranks: int = 1) -> Kernels:
        return (kernels.wide_matmul(self.context, vocabulary // ranks, self.hidden, self.item),)

    def logits_saved(self, vocabulary: int, ranks: int = 1) -> int:
        """Their logarithms, or the softmax, in fp32; compiled, what they were."""
        return (self.item if self.loss == "compiled" else FP32) * self.context * vocabulary // ranks

    def logits_beside(self, vocabulary: int, ranks: int = 1) -> tuple[int, int]:
        """While the head goes back, of a sample: its logits as they were made, unless the loss is one kernel; and once:
        the weight's gradient, which is then added to the one in fp32.

        Of PyTorch's: compiled, the gradients of the logits. Eager, before the weight has any: that of the logarithms,
        and that of the logits that is made of it; over tensor ranks gradients, exponentials and sums, each a tensor of
        its own (torch/distributed/tensor/parallel/loss.py: _nll_loss_and_log_softmax_backward)."""
        logits, weight = self.context * vocabulary // ranks, self.item * vocabulary * self.hidden // ranks
        if self.loss == "eager":
            return FP32 * logits * (2 if ranks == 1 else 3), 0
        return 0 if self.logits_fused and self.loss is None else self.item * logits, weight

    def loss_kernels(self, vocabulary: int, ranks: int = 1) -> Kernels:
        """The logits are made fp32; largest, exponentials and their sum each go over them once, and the logarithms are
        kept; backward reads those and writes gradients in fp32, and again as the logits were. Operation by operation
        (Megatron-LM, vocab_parallel_cross_entropy) largest and sum read them, and differences, exponentials and
        quotients each read and write them."""
        logits, passes = self.context * vocabulary // ranks, 4
        more = (1 + 2 + 3 * 2 - passes) * FP32 * logits
        one = kernels.memory((self.item + passes * FP32) * logits, (3 * FP32 + self.item) * logits)
        return (one._replace(stepwise=more),)


def attention_of(sizes: Decoder, queries: int, pairs: int, ranks: int = 1) -> Kernel:
    """One of some queries and of pairs with keys, which were counted whole where a mask spares half of them."""
    keys = max(1, round(pairs / queries / 2))
    heads = sizes.heads // ranks
    return Kernel(kernels.ATTENTION, queries, keys, sizes.head, batch=heads, item=sizes.item, weight=False)
