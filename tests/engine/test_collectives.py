"""Collectives cost what closed forms say: bytes over the rate of the slowest link that they cross, and latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.cost.collectives import collective_seconds, communication_seconds, direct, ring, switched, tree
from engine.cost.contention import CHANNELS, slowed
from engine.cost.hardware import Switch
from engine.cost.machine import EVERYBODY, Link, Machine, machine
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec

MB = 10**6
FLAT = Machine(
    name="flat", flop_rate=1.0, memory_rate=1.0, op_overhead=0.0, link_latency=0.0, link_rate=50e9, trees=True
)
# Nodes of 8: 100 GB/s inside, 10 GB/s for each rank between them.
NODES = replace(FLAT, link_latency=1e-6, link_rate=100e9, node_size=8, outer=((EVERYBODY, Link(5e-6, 10e9)),))


def op(kind: str = "all_reduce", size: int = 100 * MB, axis: str = "dp") -> Op:
    return Op(kind=kind, axis=axis, bytes=size)


def test_a_ring_of_eight_reduces_100_megabytes_in_three_and_a_half_milliseconds():
    """2 x 7/8 x 100 MB at 50 GB/s; twice the bytes take twice the time."""
    spans = [(8, Link(0.0, 50e9))]
    assert ring(op(), spans) == pytest.approx(3.50e-3)
    assert ring(op(size=200 * MB), spans) == pytest.approx(7.00e-3)
    assert collective_seconds(op(), 8, FLAT) == pytest.approx(3.50e-3)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_small_messages_of_a_ring_grow_with_its_rounds(ranks):
    spans = [(ranks, Link(1e-5, 50e9))]
    assert ring(op(size=8), spans) == pytest.approx(2 * (ranks - 1) * 1e-5, rel=1e-3)
    assert ring(op("all_gather", 8), spans) == pytest.approx((ranks - 1) * 1e-5, rel=1e-3)


def test_the_faster_algorithm_is_taken():
    """A tree of 256 nodes has 16 latencies where a ring has 510; with many bytes both have as many of those."""
    far = replace(FLAT, link_latency=1e-5)
    small, large = op(size=1000), op(size=10_000 * MB)
    spans = [(256, Link(1e-5, 50e9))]
    assert tree(small, spans) < ring(small, spans) / 30 and collective_seconds(small, 256, far) == tree(small, spans)
    assert ring(large, spans) < tree(large, spans) and collective_seconds(large, 256, far) == ring(large, spans)
    assert collective_seconds(small, 256, replace(far, trees=False)) == ring(small, spans)


def test_a_ring_over_nodes_has_a_card_for_each_rank_of_a_node():
    """8 x 10 GB/s between nodes is less than 100 GB/s inside of them; one rank a node has its own 10 GB/s alone."""
    whole, one_each = range(16), range(0, 128, 8)
    bandwidth = 2 * 15 / 16 * 100 * MB
    near = ring(op(), [(8, Link(0.0, 100e9)), (16, Link(0.0, 10e9))])
    assert near == pytest.approx(bandwidth / 80e9)
    assert collective_seconds(op(), one_each, NODES) > 7 * collective_seconds(op(), whole, NODES)


def test_switches_sum_round_by_round_in_three_stages():
    """4 channels x 8 ranks x 16 KiB are 512 KiB a round: 3 of 1.5 MiB, and 2 more until the last is out; each at 8/9 of
    half the rate, after a pause. From 16 MiB on, which are 8 rounds, a round has 64 KiB for each: 2 MiB."""
    span, switch = [(8, Link(0.0, 100e9))], Switch(0.5, 1e-5, 4, 4)
    for size, rounds, each in ((3 << 19, 3, 1 << 19), (32 << 20, 16, 2 << 20)):
        seconds = (rounds + 2) * (each / (8 / 9 * 50e9) + 1e-5)
        assert switched(op(size=size), span, switch) == pytest.approx(seconds)


@pytest.mark.parametrize(("nodes", "copies", "rounds", "stages"), [(2, 1, 32, 3), (4, 2, 64, 5), (8, 2, 64, 7)])
def test_over_nodes_each_rank_sends_its_part_of_the_sums_through_its_card(nodes, copies, rounds, stages):
    """Up and down a tree of nodes: to one other node, or to two. 128 MiB in rounds of 128 KiB for each of 4 channels x
    8 ranks, or from 4 nodes on of 64 KiB; each an eighth for a card, and as many more as there are stages of it."""
    spans = [(8, Link(0.0, 1e15)), (8 * nodes, Link(0.0, 10e9))]
    size = 128 << 20
    seconds = (rounds + stages) * copies * size / rounds / 8 / 10e9
    assert switched(op(size=size), spans, Switch(1.0, 0.0, 4, 4)) == pytest.approx(seconds)


def test_switches_of_two_ranks_of_a_node_do_not_sum():
    h100 = machine("h100")
    alone = replace(h100, switch=None)
    assert collective_seconds(op(), 2, h100) == collective_seconds(op(), 2, alone)
    assert collective_seconds(op(), 8, h100) < collective_seconds(op(), 8, alone)


def test_an_exchange_leaves_a_node_through_each_ranks_own_card():
    """Of 16 parts 8 go to the other node."""
    spans = [(8, Link(0.0, 100e9)), (16, Link(0.0, 10e9))]
    assert direct(op("all_to_all"), spans) == pytest.approx(8 / 16 * 100 * MB / 10e9)


@pytest.mark.parametrize(("ends", "link"), [(range(6, 8), 0), (range(7, 9), 1), (range(0, 9, 8), 1)])
def test_a_message_takes_the_tier_between_its_ends(ends, link):
    rate, latency = NODES.tiers[link][1].rate, NODES.tiers[link][1].latency
    assert communication_seconds(op("send", MB), ends, NODES) == pytest.approx(latency + MB / rate)


# Published all-reduces of 2 MiB, 4 MiB and so on. In GB/s over the bus of 8: Azure, AI-benchmarking-guide,
# ND_H200_v5_results.md; Bekman, Machine Learning Engineering, network/benchmarks/results/all-reduce-8xH200.md.
BUS = {
    ("h200", 0.05): (88.78, 138.44, 181.94, 240.41, 300.91, 368.11, 412.45, 432.24, 442.72, 467.58, 472.57, 477.41),
    ("h200", 0.10): (64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15, 450.29, 463.58, 469.17, 473.10),
}
# In us, by nccl-tests: NVIDIA, dgxc-benchmarking, microbenchmark_nccl; a process for each of 8 A100s of 80 GB; 2 nodes
# and 4, NVIDIA, nccl-tests, issue 309.
TOOK = {
    ("h100", 0.03, 8): (42.2, 54.2, 83.0, 123.8, 199.3, 324.7, 586, 1112, 2151, 4029, 7939, 15749),
    ("a100", 0.05, 8): (55.4, 81.7, 130.6, 213.3, 377.6, 615.7, 1182, 2218, 4249, 8245, 16288, 32285),
    ("h100", 0.08, 16): (76.2, 94.4, 132.6, 185.4, 267.9, 466.1, 748, 1283, 2358, 4485, 8730, 17262),
    ("h100", 0.20, 32): (191.3, 151.1, 217.3, 259.6, 376.0, 579.1, 991, 1768, 3109, 5809, 11508, 22890),
}
TOOK |= {
    (*which, 8): tuple(2 * 7 / 8 * 2**k / rate / 1e3 for k, rate in enumerate(rates, 21))
    for which, rates in BUS.items()
}


@pytest.mark.parametrize(("which", "measured"), TOOK.items())
def test_all_reduces_of_published_machines_are_as_fast_as_measured(which, measured):
    """From 2 MiB to 4 GiB, by their mean error."""
    name, most, ranks = which
    found = [collective_seconds(op(size=2**k), ranks, machine(name)) for k in range(21, 33)]
    errors = [abs(1e6 * seconds / took - 1) for seconds, took in zip(found, measured, strict=True)]
    assert sum(errors) / len(errors) < most


def test_small_all_reduces_of_h100s_are_as_fast_as_measured():
    """In words: 16 to 512 KiB on 8 (NVIDIA, dgxc-benchmarking) and 16 of them (nccl-tests, issue 309: 256 KiB and more
    in lines)."""
    for ranks, times in ((8, (17.9, 19.3, 19.5, 19.9, 20.4, 20.7)), (16, (32.7, 34.1, 33.8, 38.8))):
        for k, took in enumerate(times, 14):
            seconds = collective_seconds(op(size=2**k), ranks, machine("h100"))
            assert seconds == pytest.approx(took * 1e-6, rel=0.21)


def test_b200s_of_two_nodes_send_sums_through_their_cards():
    """Google Cloud, a4 with 8 cards of 400 Gb/s a node: 128 MiB to 16 GiB in 0.71 to 47 ms, 684 GB/s over the bus."""
    for k, took in enumerate((714.1, 1115, 1809, 3329, 6171, 12219, 23842, 47062), 27):
        assert collective_seconds(op(size=2**k), 16, machine("b200")) == pytest.approx(took * 1e-6, rel=0.09)


def test_tokens_that_pytorch_gathers_are_copied_into_their_order():
    """8 ranks gather 8 MB, or scatter as many: each moves 16 MB of its memory besides, as no other group does."""
    plain = machine("h100")
    copies = replace(plain, copies_tokens=True)
    moved = plain.op_overhead + 16 * MB / plain.memory_rate
    for kind, size in (("all_gather", MB), ("reduce_scatter", 8 * MB)):
        for axis, more in (("tp", moved), ("fsdp", 0)):
            took = [communication_seconds(op(kind, size, axis), range(8), at) for at in (copies, plain)]
            assert took[0] - took[1] == pytest.approx(more)


def test_few_bytes_travel_in_words_more_in_lines_and_many_in_chunks():
    """NCCL's model of a ring of 8 A100s (tuning.cc): 6.6 + 14 x 0.6 us and 87.7 GB/s; 14 + 14 x 1.9 us and what lines
    reach; or 8.4 us and, for each 384 MiB, 28 slices of 3.4 us."""
    for size, seconds in (
        (MB // 2, 6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * MB / 2 / 87.7e9),
        (8 * MB, 14e-6 + 14 * 1.9e-6 + 2 * 7 / 8 * 8 * MB / (240e9 * 0.74)),
        (100 * MB, 8.4e-6 + 28 * 3.4e-6 + 2 * 7 / 8 * 100 * MB / 240e9),
        (1000 * MB, 8.4e-6 + 1000 * MB / (384 << 20) * 28 * 3.4e-6 + 2 * 7 / 8 * 1000 * MB / 240e9),
    ):
        assert collective_seconds(op(size=size), 8, machine("a100")) == pytest.approx(seconds)


def test_a_tree_of_middle_size_reaches_less():
    """Of 64 x 2^14 bytes half of what a large tensor does in chunks (NCCL, treeCorrectionFactor)."""
    spans = [(256, Link(0.0, 50e9))]
    tenths = (10,) * 14 + (5, 10)
    assert tree(op(size=1 << 20), spans, tenths) == pytest.approx(2 * tree(op(size=1 << 20), spans))
    assert tree(op(size=1 << 30), spans, tenths) == pytest.approx(tree(op(size=1 << 30), spans))


def test_switches_of_a_node_sum_nothing_between_nodes():
    """One H100 of each of 16 nodes: an all-reduce sends 2 x 15/16 of its bytes through each one's card."""
    h100 = machine("h100")
    assert collective_seconds(op(), range(0, 128, 8), h100) > 2 * 15 / 16 * 100 * MB / h100.tiers[-1][1].rate
    assert collective_seconds(op(), range(8), h100) < 2 * 7 / 8 * 100 * MB / h100.link_rate


