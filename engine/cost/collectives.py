"""A communication op, the ranks of its group and a machine -> seconds, and the bytes that each rank puts on its links.

The alpha-beta model: messages one after the other, each with its latency, and bytes over the rate of the slowest link
that they cross. A group that spans nodes has as many network cards between two nodes as it has ranks in one. Of the
algorithms for a collective the fastest is taken, as NCCL's cost model does (src/graph/tuning.cc):

ring          n-1 rounds, 2(n-1) for an all-reduce, each moving 1/n of the tensor (Patarasuk & Yuan 2009,
              doi 10.1016/j.jpdc.2008.09.002; Thakur et al. 2005, doi 10.1177/1094342005051521)
tree          up and down two binary trees, of half the tensor each: as many bytes as a ring, log2 of the nodes in
              latency (Sanders et al. 2009, doi 10.1016/j.parco.2009.09.001; NCCL 2.4)
hierarchical  a ring inside of each node, then one between nodes for each rank of a node, with its part of the tensor
              (Cho et al. 2019, BlueConnect); NCCL has it for all-reduces where switches sum (NVLSTree)
switch        in one node the NVLink switches sum: a rank reads 1/n of the sums, and writes that to all at once, beside
              what it gives (NVLink SHARP: Klenk et al. 2020, doi 10.1109/ISCA45697.2020.00085; NCCL's NVLS)
direct        all-to-all: each rank to each other, those of other nodes through its own network card

Where ranks are processes (`trees` is false) there are rings, and direct exchange.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from engine.cost.machine import EVERYBODY, Link, Machine
from engine.plan import Op

# Of a ring's rate, what the two trees reach: they keep a rank's links less evenly busy (NCCL, tuning.cc: 0.92).
TREE_RATE = 0.92
# Seconds in which a GPU has nothing to do when its host waited for a message before it went on, as Megatron-LM does
# (p2p_communication.py: torch.cuda.synchronize after each exchange): Python of an exchange, and the launches behind it.
# Measured with Megatron-LM's own calls, message by message through all stages and back (Qi et al. 2024,
# arXiv:2401.10241, table 9, T_comm, and `bootstrap_and_profile_p2p_communication` of their repository): 0.38 and 0.41
# ms for 10.5 and 12.6 MB, in one hop of 15 or of 10 over a network, of which the links take 0.07 and 0.10. (Inside of a
# node, with 25 and 28 MB, 0.42 and 0.48 are left; the less is taken.)
HOST_WAIT = 3e-4
SWITCH_LATENCY = 25e-6  # seconds (NCCL, tuning.cc: of NVLS)
# NCCL's protocols for more than a few bytes (tuning.cc). LL128 sends lines of 128 bytes, 8 of which are a flag: a hop
# takes the latency of a line, a call 5.6 us more. Simple sends whole chunks: a hop takes the latency of a chunk.
LINES_RATE, LINES_CALL = 120 / 128, 5.6e-6


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
        return machine.call_overhead + direct(op, [(joined, _in_chunks(link)) for joined, link in spans])
    if not machine.trees:
        return machine.call_overhead + ring(op, spans)
    in_node = len(spans) == 1 and bool(machine.outer) and spans[0][1] == machine.tiers[0][1]
    chunks = _fastest(op, [(joined, _in_chunks(link)) for joined, link in spans], in_node, machine.switch)
    if spans[0][1].chunk is None:
        return machine.call_overhead + chunks
    lines = [(joined, replace(link, rate=LINES_RATE * link.rate)) for joined, link in spans]
    return machine.call_overhead + min(chunks, LINES_CALL + _fastest(op, lines, in_node, 0.0))


def _in_chunks(link: Link) -> Link:
    return link if link.chunk is None else replace(link, latency=link.chunk)


def _fastest(op: Op, spans: Spans, in_node: bool, switch: float) -> float:
    """Of the ways that NCCL has for an op, in one protocol. In a node its tree is a chain, which is no faster than a
    ring; switches sum in chunks only."""
    ways = [ring(op, spans)]
    if op.kind == "all_reduce":
        if switch and in_node:
            ways.append(switched(op, spans, switch))
        if switch and len(spans) > 1:
            ways.append(hierarchical(op, spans))
        if not in_node:
            ways.append(tree(op, spans))
    return min(ways)


Spans = list[tuple[int, Link]]  # (ranks of the group that a link of this tier, and those inside, joins; the link)


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


def ring(op: Op, spans: Spans) -> float:
    """Every round waits for its slowest hop; as NCCL counts them, as many rounds cross a tier as hops do."""
    rounds, sent = rounds_and_bytes(op, spans[-1][0])
    turns = rounds / (spans[-1][0] - 1)
    latency = turns * sum(hops * link.latency for hops, (_, link) in zip(_hops(spans), spans, strict=True))
    return latency + sent / min(_rates(spans))


def tree(op: Op, spans: Spans) -> float:
    """A chain inside of each node, and between nodes a binary tree; up and down again."""
    first, *outer = zip(_hops(spans), spans, strict=True)
    inside = first[1][0]
    latency = (inside - 1) * first[1][1].latency if outer else math.log2(inside) * first[1][1].latency
    ranks = inside
    for _, (joined, link) in outer:
        latency += math.ceil(math.log2(joined / ranks)) * link.latency
        ranks = joined
    return 2 * latency + 2 * op.bytes / (TREE_RATE * min(_rates(spans)))


def hierarchical(op: Op, spans: Spans) -> float:
    """Tier by tier: each moves what the tiers inside of it have left to each of their ranks."""
    total, seconds, inside = spans[-1][0], 0.0, 1
    for joined, link in spans:
        units = joined / inside
        if op.kind == "all_gather":  # inner tiers come last, with all that outer ones have brought
            sent, rounds = op.bytes * (units - 1) * (total / joined), units - 1
        elif op.kind == "all_reduce":
            sent, rounds = 2 * (units - 1) / units * op.bytes / inside, 2 * (units - 1)
        elif op.kind in ("broadcast", "reduce"):
            sent, rounds = float(op.bytes), units - 1
        else:
            sent, rounds = (units - 1) / units * op.bytes / inside, units - 1
        seconds += rounds * link.latency + sent / link.rate
        inside = joined
    return seconds


def switched(op: Op, spans: Spans, reached: float) -> float:
    """Each rank gives its tensor, and 1/n of the sums again for all; there and back take a call of their own."""
    ((ranks, link),) = spans
    return SWITCH_LATENCY + (ranks + 1) / ranks * op.bytes / (reached * link.rate)


def direct(op: Op, spans: Spans) -> float:
    """Each rank sends its n-1 parts at once; those for another node leave through its own card, and the slowest tier
    decides. Rounds cost a latency each, as many as are sent one after the other."""
    total, inside, slowest, latency = spans[-1][0], 1, 0.0, 0.0
    for joined, link in spans:
        share = (joined - inside) / total
        slowest = max(slowest, share * op.bytes / link.rate)
        latency += (joined - inside) * link.latency
        inside = joined
    return latency + slowest


def busy_cores(op: Op, group: int, machine: Machine) -> float:
    """Cores that the op keeps busy meanwhile, on all its members together, where ranks share a machine's cores."""
    return 0.0 if machine.local is None else machine.local.communication(op, group)[1]
