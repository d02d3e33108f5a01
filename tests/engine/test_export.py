"""An exported trace is JSON that trace viewers take, with an arrow from each send to its own receive; so is the CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter

import pytest

from engine import modes
from engine.cost.machine import machine
from engine.export import to_csv, to_perfetto
from engine.job import prepare
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Span, Timeline


def events(timeline: Timeline, phase: str) -> list[dict]:
    return [event for event in json.loads(to_perfetto(timeline))["traceEvents"] if event["ph"] == phase]


def predicted(mode: str = "pipeline", **settings) -> Timeline:
    job = prepare(Spec(mode=mode, **({"devices": 3} | settings)))
    return simulate(modes.plan(job), machine("h100")).timeline


def test_a_span_is_a_complete_event_in_microseconds_from_the_first_start():
    spans = [
        Span(1, "compute", "forward", 4, 1000.5, 1000.75, 1, 2, "fc1"),
        Span(0, "dp", "all_reduce", 4, 1000.25, 1001.0, part="bucket 0", payload="gradient", group="dp", bytes=64),
    ]
    first, second = events(Timeline.of(spans, "measured", 2), "X")
    assert (first["ts"], first["dur"], first["pid"]) == (250_000, 250_000, 1)
    assert (first["name"], first["cat"]) == ("forward fc1 m2", "compute")
    assert first["args"] == {"step": 4, "bytes": 0, "stage": 1, "microbatch": 2, "part": "fc1"}
    assert (second["ts"], second["dur"], second["pid"]) == (0, 750_000, 0)
    assert (second["name"], second["cat"]) == ("all_reduce bucket 0", "communication")
    assert second["args"] == {"step": 4, "bytes": 64, "part": "bucket 0", "payload": "gradient", "group": "dp"}


def test_ranks_are_processes_and_lanes_are_threads_with_names():
    timeline = predicted()
    named = [event for event in events(timeline, "M") if event["name"] in ("process_name", "thread_name")]
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    assert processes == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert [threads[1, i] for i in range(5)] == ["compute", "pp:0>1", "pp:1>0", "pp:1>2", "pp:2>1"]
    for event, span in zip(events(timeline, "X"), timeline.spans(), strict=True):
        assert (event["pid"], threads[event["pid"], event["tid"]]) == (span.rank, span.lane)
    # Every process and thread is also given its place, or a viewer sorts them by name.
    assert Counter(event["name"] for event in events(timeline, "M")) == {
        "process_name": 3,
        "process_sort_index": 3,
        "thread_name": len(threads),
        "thread_sort_index": len(threads),
    }


def test_spans_of_a_thread_do_not_overlap_in_a_predicted_trace():
    """Complete events of one thread must nest; a lane is a queue, so here they do not even touch."""
    last: dict[tuple, float] = {}
    for event in sorted(events(predicted(devices=4), "X"), key=lambda event: event["ts"]):
        thread = (event["pid"], event["tid"])
        assert event["ts"] >= last.get(thread, 0.0) - 1e-6
        last[thread] = event["ts"] + event["dur"]


def test_each_message_has_an_arrow_from_its_send_to_its_receive():
    timeline = predicted(devices=4, microbatches=8)
    heads = {event["id"]: event for event in events(timeline, "f")}
    tails = {event["id"]: event for event in events(timeline, "s")}
    assert len(tails) == len(events(timeline, "s")) == (timeline["kind"] == "send").sum() == 3 * 8 * 2
    assert heads.keys() == tails.keys()
    spans = {kind: [e for e in events(timeline, "X") if e["name"].startswith(kind)] for kind in ("send", "recv")}

    def around(event, kind):
        """The one span that is open at the event, on its thread: a viewer ties the arrow to it."""
        place = (event["pid"], event["tid"])
        inside = [
            e for e in spans[kind] if (e["pid"], e["tid"]) == place and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
        ]
        return max(inside, key=lambda e: e["ts"])["args"]

    for number, tail in tails.items():
        head = heads[number]
        assert head["bp"] == "e" and head["ts"] >= tail["ts"] and head["pid"] != tail["pid"]
        send, recv = around(tail, "send"), around(head, "recv")
        assert (send["payload"], send["microbatch"]) == (recv["payload"], recv["microbatch"])
        assert (send["peer"], recv["peer"]) == (head["pid"], tail["pid"])


def test_messages_are_joined_first_in_first_out_within_their_step_axis_and_direction():
    def message(kind, rank, peer, start, step=0, group="pp", microbatch=0):
        return Span(rank, "x", kind, step, start, start + 1, microbatch=microbatch, group=group, peer=peer)

    spans = [
        message("send", 0, 1, 0.0, microbatch=1),
        message("send", 0, 1, 2.0, microbatch=2),
        message("send", 0, 1, 4.0, group="tp", microbatch=3),
        message("send", 1, 0, 4.0, microbatch=4),
        message("send", 0, 1, 0.0, step=1, microbatch=5),
        message("send", 0, 2, 1.0, microbatch=9),  # nobody receives it
        message("recv", 1, 0, 9.0, microbatch=2),
        message("recv", 1, 0, 5.0, group="tp", microbatch=3),
        message("recv", 1, 0, 8.0, microbatch=1),
        message("recv", 0, 1, 6.0, microbatch=4),
        message("recv", 1, 0, 7.0, step=1, microbatch=5),
        message("recv", 2, 1, 7.0, microbatch=8),  # nobody sent it
    ]
    timeline = Timeline.of(spans, "measured", 3)
    starts = {event["id"]: event["ts"] / 1e6 for event in events(timeline, "s")}
    ends = {event["id"]: event["ts"] / 1e6 for event in events(timeline, "f")}
    assert sorted((starts[i], ends[i]) for i in starts) == [(0.0, 7.5), (0.0, 8.5), (2.0, 9.5), (4.0, 5.5), (4.0, 6.5)]


def test_an_arrow_never_points_back_in_time():
    """A clock may be off: here the receive is over before its send starts. The head then sits at its end."""
    spans = [Span(0, "a", "send", 0, 5.0, 6.0, peer=1), Span(1, "a", "recv", 0, 1.0, 2.0, peer=0)]
    spans += [Span(0, "a", "send", 0, 7.0, 8.0, peer=1), Span(1, "a", "recv", 0, 2.0, 9.0, peer=0)]
    heads = [event["ts"] / 1e6 + 1.0 for event in events(Timeline.of(spans, "measured", 2), "f")]
    assert heads == [2.0, 7.0]


def test_memory_samples_are_counters():
    timeline = Timeline.of([Span(0, "compute", "load", 0, 2.0, 3.0)], "measured", 1, [(0, 2.5, "gradients", 640)])
    (counter,) = events(timeline, "C")
    assert (counter["name"], counter["ts"], counter["args"]) == ("memory: gradients", 500_000, {"bytes": 640})


@pytest.mark.parametrize("where", ["start", "end", "memory"])
@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf])
def test_a_time_that_json_cannot_hold_is_refused(where, time):
    times = {"start": 0.0, "end": 1.0, "memory": 0.5} | {where: time}
    spans = [Span(0, "compute", "load", 0, 0.0, 1.0), Span(0, "compute", "load", 0, times["start"], times["end"])]
    timeline = Timeline.of(spans, "measured", 1, [(0, times["memory"], "parameters", 4)])
    with pytest.raises(ValueError, match="finite times only"):
        to_perfetto(timeline)


@pytest.mark.parametrize("world_size", [0, 2])
def test_an_empty_timeline_is_a_trace_without_spans(world_size):
    trace = json.loads(to_perfetto(Timeline.of([], "measured", world_size)))
    assert [event["ph"] for event in trace["traceEvents"]] == ["M", "M"] * world_size
    assert trace["otherData"] == {"source": "measured", "world_size": world_size}


@pytest.mark.parametrize(
    "mode",
    ["data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "local_sgd", "layer_split", "pipeline", "tensor"],
)
def test_the_trace_of_every_mode_is_strict_json(mode):
    def refuse(constant):
        raise AssertionError(constant)

    text = to_perfetto(predicted(mode, devices=4))
    trace = json.loads(text, parse_constant=refuse)
    assert {"ph", "pid"} <= set.intersection(*(set(event) for event in trace["traceEvents"]))
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in trace["traceEvents"] if "ts" in event)


def test_any_name_is_escaped():
    spans = [Span(0, 'a"\n\\', "load", 0, 0.0, 1.0, part='层,"\n', payload="<script>")]
    timeline = Timeline.of(spans, "measured", 1)
    assert events(timeline, "X")[0]["args"]["part"] == '层,"\n'
    (row,) = csv.DictReader(io.StringIO(to_csv(timeline)))
    assert (row["lane"], row["part"], row["payload"]) == ('a"\n\\', '层,"\n', "<script>")


def test_a_csv_holds_every_span_unchanged():
    timeline = predicted(devices=4)
    header, *rows = csv.reader(io.StringIO(to_csv(timeline)))
    assert tuple(header) == Span._fields
    kinds = [type(value) for value in next(timeline.spans())]
    read = [Span(*(kind(text) for kind, text in zip(kinds, row, strict=True))) for row in rows]
    assert read == list(timeline.spans())


def test_a_csv_of_nothing_is_its_header():
    assert to_csv(Timeline.of([], "measured", 2)).splitlines() == [",".join(Span._fields)]