def test_one_rank_has_nobody_to_talk_to():
    assert collective_seconds(op(), 1, NODES) == 0


def test_compute_beside_communication_gets_the_rest_of_a_device():
    """A fifth of it is taken: 4 s of compute take 5 s beside 10 s of communication, and beside the 1 s that is left of
    it 4 s take 4.2 s: in that second 0.8 s of them are done. What waits for nobody is as fast as it was."""
    seconds, background = [3.0, 10.0, 4.0, 4.0, 4.0, 4.0], [False, True, *[False] * 4]
    assert slowed(seconds, background, [True, False, *[True] * 4], 0.2) == pytest.approx([3, 10, 5, 5, 4, 4])
    assert slowed([6.0, 4.0, 4.0], [True, False, False], [False, True, True], 0.2) == pytest.approx([6, 5, 4.2])


def test_gathers_in_the_background_slow_down_compute_on_a_gpu():
    spec = Spec(mode="fsdp", devices=8, model="llama3_8b", layers=4, context=1024, global_batch=8, machine="h100")
    apart, beside = (predict(spec.with_(overlap=overlap)) for overlap in (False, None))
    busy = [sum(s.end - s.start for s in p.timeline.spans() if s.lane == "compute") for p in (apart, beside)]
    assert busy[0] < busy[1] < busy[0] / (1 - CHANNELS / 132)
    assert beside.step_time < apart.step_time
