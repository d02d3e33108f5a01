"""Queries, keys and values of a rank's own tokens -> causal attention over the whole context, and its gradients.

PyTorch's context_parallel knows no attention on CPUs, so this is our own, the same on every device. Attention is
computed in blocks of a chunk of queries and a chunk of keys, of which those that lie in the future are skipped. Each
block gives an output and the log-sum-exp of its scores, by which partial outputs are merged (Dao et al. 2022,
arXiv:2205.14135, section 3.1). In backward a block's weights follow from its scores and the whole's log-sum-exp.

Tensors are [N, heads, tokens, width]; keys and values that travel are stacked, [2, N, heads, tokens, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.modes.context.deal import chunks, visible
from engine.real.models import causal_attention
from engine.real.recorder import Recorder

# Since torch 2.13 these have other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks over which each sequence is dealt out, and how; `layer` is the block whose attention this is."""

    group: dist.ProcessGroup
    recorder: Recorder
    balance: str
    layer: str

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def blocks(self, other: int) -> list[tuple[int, int, bool]]:
        """(chunk of own queries, chunk of the keys of `other`, whether it is masked in part) of blocks to compute."""
        mine, theirs = (chunks(rank, self.size, self.balance) for rank in (self.rank, other))
        return [(i, j, mine[i] == theirs[j]) for i, j in visible(mine, theirs)]

    def cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The chunks of a rank's tokens."""
        return tensor.chunk(len(chunks(0, self.size, self.balance)), dim=-2)

    def call(self, kind: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A collective that is waited for."""
        call = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": dist.all_to_all_single}[kind]
        result = tensor.new_empty(shape)
        self.recorder.collective(kind, tensor.nbytes, axis="cp")
        call(result, tensor.contiguous(), group=self.group)
        self.recorder.waited()
        return result


class Hop:
    """A tensor on its way to the next rank, while the like of it comes from the one before."""

    def __init__(self, ranks: Ranks, tensor: Tensor, payload: str, part: str):
        self.sent, self.received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        ends = (("send", dist.isend, self.sent, 1), ("recv", dist.irecv, self.received, -1))
        ops = []
        for kind, call, buffer, step in ends:
            peer = (ranks.rank + step) % ranks.size
            where = {"axis": "cp", "part": f"{ranks.layer}.{part}"}
            where |= {"stage": ranks.recorder.stage, "microbatch": ranks.recorder.microbatch}
            ranks.recorder.message(kind, payload=payload, peer=peer, size=buffer.nbytes, **where)
            ops.append(dist.P2POp(call, buffer, group=ranks.group, group_peer=peer))
        self.works = dist.batch_isend_irecv(ops)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class Merged:
    """The output for a rank's queries over the keys seen so far, and the log-sum-exp of their scores."""

    def __init__(self, q: Tensor):
        n, heads, tokens, width = q.shape
        # Laid out by tokens, so that the matrix after attention needs no copy of it.
        self.output = q.new_zeros(n, tokens, heads, width).transpose(1, 2)
        self.lse = q.new_full(q.shape[:-1], -torch.inf).unsqueeze(-1)

    def add(self, ranks: Ranks, q: Tensor, kv: Tensor, other: int) -> None:
        keys, values = (ranks.cut(each) for each in kv)
        queries, outputs, lses = (ranks.cut(each) for each in (q, self.output, self.lse))
        for i, j, masked in ranks.blocks(other):
            scores = _scores(queries[i], keys[j], masked)
            lse = scores.logsumexp(-1, keepdim=True)
            merged = torch.logaddexp(lses[i], lse)
            seen = torch.exp(scores - merged) @ values[j]
            outputs[i].mul_(torch.exp(lses[i] - merged)).add_(seen)
            lses[i].copy_(merged)


class Gradients:
    """The gradient of a rank's queries, from those of its output; that of keys and values for one rank at a time."""

    def __init__(self, q: Tensor, output: Tensor, lse: Tensor, gradient: Tensor):
        self.q, self.lse, self.gradient = q, lse, gradient
        self.own = (gradient * output).sum(-1, keepdim=True)  # what the softmax's own gradient takes from each score
        self.of_q = torch.zeros_like(q)

    def of_kv(self, ranks: Ranks, kv: Tensor, other: int) -> Tensor:
        result = torch.zeros_like(kv)
        rows = [ranks.cut(each) for each in (self.q, self.lse, self.gradient, self.own, self.of_q)]
        keys, values, of_keys, of_values = (ranks.cut(each) for each in (*kv, *result))
        scale = self.q.shape[-1] ** -0.5
        for i, j, masked in ranks.blocks(other):
            q, lse, gradient, own, of_q = (each[i] for each in rows)
            weights = torch.exp(_scores(q, keys[j], masked) - lse)
            of_scores = weights * (gradient @ values[j].mT - own) * scale
            of_values[j].add_(weights.mT @ gradient)
            of_keys[j].add_(of_scores.mT @ q)
            of_q.add_(of_scores @ keys[j])
        return result


def _scores(q: Tensor, k: Tensor, masked: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores + torch.full_like(scores, -torch.inf).triu(1) if masked else scores


Attend = Callable[[Tensor, Tensor, Ranks], tuple[Tensor, Tensor]]  # queries, keys and values -> output, log-sum-exp
KNOWN: dict[int, Ranks] = {}  # an op is given numbers, and no objects


def as_op(attend: Attend) -> Attend:
    """An attention as one op, whose result a selective recomputation keeps. What happens in it other code does not see:
    products of its blocks are none of a layer's."""

    def among(q: Tensor, kv: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        return attend(q, kv, KNOWN[ranks])

    op = torch.library.custom_op(f"lockstep::{attend.__name__}", among, mutates_args=())
    return lambda q, kv, ranks: op(q, kv, id(KNOWN.setdefault(id(ranks), ranks)))


@as_op
def attend_in_turns(q: Tensor, own: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """In turn t a rank attends to the keys of the rank t places before it, while the next ones are on their way."""
    kv, merged, turns = own, Merged(q), ranks.size
    with ranks.recorder.exchanging():
        hop = Hop(ranks, kv, "activation", "attention1")
    for turn in range(turns):
        merged.add(ranks, q, kv, (ranks.rank - turn) % turns)
        with ranks.recorder.exchanging():
            kv = hop.wait() if turn + 1 < turns else kv
            hop = Hop(ranks, kv, "activation", f"attention{turn + 2}") if turn + 2 < turns else hop
    return merged.output, merged.lse


@as_op
def attend_to_all(q: Tensor, kv: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    merged = Merged(q)
    for other in range(ranks.size):
        merged.add(ranks, q, kv[other], other)
    return merged.output, merged.lse


class Ring(torch.autograd.Function):
    """Keys and values go round, in both directions of a pass."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> Tensor:
        q, own = q.contiguous(), torch.stack([k, v])
        output, lse = attend_in_turns(q, own, ranks)
        ctx.save_for_backward(q, own, output, lse)
        ctx.ranks = ranks
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """The gradient of keys and values follows them one hop behind, so each turn's is added when it comes by."""
        q, kv, output, lse = ctx.saved_tensors
        ranks, gradients = ctx.ranks, Gradients(q, output, lse, gradient)
        turns, of_kv = ranks.size, None
        with ranks.recorder.exchanging():
            hop = Hop(ranks, kv, "activation", "attention1")
        for turn in range(turns):
            made = gradients.of_kv(ranks, kv, (ranks.rank - turn) % turns)
            if of_kv is not None:
                with ranks.recorder.exchanging():
                    passed_on = of_kv.wait()
                made += passed_on
            with ranks.recorder.exchanging():
                of_kv = Hop(ranks, made, "gradient", f"sum{turn + 1}" if turn + 1 < turns else "qkv")
                kv = hop.wait() if turn + 1 < turns else kv
                hop = Hop(ranks, kv, "activation", f"attention{turn + 2}") if turn + 2 < turns else hop
                home = of_kv.wait() if turn + 1 == turns else None
        return gradients.of_q, *home, None


class Gathered(torch.autograd.Function):
    """All keys and values on every rank, kept until their gradients are summed where they belong."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> Tensor:
        q, own = q.contiguous(), torch.stack([k, v])
        kv = ranks.call("all_gather", own, (ranks.size * 2, *k.shape)).unflatten(0, (ranks.size, 2))
        output, lse = attend_to_all(q, kv, ranks)
        with ranks.recorder.exchanging():
            ctx.save_for_backward(q, kv, output, lse)
        ctx.ranks = ranks
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, kv, output, lse = ctx.saved_tensors
        ranks = ctx.ranks
        with ranks.recorder.exchanging():
            gradients = Gradients(q, output, lse, gradient)
        of_kv = torch.cat([gradients.of_kv(ranks, kv[other], other) for other in range(ranks.size)])
        return gradients.of_q, *ranks.call("reduce_scatter", of_kv, kv.shape[1:]), None


class Exchange(torch.autograd.Function):
    """Tokens for heads: [..., N, heads, tokens, width] of a rank's tokens -> all tokens of a rank's heads, or back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, ranks: Ranks, to_heads: bool) -> Tensor:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _exchanged(tensor, ranks, to_heads)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _exchanged(gradient, ctx.ranks, not ctx.to_heads), None, None


def _exchanged(tensor: Tensor, ranks: Ranks, to_heads: bool) -> Tensor:
    """What is for each rank comes first, in the order of ranks; what came from each is joined in that order."""
    cut, join = (-3, -2) if to_heads else (-2, -3)
    pieces = torch.stack(tensor.chunk(ranks.size, dim=cut))
    return torch.cat(list(ranks.call("all_to_all", pieces, pieces.shape)), dim=join)


def ring(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> Tensor:
    return Ring.apply(q, k, v, ranks)


def gathered(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> Tensor:
    return Gathered.apply(q, k, v, ranks)


def ulysses(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> Tensor:
    """PyTorch's own attention, of some heads over all of the context."""
    by_heads = Exchange.apply(torch.stack([q, k, v]), ranks, True)
    return Exchange.apply(causal_attention(*by_heads), ranks, False)


ATTENTION = {"ring": ring, "all_gather": gathered, "ulysses": ulysses}
