"""More bars than can be seen: fewer, that look the same, stand for all of them, and leave wide ones alone."""

from __future__ import annotations

from collections import defaultdict

import pytest

from engine.predict import predict
from engine.spec import Spec
from engine.timeline import Span
from viz import locales
from viz.figures.flights import Flight
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.figures.places import drawn
from viz.figures.rows import Bar
from viz.figures.thinned import MOST_BARS, NARROW, STRIPE, fewer_flights, thinned

END = 1.0
THIN = NARROW / 2


def bar(start: float, end: float, kind: str = "forward", microbatch: int = 0, part: str = "a", row: int = 0) -> Bar:
    known = dict.fromkeys(Span._fields, 0) | {"rank": row, "lane": "compute", "kind": kind, "start": start, "end": end}
    return Bar(
        Span(**known | {"microbatch": microbatch, "part": part, "payload": "", "bytes": 8}), row, 0.0, 10.0, False
    )


def in_turn(count: int, width: float, **same) -> list[Bar]:
    return [bar(i * width, (i + 1) * width, **same) for i in range(count)]


def test_what_can_be_seen_stays_as_it_is():
    bars = in_turn(10, 0.1)
    assert thinned(bars, END, most=10) == tuple(bars)
    assert thinned(bars, END, most=5) == tuple(bars)  # too many, but each wide


def test_narrow_bars_that_are_alike_become_one_that_says_how_many_it_stands_for():
    (one,) = thinned(in_turn(100, THIN), END, most=5)
    assert (one.span.start, one.span.end, one.count, one.span.bytes) == (0, pytest.approx(100 * THIN), 100, 800)
    assert one.span.part == "a" and one.span.microbatch == 0


def test_pieces_of_a_microbatch_join_before_microbatches_do():
    first, second = (
        in_turn(20, THIN, part="a"),
        [bar(0.5 + i * THIN, 0.5 + (i + 1) * THIN, microbatch=1) for i in range(9)],
    )
    found = thinned([*first, *second], END, most=5)
    assert [(one.span.microbatch, one.count) for one in found] == [(0, 20), (1, 9)]


def test_a_gap_that_can_be_seen_and_a_wide_bar_part_what_joins():
    bars = [*in_turn(5, THIN), bar(0.1, 0.1 + THIN), bar(0.2, 0.4), bar(0.4, 0.4 + THIN)]
    assert [one.count for one in thinned(bars, END, most=5)] == [5, 1, 1, 1]


def test_rows_and_kinds_stay_apart():
    bars = [*in_turn(9, THIN), *in_turn(9, THIN, row=1), *(bar(0.5, 0.5 + THIN, kind="backward") for _ in range(2))]
    assert {(one.row, one.span.kind) for one in thinned(bars, END, most=4)} == {
        (0, "forward"),
        (1, "forward"),
        (0, "backward"),
    }


def test_what_takes_turns_is_striped_by_its_part_of_the_time():
    """1F1B: backward takes twice as long as forward."""
    third = STRIPE / 30
    bars, count = [], 2000
    for i in range(count):
        bars += [
            bar(3 * i * third, (3 * i + 1) * third, "forward", i),
            bar((3 * i + 1) * third, 3 * (i + 1) * third, "backward", i),
        ]
    found = thinned(bars, END, most=100)
    assert len(found) <= 1 + 3 * count * third / STRIPE
    assert sum(one.count for one in found) == len(bars)
    time = defaultdict(float)
    for one in found:
        time[one.span.kind] += one.span.end - one.span.start
    assert time["backward"] / time["forward"] == pytest.approx(2, rel=0.05)


def test_flights_along_one_path_are_kept_apart():
    flights = [
        Flight(i / 10_000, i / 10_000 + 0.01, "gradient", -1, (way,)) for i in range(10_000) for way in ((0, 1), (1, 0))
    ]
    found = fewer_flights(flights, END)
    assert {flight.path for flight in found} == {((0, 1),), ((1, 0),)}
    assert 200 <= len(found) / 2 <= 251


def test_packets_on_one_way_do_not_lie_on_each_other():
    """Buckets that follow each other within a leg's time: seen are those between which there is room for a packet."""
    leg, ring = 1 / 128, tuple((i, (i + 1) % 4) for i in range(4))
    flights = [Flight(i * leg / 8, i * leg / 8 + 4 * leg, "gradient", i, ring) for i in range(40)]
    assert [flight.number for flight in fewer_flights(flights, END)] == list(range(0, 40, 4))
    apart = [Flight(i * leg / 2, i * leg / 2 + leg, "activation", i, ((0, 1),)) for i in range(40)]
    assert fewer_flights(apart, END) == tuple(apart)


@pytest.mark.parametrize("spec", [
    Spec(mode="zero1", devices=2048, model="gpt", global_batch=2048, machine="h100"),
    Spec(mode="pipeline", devices=8, model="gpt", layers=6, machine="h100", global_batch=512, microbatches=512),
], ids=["zero1", "1f1b"])  # fmt: skip
def test_a_large_picture_travels_as_a_small_one_and_loses_no_op(spec: Spec):
    prediction = predict(spec)
    timeline = prediction.simulation.of_ranks(drawn(prediction.plan))
    info = picture_info(prediction.plan, prediction.job.layers, timeline)
    lanes = {(one.row, one.y0) for one in info.rows.bars}
    assert len(timeline) > MOST_BARS and len(info.rows.bars) <= len(lanes) * (1 + 1 / STRIPE) < len(timeline)
    assert sum(one.count for one in info.rows.bars) == len(timeline)
    payload = moving_picture(info, locales.text("en"))
    assert any("ops" in words for words in payload["strings"])
