"""What travels: when, which way, in which rounds."""

from itertools import pairwise

import pytest

from engine.timeline import Span
from tests.viz.examples import REPLICAS, TWO, all_reduce, compute, message, predicted
from viz.figures.flights import Flight, bucket_of, flights, paths, root_of
from viz.figures.picture import picture_info
from viz.figures.places import OUTSIDE


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_an_all_reduce_goes_round_the_ring_in_2n_minus_2_rounds(n):
    """Patarasuk & Yuan 2009: in every round each rank passes one piece on to its neighbour."""
    ways = paths("all_reduce", range(n), rooted=False)
    assert [len(way) for way in ways] == [2 * (n - 1)] * n
    for k in range(2 * (n - 1)):
        assert sorted(way[k] for way in ways) == [(i, (i + 1) % n) for i in range(n)]
    for way in ways:
        assert all(a[1] == b[0] for a, b in pairwise(way))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_half_an_all_reduce_takes_half_the_rounds(kind):
    assert [len(way) for way in paths(kind, range(4), rooted=False)] == [3] * 4


def test_rooted_collectives_go_straight_and_a_broadcast_goes_down_the_ring():
    assert paths("scatter", [0, 1, 2], rooted=True) == [((0, 1),), ((0, 2),)]
    assert paths("broadcast", [0, 1, 2], rooted=True) == [((0, 1),), ((0, 2),)]
    assert paths("gather", [0, 1, 2], rooted=True) == [((1, 0),), ((2, 0),)]
    assert paths("reduce", [0, 1, 2], rooted=True) == [((1, 0),), ((2, 0),)]
    assert paths("broadcast", [0, 1, 2], rooted=False) == [((0, 1), (1, 2))]


def test_an_all_to_all_goes_straight_from_each_to_each_in_one_round_less_than_ranks():
    """Every ordered pair once; in a round everybody sends to one and hears from one."""
    spans = [Span(r, "dp", "all_to_all", 0, 1.0, 4.0, payload="tokens", group="dp", bytes=8) for r in range(4)]
    found = flights(spans, REPLICAS, 10.0)
    assert {f.path for f in found} == {((a, b),) for a in range(4) for b in range(4) if a != b}
    rounds = {(f.start, f.end): [g.path[0] for g in found if g.start == f.start] for f in found}
    assert sorted(rounds) == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    for legs in rounds.values():
        assert sorted(a for a, _ in legs) == sorted(b for _, b in legs) == [0, 1, 2, 3]
    assert {f.payload for f in found} == {"tokens"}


def test_one_rank_alone_sends_nothing():
    assert paths("all_reduce", [0], rooted=False) == []


def test_a_message_flies_from_the_start_of_its_send_to_the_end_of_its_receive():
    spans = [
        compute("forward", 0, 0.0, 1.0), compute("forward", 0, 1.0, 2.0, microbatch=1),
        message("send", 0, 1, 1.0, 3.0), message("recv", 1, 0, 2.0, 4.0),
        message("send", 0, 1, 3.0, 5.0, microbatch=1), message("recv", 1, 0, 4.0, 6.0, microbatch=1),
    ]  # fmt: skip
    assert flights(spans, TWO.mesh, 10.0) == (
        Flight(1.0, 4.0, "activation", 0, ((0, 1),)),
        Flight(3.0, 6.0, "activation", 1, ((0, 1),)),
    )


def test_a_message_whose_receive_was_never_recorded_flies_until_its_send_ends():
    spans = [compute("forward", 1, 0.0, 0.1), message("send", 0, 1, 1.0, 3.0)]
    assert flights(spans, TWO.mesh, 10.0) == (Flight(1.0, 3.0, "activation", -1, ((0, 1),)),)


def test_a_message_to_a_rank_that_is_not_drawn_is_left_out():
    assert flights([message("send", 0, 1, 1.0, 3.0)], TWO.mesh, 10.0) == ()


@pytest.mark.parametrize("at", [0.0, 5.0, 10.0])
def test_a_message_that_takes_no_time_is_still_seen_and_stays_on_the_clock(at):
    spans = [message("send", 0, 1, at, at), message("recv", 1, 0, at, at)]
    (flight,) = flights(spans, TWO.mesh, 10.0)
    assert flight.end - flight.start == pytest.approx(0.3)
    assert 0 <= flight.start <= at <= flight.end + 1e-9 <= 10.0 + 1e-6


def test_a_collective_moves_once_its_last_member_has_joined():
    spans = [all_reduce(rank, start, 6.0) for rank, start in enumerate((1.0, 2.0, 4.0, 3.0))]
    found = flights(spans, REPLICAS, 10.0)
    assert len(found) == 4
    assert {(f.start, f.end, f.payload, len(f.path)) for f in found} == {(4.0, 6.0, "gradient", 6)}


def test_buckets_are_numbered_where_there_are_several():
    spans = [
        all_reduce(rank, at, at + 2, part) for at, part in ((0.0, "bucket0"), (3.0, "bucket1")) for rank in range(4)
    ]
    assert [f.number for f in flights(spans, REPLICAS, 10.0)] == [0] * 4 + [1] * 4
    assert {f.number for f in flights(spans[:4], REPLICAS, 10.0)} == {-1}
    assert (bucket_of("bucket12"), bucket_of("block12")) == (12, -1)


def test_a_batch_comes_from_outside():
    load = Span(1, "compute", "load", 0, 0.0, 1.0, payload="batch")
    assert flights([load], TWO.mesh, 10.0) == (Flight(0.0, 1.0, "batch", -1, ((OUTSIDE, 1),)),)


def test_the_numbers_of_flights_of_a_pipeline_have_a_closed_form():
    """p stages, m microbatches: (p-1)m activations and as many gradients; two devices load."""
    plan, layers, timeline = predicted("pipeline", 4, "unit", microbatches=8)
    info = picture_info(plan, layers, timeline)
    count = {p: sum(f.payload == p for f in info.flights) for p in ("activation", "gradient", "batch")}
    assert count == {"activation": 24, "gradient": 24, "batch": 2}


def test_an_owner_broadcasts_from_where_it_stands():
    spans = [Span(rank, "dp", "broadcast", 0, 0.0, 1.0, -1, -1, "owner2", "weights", "dp", -1, 8) for rank in range(4)]
    assert [f.path for f in flights(spans, REPLICAS, 1.0)] == [((2, 3), (3, 0), (0, 1))]
    assert (root_of("owner12"), root_of("bucket3")) == (12, 0)
