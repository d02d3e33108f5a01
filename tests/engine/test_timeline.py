"""A timeline keeps its spans through a file, and its steps follow one another."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from engine.asking.rules import SpecError
from engine.timeline import Span, Timeline


def span(rank: int, step: int, start: float, end: float, **more) -> Span:
    return Span(rank, "compute", more.pop("kind", "forward"), step, start, end, **more)


def test_a_file_gives_back_the_same_spans(tmp_path):
    spans = [
        span(0, 0, 0.0, 1.25, part="conv1", payload="", microbatch=3, stage=1),
        Span(1, "pp:0>1", "recv", 0, 0.5, 0.75, payload="activation", group="pp", peer=0, bytes=2**40, part="é中"),
    ]
    Timeline.of(spans, "measured", 2).save(tmp_path / "timeline.parquet")
    again = Timeline.load(tmp_path / "timeline.parquet")
    assert list(again.spans()) == spans
    assert (again.source, again.world_size) == ("measured", 2)


def test_an_empty_timeline_is_kept_too(tmp_path):
    Timeline.of([], "simulated", 4).save(tmp_path / "timeline.parquet")
    again = Timeline.load(tmp_path / "timeline.parquet")
    assert (len(again), again.makespan, again.steps, again.step_seconds()) == (0, 0.0, [], {})


@pytest.mark.parametrize("damage", ["text", "a part", "other columns", "no source"])
def test_a_file_that_is_damaged_or_foreign_is_refused(damage, tmp_path):
    path = tmp_path / "some-run" / "timeline.parquet"
    path.parent.mkdir()
    Timeline.of([span(0, 0, 0.0, 1.0)], "measured", 1).save(path)
    if damage in ("text", "a part"):
        path.write_bytes(b"text" if damage == "text" else path.read_bytes()[:200])
    else:
        table = pq.read_table(path)
        pq.write_table(table.drop(["rank"]) if damage == "other columns" else table.replace_schema_metadata(None), path)
    with pytest.raises(SpecError, match="some-run") as wrong:
        Timeline.load(path)
    assert wrong.value.code == "bad_timeline"


# Rank 1 is done with step 0 at 2, and loads for step 1 from 2 to 3 while rank 0 computes until 10.
AHEAD = [
    span(0, 0, 0.0, 10.0),
    span(1, 0, 0.0, 2.0),
    span(1, 1, 2.0, 3.0, kind="load"),
    span(0, 1, 10.5, 15.0),
    span(1, 1, 15.0, 16.0),
]


def test_a_step_begins_when_the_one_before_has_ended_everywhere():
    timeline = Timeline.of(AHEAD, "measured", 2)
    assert timeline.step_seconds() == {0: 10.0, 1: 6.0}
    one = timeline.step(1)
    assert [(s.kind, s.rank, s.start, s.end) for s in one.spans()] == [
        ("load", 1, 0.0, 0.0),
        ("forward", 0, 0.5, 5.0),
        ("forward", 1, 5.0, 6.0),
    ]
    assert timeline["start"].min() == 0.0 and timeline["start"][2] == 2.0  # the timeline itself is as measured
    assert (timeline.ahead(0), timeline.ahead(1)) == ({}, {1: 1.0})


def test_a_span_that_reaches_into_the_step_keeps_that_part():
    spans = [span(0, 0, 0.0, 4.0), span(1, 1, 3.0, 6.0), span(0, 1, 4.0, 5.0)]
    timeline = Timeline.of(spans, "measured", 2)
    assert [s.duration for s in timeline.step(1).spans()] == [2.0, 1.0]
    assert timeline.ahead(1) == {1: 1.0}


def test_steps_that_are_not_neighbours_are_left_alone():
    """Between steps 0 and 2 there was one that is not in the timeline; nothing is known of its end."""
    spans = [span(0, 0, 0.0, 4.0), span(1, 2, 3.0, 6.0)]
    timeline = Timeline.of(spans, "measured", 2)
    assert timeline.step_seconds() == {0: 4.0, 2: 3.0}
    assert timeline.ahead(2) == {}


@pytest.mark.parametrize("step", [0, 7])
def test_a_step_alone_starts_at_zero(step):
    timeline = Timeline.of([span(0, step, 5.0, 6.0), span(0, step, 6.0, 8.0)], "measured", 1)
    assert timeline.step(step)["start"].tolist() == [0.0, 1.0]
    assert len(timeline.step(step + 1)) == 0
