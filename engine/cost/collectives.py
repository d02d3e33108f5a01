"""A communication op, the ranks of its group and a machine -> seconds, and the bytes that each rank puts on its links.

The alpha-beta model: messages one after the other, each with its latency, and bytes over the rate of the slowest link
that they cross. A group that spans nodes has as many network cards between two nodes as it has ranks in one. Of the
algorithms for a collective the fastest is taken, as NCCL's cost model does (src/graph/tuning.cc):

ring          n-1 rounds, 2(n-1) for an all-reduce, each moving 1/n of the tensor (Patarasuk & Yuan 2009,
              doi 10.1016/j.jpdc.2008.09.002; Thakur et al. 2005, doi 10.1177/1094342005051521)
tree          up and down two binary trees, of half the tensor each: as many bytes as a ring, log2 of the nodes in
              latency (Sanders et al. 2009, doi 10.1016/j.parco.2009.09.001; NCCL 2.4)
switch        in one node the NVLink switches sum: a rank reads 1/n of the sums, and writes that to all at once, beside
              what it gives (NVLink SHARP: Klenk et al. 2020, doi 10.1109/ISCA45697.2020.00085; NCCL's NVLS)
switches      the switches of each node sum, and each rank of a node sends its part of the sums through its own card, up
              and down two binary trees of the nodes (Cho et al. 2019, BlueConnect; NCCL's NVLSTree)
direct        all-to-all: each rank to each other, those of other nodes through its own network card

Where ranks are processes (`trees` is false) there are rings, and direct exchange.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.cost.hardware import Switch
from engine.cost.machine import EVERYBODY, Link, Machine
from engine.plan import Op

# Of a ring's rate, what the two trees reach: they keep a rank's links less evenly busy (NCCL, tuning.cc: 0.92); words
# reach 1 / 3.8 of what chunks do. Of that, in tenths, for 64 bytes, 128 and so on: "trees are not perfectly sticking to
# the model for medium sizes" (treeCorrectionFactor).
TREE_RATE, TREE_WORDS = 0.92, 1 / 3.8
TREE_TENTHS = {
    "chunks": (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
    "lines": (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10),
    "words": (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10),
}
# Seconds in which a GPU has nothing to do when its host waited for a message before it went on, as Megatron-LM does
# (p2p_communication.py: torch.cuda.synchronize after each exchange): Python of an exchange, and the launches behind it.
# Measured with Megatron-LM's own calls, message by message through all stages and back (Qi et al. 2024,
# arXiv:2401.10241, table 9, T_comm, and `bootstrap_and_profile_p2p_communication` of their repository): 0.38 and 0.41
# ms for 10.5 and 12.6 MB, in one hop of 15 or of 10 over a network, of which the links take 0.07 and 0.10. (Inside of a
# node, with 25 and 28 MB, 0.42 and 0.48 are left; the less is taken.)
HOST_WAIT = 3e-4
# Of a ring's rate, what NCCL's exchange of each with each reaches: 0.597 of 900 GB/s among 8 B200s, where gathers reach
# 0.673 (SimuMax, configs/system/b200_bf16_ceperm.json).
EXCHANGE_RATE = 0.597 / 0.673
# NCCL's three protocols (graph/tuning.cc). LL sends words of 4 bytes, each with a flag of 4, LL128 lines of 120 bytes
# with a flag of 8: a hop takes the latency of a word or a line, a call that of a call in chunks and this much more.
# Simple sends whole chunks: a hop takes the latency of a chunk.
WORDS_CALL, LINES_CALL = -1.8e-6, 5.6e-6
# In a node a ring passes a chunk on in slices, each of which waits for its neighbour; and what the channels' chunks
# hold for all ranks goes round together, the rest of a tensor after it (NCCL: chunks of 4 and slices of 2 steps, of 8
# in 4 MiB of buffer: device.h, ALLREDUCE_CHUNKSTEPS and ALLREDUCE_SLICESTEPS; 24 channels of a ring on A100s).
SLICES, CHUNK, RING_CHANNELS = 2, 2 << 20, 24
# Rounds of sums in switches are of as many chunks as channels and ranks, of which the largest are this large, if so
# many rounds are left, and at least the last (enqueue.cc: NVLS and NVLSTree; there half of 128 KiB from 4 nodes on).
SWITCH_CHUNKS = ((128 << 10, 64), (64 << 10, 8), (32 << 10, 2), (16 << 10, 0))
TREE_CHUNKS = ((128 << 10, 4), (64 << 10, 1), (32 << 10, 0))
MANY_NODES = 4
# Stages of a round in one node, beside the first: summing in the switches, and copying out of the buffer (device/
# all_reduce.h: scatter, reduce and broadcast, gather).
STAGES = 2
FEWEST = 3  # ranks of a node whose switches sum (transport/nvls.cc)
MOST_HEADS = 32  # of a node's ranks, those that have a part of the sums each (device.h: NCCL_MAX_NVLS_ARITY)


Spans = list[tuple[int, Link]]  # (ranks of the group that a link of this tier, and those inside, joins; the link)


def rounds_and_bytes(op: Op, group: int) -> tuple[float, float]:
    """(messages one after the other, bytes a rank sends in all) for one op in a ring of `group` ranks.

    `op.bytes` is the tensor that this rank passes in; for all_gather that is its shard, for reduce_scatter the whole.
    """
    n, size = group, op.bytes
    if n <= 1:
        return 0, 0.0
    if op.kind == "all_reduce":
        return 2 * (n - 1), 2 * (n - 1) / n * size
    if op.kind == "all_gather":
        return n - 1, (n - 1) * size
    if op.kind in ("reduce_scatter", "all_to_all", "scatter", "gather"):
        return n - 1, (n - 1) / n * size
    if op.kind in ("broadcast", "reduce"):
        return n - 1, float(size)  # a pipelined ring: every rank passes the whole tensor on once
    raise ValueError(f"not a collective: {op.kind}")


def communication_seconds(op: Op, group: Sequence[int], machine: Machine) -> float:
    """Seconds of a collective among the ranks of `group`, or of a message between two."""
    if op.kind == "send":
        waits = 0.0 if op.asynchronous or not machine.sms else HOST_WAIT
        return waits + message_seconds(op.bytes, machine, _spanned(group, machine)[-1][1])
    return collective_seconds(op, group, machine) + copying_seconds(op, len(group), machine)


def copying_seconds(op: Op, ranks: int, machine: Machine) -> float:
    """Collectives gather and scatter along the first dimension. PyTorch's tensors have samples there and tokens second,
    so that a copy puts what was gathered in order, and what is to be scattered before
    (torch/distributed/_functional_collectives.py: `_maybe_view_chunk_cat`, `_chunk_or_narrow_cat`)."""
    if not machine.copies_tokens or op.axis != "tp" or op.kind not in ("all_gather", "reduce_scatter"):
        return 0.0
    whole = op.bytes * (ranks if op.kind == "all_gather" else 1)
    return machine.op_overhead + 2 * whole / machine.memory_rate


def message_seconds(size: int, machine: Machine, link: Link | None = None) -> float:
    """Over a link, that of neighbours if none is given."""
    link = link or machine.tiers[0][1]
    return machine.call_overhead + _in_chunks(link).latency + size / link.rate


def collective_seconds(op: Op, group: Sequence[int] | int, machine: Machine) -> float:
    """`group`: its ranks, in rising order; or how many there are, one beside the other."""
    ranks = range(group) if isinstance(group, int) else group
    if len(ranks) <= 1:
        return 0.0
    spans = _spanned(ranks, machine)
    if op.kind == "all_to_all":
        chunks = [(joined, _in_chunks(link)) for joined, link in spans]
        routed = machine.sent_once if op.payload in ("tokens", "gradient") else 0
        return machine.call_overhead + (once(op, chunks, routed) if routed else direct(op, chunks))
    if not machine.trees:
        return machine.call_overhead + ring(op, spans)
    in_node = spans[0][1] == machine.tiers[0][1] and bool(machine.outer)
    has_tree = op.kind == "all_reduce" and not (in_node and len(spans) == 1)  # there it is a chain, as a ring is
    ways = []
    for way in _protocols(tuple(spans), in_node):
        ways.append(way.call + ring(op, way.ring, way.held * len(ranks)))
        if has_tree:
            ways.append(way.call + tree(op, way.tree, way.tenths))
    if op.kind == "all_reduce" and machine.switch is not None and in_node and spans[0][0] >= FEWEST:
        ways.append(switched(op, spans, machine.switch))
    return machine.call_overhead + min(ways)


class Protocol(NamedTuple):
    """A way of sending: seconds of a call beside those in chunks, the tiers with its latencies and rates in a ring and
    in a tree, bytes for each rank that a ring has on the way together, and tenths of its rate that a tree reaches."""

    call: float
    ring: Spans
    tree: Spans
    held: float = math.inf
    tenths: Sequence[int] = (10,)


@functools.lru_cache(maxsize=4096)
def _protocols(spans: tuple[tuple[int, Link], ...], in_node: bool) -> list[Protocol]:
    if spans[0][1].chunk is None:
        return [Protocol(0.0, list(spans), list(spans))]

    def with_each(change: Callable[[Link], dict[str, float]]) -> Spans:
        return [(joined, replace(link, **change(link))) for joined, link in spans]

    chunks = with_each(lambda link: {"latency": link.chunk})
    if in_node:
        (joined, link), *outer = chunks
        chunks = [(joined, replace(link, latency=SLICES * link.latency)), *outer]
    lines = with_each(lambda link: {"rate": link.lines * link.rate})
    words = with_each(lambda link: {"latency": link.word, "rate": link.words * link.rate})
    up = with_each(lambda link: {"latency": link.tree[0]})
    lines_up = with_each(lambda link: {"latency": link.tree[1], "rate": link.lines * link.rate})
    words_up = with_each(lambda link: {"latency": link.tree[2], "rate": min(link.words, TREE_WORDS) * link.rate})
    return [
        Protocol(0.0, chunks, up, CHUNK * RING_CHANNELS, TREE_TENTHS["chunks"]),
        Protocol(LINES_CALL, lines, lines_up, tenths=TREE_TENTHS["lines"]),
        Protocol(WORDS_CALL, words, words_up, tenths=TREE_TENTHS["words"]),
    ]


@functools.lru_cache(maxsize=256)
def _in_chunks(link: Link) -> Link:
    return link if link.chunk is None else replace(link, latency=link.chunk)


def _spanned(ranks: Sequence[int], machine: Machine) -> Spans:
    """The tiers that a group uses, innermost first."""
    return _tiers_of(tuple(ranks), machine.tiers)


@functools.lru_cache(maxsize=4096)  # many ops have one group, and groups of one axis are alike
def _tiers_of(ranks: tuple[int, ...], tiers: tuple[tuple[int, Link], ...]) -> Spans:
    """Ranks are laid out on nodes in order, so of an even group as many are in one node as in any other."""
    spans: Spans = []
    for reach, link in tiers:
        inside = len(ranks) if reach == EVERYBODY else sum(rank // reach == ranks[0] // reach for rank in ranks)
        if inside > (spans[-1][0] if spans else 1):
            spans.append((inside, link))
        if inside == len(ranks):
            return spans
    return spans


def _rates(spans: Spans) -> list[float]:
    """Bytes a second at which a ring through all of the group crosses each tier. Between two nodes there is a card for
    each rank of a node."""
    inside = [1, *(ranks for ranks, _ in spans[:-1])]
    return [ranks * link.rate for ranks, (_, link) in zip(inside, spans, strict=True)]


def _hops(spans: Spans) -> list[float]:
    """Of the hops once round a ring, but one, how many cross each tier."""
    total = spans[-1][0]
    units = [total / ranks for ranks, _ in spans]  # groups that the tier joins into one
    inner = [total, *units[:-1]]
    return [before - after for before, after in zip(inner, units, strict=True)]


def ring(op: Op, spans: Spans, held: float = math.inf) -> float:
    """Every round waits for its slowest hop; as NCCL counts them, as many rounds cross a tier as hops do. `held`: bytes
    of the tensor that go round together."""
    ranks = spans[-1][0]
    rounds, sent = rounds_and_bytes(op, ranks)
    turns = rounds / (ranks - 1) * max(1.0, op.bytes * (ranks if op.kind == "all_gather" else 1) / held)
    latency = turns * sum(hops * link.latency for hops, (_, link) in zip(_hops(spans), spans, strict=True))
    return latency + sent / min(_rates(spans))


def tree(op: Op, spans: Spans, tenths: Sequence[int] = (10,)) -> float:
    """A chain inside of each node, and between nodes a binary tree; up and down again. `tenths`: of what it would reach
    of its rate, by the size's power of two from 64 bytes on."""
    first, *outer = zip(_hops(spans), spans, strict=True)
    inside = first[1][0]
    latency = (inside - 1) * first[1][1].latency if outer else math.log2(inside) * first[1][1].latency
    ranks = inside
    for _, (joined, link) in outer:
        latency += math.ceil(math.log2(joined / ranks)) * link.latency
        ranks = joined
    reached = TREE_RATE * tenths[min(max(op.bytes // 64, 1).bit_length(), len(tenths)) - 1] / 10
    return 2 * latency + 2 * op.bytes / (reached * min(_rates(spans)))


def switched(op: Op, spans: Spans, switch: Switch) -> float:
    """Round by round, in stages that work on one round after the other; the stage of the network, where there is one,
    sends each rank's part to one other node, or from three nodes on to two."""
    (ranks, link), *outer = spans
    rate = ranks / (ranks + 1) * switch.reached * link.rate
    heads = min(ranks, MOST_HEADS)
    if not outer:
        size = _round(op.bytes, heads * switch.channels, SWITCH_CHUNKS)
        return (op.bytes / size + STAGES) * (size / rate + switch.pause)
    nodes, card = outer[-1][0] / ranks, outer[-1][1]
    size = _round(op.bytes, heads * switch.across, TREE_CHUNKS[nodes >= MANY_NODES :])
    beyond = card.latency + min(2, nodes - 1) * size / ranks / card.rate
    levels = math.ceil(math.log2(nodes))
    return (op.bytes / size + 1 + STAGES * levels) * max(size / rate + 2 * switch.pause, beyond)


def _round(size: int, places: int, chunks: Sequence[tuple[int, int]]) -> float:
    """Bytes of a round, in chunks for so many places, of what is so many in all."""
    return min(max(1, size), places * next(chunk for chunk, rounds in chunks if size >= rounds * places * chunk))


def once(op: Op, spans: Spans, copies: int) -> float:
    """Tokens of which each goes to so many experts, at random, that the ranks share out: once to each node that has one
    of them, and from there once to each device (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2; DeepEP, HybridEP).
    `op.bytes` are those of all copies."""
    total, inside, slowest, latency = spans[-1][0], 1, 0.0, 0.0
    for joined, link in spans:
        units = total / inside  # devices, then nodes: a token goes to another one with this probability
        reached = (units - 1) * (1 - (1 - 1 / units) ** copies)
        slowest = max(slowest, reached * op.bytes / copies / link.rate)
        latency += (joined - inside) * link.latency
        inside = joined
    return latency + slowest


def direct(op: Op, spans: Spans) -> float:
    """Each rank sends its n-1 parts at once; those for another node leave through its own card, and the slowest tier
    decides. Rounds cost a latency each, as many as are sent one after the other."""
    total, inside, slowest, latency = spans[-1][0], 1, 0.0, 0.0
    for joined, link in spans:
        share = (joined - inside) / total / (1.0 if link.chunk is None else EXCHANGE_RATE)
        slowest = max(slowest, share * op.bytes / link.rate)
        latency += (joined - inside) * link.latency
        inside = joined
    return latency + slowest


def busy_cores(op: Op, group: int, machine: Machine) -> float:
    """Cores that the op keeps busy meanwhile, on all its members together, where ranks share a machine's cores."""
    return 0.0 if machine.local is None else machine.local.communication(op, group)[1]
