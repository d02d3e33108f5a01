"""Collectives cost what closed forms say: bytes over the rate of the slowest link that they cross, and latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.cost.collectives import collective_seconds, communication_seconds, direct, hierarchical, ring, tree
from engine.cost.contention import CHANNELS, slowed
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


def test_tier_by_tier_each_moves_what_is_left_to_a_rank():
    """Inside 7/8 of all and back; between two nodes each rank half of its eighth and back."""
    spans = [(8, Link(0.0, 100e9)), (16, Link(0.0, 10e9))]
    parts = 2 * 7 / 8 * 100 * MB / 100e9 + 2 * 1 / 2 * 100 * MB / 8 / 10e9
    assert hierarchical(op(), spans) == pytest.approx(parts)
    # A gather brings the other node's shard of each rank first, then both to the seven neighbours.
    assert hierarchical(op("all_gather", MB), spans) == pytest.approx(MB / 10e9 + 2 * 7 * MB / 100e9)


def test_an_exchange_leaves_a_node_through_each_ranks_own_card():
    """Of 16 parts 8 go to the other node."""
    spans = [(8, Link(0.0, 100e9)), (16, Link(0.0, 10e9))]
    assert direct(op("all_to_all"), spans) == pytest.approx(8 / 16 * 100 * MB / 10e9)


@pytest.mark.parametrize(("ends", "link"), [(range(6, 8), 0), (range(7, 9), 1), (range(0, 9, 8), 1)])
def test_a_message_takes_the_tier_between_its_ends(ends, link):
    rate, latency = NODES.tiers[link][1].rate, NODES.tiers[link][1].latency
    assert communication_seconds(op("send", MB), ends, NODES) == pytest.approx(latency + MB / rate)


def test_all_reduces_of_published_machines_are_as_fast_as_measured():
    """nccl-tests, bytes a second over the bus of 8 GPUs: A100s and B200s with 1 GiB (vTrain's traces; Bekman, Machine
    Learning Engineering, network/benchmarks), H200s with 16 GiB (Bekman)."""
    for name, size, measured in (("a100", 2**30, 229.3e9), ("h200", 2**34, 482e9), ("b200", 2**30, 723e9)):
        seconds = collective_seconds(op(size=size), 8, machine(name))
        assert 2 * 7 / 8 * size / seconds == pytest.approx(measured, rel=0.06)
    for size, measured in ((2**26, 202.5e9), (2**27, 202.1e9)):  # the A100s with less
        seconds = collective_seconds(op(size=size), 8, machine("a100"))
        assert 2 * 7 / 8 * size / seconds == pytest.approx(measured, rel=0.13)


def test_tokens_that_pytorch_gathers_are_copied_into_their_order():
    """8 ranks gather 8 MB, or scatter as many: each moves 16 MB of its memory besides, as no other group does."""
    plain = machine("h100")
    copies = replace(plain, copies_tokens=True)
    moved = plain.op_overhead + 16 * MB / plain.memory_rate
    for kind, size in (("all_gather", MB), ("reduce_scatter", 8 * MB)):
        for axis, more in (("tp", moved), ("fsdp", 0)):
            took = [communication_seconds(op(kind, size, axis), range(8), at) for at in (copies, plain)]
            assert took[0] - took[1] == pytest.approx(more)


def test_few_bytes_travel_in_lines_and_many_in_chunks():
    """NCCL's model of a ring of 8 A100s (tuning.cc): 14 + 14 x 1.9 us and 120/128 of the rate, or 8.4 + 14 x 3.4 us."""
    for size, seconds in (
        (MB, 14e-6 + 14 * 1.9e-6 + 2 * 7 / 8 * MB / (240e9 * 120 / 128)),
        (1000 * MB, 8.4e-6 + 14 * 3.4e-6 + 2 * 7 / 8 * 1000 * MB / 240e9),
    ):
        assert collective_seconds(op(size=size), 8, machine("a100")) == pytest.approx(seconds)


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
