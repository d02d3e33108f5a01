"""Conformance says yes only when the ops measured are the ops planned, in order, with their bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine import modes
from engine.cost.machine import machine
from engine.job import Job, prepare
from engine.outcome.conform import conform
from engine.outcome.finish import settle
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Span

STEPS = 4


def job_of(mode: str) -> Job:
    return prepare(Spec(mode=mode, devices=2, model="mlp", steps=STEPS))


def as_measured(job: Job) -> list[Span]:
    """What a run that does exactly what was planned would have recorded; collectives do not know their part."""
    spans = []
    for step in range(STEPS):
        for span in simulate(modes.plan(job, step), machine("local")).timeline.spans():
            shifted = span._replace(step=step, start=span.start + step, end=span.end + step)
            spans.append(shifted._replace(part="") if span.kind in ("all_reduce", "broadcast") else shifted)
    return spans


def verdict(job: Job, spans: list[Span]) -> dict:
    return conform(spans, lambda step: modes.plan(job, step), range(STEPS))[0]


@pytest.mark.parametrize(
    "mode",
    ["data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "local_sgd", "layer_split", "pipeline", "tensor"],
)
def test_a_run_that_does_what_was_planned_conforms(mode):
    job = job_of(mode)
    spans = as_measured(job)
    report = verdict(job, spans)
    assert report == {
        "ok": True, "planned": len(spans), "measured": len(spans), "matched": len(spans), "first_difference": None,
    }  # fmt: skip


def test_parts_are_filled_in_from_the_plan():
    job = prepare(Spec(mode="ddp", devices=2, model="mlp", bucket_mb=0.2, steps=STEPS))
    joined = conform(as_measured(job), lambda step: modes.plan(job, step), range(STEPS))[1]
    parts = [s.part for s in joined if s.kind == "all_reduce" and s.rank == 0 and s.step == 3]
    assert parts == ["bucket0", "bucket1"]


def first_of(spans: list[Span], **what) -> int:
    return next(i for i, s in enumerate(spans) if all(getattr(s, k) == v for k, v in what.items()))


# Each breaks a run that conforms in one way: the negative controls.
BREAK = {
    "an op is missing": lambda spans, i: spans.pop(i),
    "an op came twice": lambda spans, i: spans.append(spans[i]._replace(start=spans[i].end, end=spans[i].end)),
    "bytes differ": lambda spans, i: spans.__setitem__(i, spans[i]._replace(bytes=spans[i].bytes + 4)),
    "another kind": lambda spans, i: spans.__setitem__(i, spans[i]._replace(kind="broadcast")),
    "another payload": lambda spans, i: spans.__setitem__(i, spans[i]._replace(payload="weights")),
    "another microbatch": lambda spans, i: spans.__setitem__(i, spans[i]._replace(microbatch=7)),
    "another peer": lambda spans, i: spans.__setitem__(i, spans[i]._replace(peer=spans[i].rank)),
    "another lane": lambda spans, i: spans.__setitem__(i, spans[i]._replace(lane="elsewhere")),
}


@pytest.mark.parametrize("how", BREAK)
def test_one_wrong_op_is_seen_and_named(how):
    job = job_of("pipeline")
    spans = as_measured(job)
    index = first_of(spans, kind="send", step=2, rank=0)
    BREAK[how](spans, index)
    report = verdict(job, spans)
    assert report["ok"] is False
    assert report["first_difference"]["step"] == 2
    assert report["matched"] < max(report["planned"], report["measured"])


def test_two_computes_in_the_wrong_order_are_seen():
    job = job_of("pipeline")
    spans = as_measured(job)
    a = first_of(spans, kind="forward", step=1, rank=0, microbatch=0)
    b = first_of(spans, kind="forward", step=1, rank=0, microbatch=1)
    times = [(spans[i].start, spans[i].end) for i in (a, b)]
    spans[a] = spans[a]._replace(start=times[1][0], end=times[1][1])
    spans[b] = spans[b]._replace(start=times[0][0], end=times[0][1])
    report = verdict(job, spans)
    assert report["first_difference"]["planned"] == "forward s0 m0"
    assert report["first_difference"]["measured"] == "forward s0 m1"


def with_starts(order: list[int]) -> list[Span]:
    """The three buckets' all-reduces of rank 0 in step 3, noted in this order, one after the other."""
    spans = as_measured(BUCKETS)
    found = [i for i, s in enumerate(spans) if s.kind == "all_reduce" and s.rank == 0 and s.step == 3]
    begin = spans[found[0]].start
    for place, which in enumerate(order):
        start = begin + place * 1e-6
        spans[found[which]] = spans[found[which]]._replace(start=start, end=start + 0.5e-6)
    return spans


BUCKETS = prepare(Spec(mode="ddp", devices=2, model="mlp", layers=2, hidden=64, bucket_mb=0.001, steps=STEPS))


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [0, 2, 1], [1, 2, 0]])
def test_one_asynchronous_collective_may_be_noted_late(order):
    """gloo runs two at a time and notes the start of each on its own thread: one can wait for a core there."""
    assert verdict(BUCKETS, with_starts(order))["ok"] is True


@pytest.mark.parametrize("order", [[2, 1, 0], [2, 0, 1]])
def test_two_that_are_late_at_once_are_in_the_wrong_order(order):
    """With two threads that cannot be; the buckets differ in size, so they are told apart."""
    assert verdict(BUCKETS, with_starts(order))["ok"] is False


GATHERS = prepare(
    Spec(
        mode="context", model="gpt", layers=1, hidden=16, heads=2, context=16, dataset="synthetic",
        attention="all_gather", bucket_mb=1e-5, steps=STEPS,
    )
)  # fmt: skip


@pytest.mark.parametrize(("late", "ok"), [("all_reduce", True), ("reduce_scatter", False)])
def test_what_is_waited_for_may_be_noted_before_an_asynchronous_one_and_not_the_other_way_round(late, ok):
    """An all-reduce of DDP is called, then attention's reduce-scatter, whose caller waits for nothing else."""
    spans = as_measured(GATHERS)
    order = [i for i, s in enumerate(spans) if (s.rank, s.step, s.lane) == (0, 3, "cp")]
    scatter = next(place for place, i in enumerate(order) if spans[i].kind == "reduce_scatter")
    pair = order[scatter - 1], order[scatter]
    if late == "reduce_scatter":
        pair = order[scatter], order[scatter + 1]
    times = [(spans[i].start, spans[i].end) for i in pair]
    spans[pair[0]] = spans[pair[0]]._replace(start=times[1][0], end=times[1][1])
    spans[pair[1]] = spans[pair[1]]._replace(start=times[0][0], end=times[0][1])
    assert verdict(GATHERS, spans)["ok"] is ok


def test_a_collective_that_is_waited_for_has_its_order():
    """The two broadcasts of DDP's second step are synchronous: their order is known."""
    spans = as_measured(BUCKETS)
    first, second = (i for i, s in enumerate(spans) if s.kind == "broadcast" and s.rank == 0)
    times = spans[first][4:6], spans[second][4:6]
    spans[first] = spans[first]._replace(start=times[1][0], end=times[1][1])
    spans[second] = spans[second]._replace(start=times[0][0], end=times[0][1])
    assert verdict(BUCKETS, spans)["first_difference"]["lane"] == "dp"


EXPERTS = prepare(Spec(mode="expert", devices=2, model="moe", layers=2, hidden=16, bucket_mb=0.001, steps=STEPS))


def swapped(first: str, second: str) -> list[Span]:
    """Of rank 0 in step 3, two neighbours on the lane ep that start in each other's place."""
    spans = as_measured(EXPERTS)
    lane = sorted((s.start, i) for i, s in enumerate(spans) if (s.lane, s.rank, s.step) == ("ep", 0, 3))
    a, b = next((i, j) for (_, i), (_, j) in pairwise(lane) if (spans[i].kind, spans[j].kind) == (first, second))
    times = [(spans[i].start, spans[i].end) for i in (a, b)]
    spans[a] = spans[a]._replace(start=times[1][0], end=times[1][1])
    spans[b] = spans[b]._replace(start=times[0][0], end=times[0][1])
    return spans


def test_an_asynchronous_collective_may_be_noted_after_one_that_is_waited_for():
    assert verdict(EXPERTS, as_measured(EXPERTS))["ok"] is True
    assert verdict(EXPERTS, swapped("all_reduce", "all_to_all"))["ok"] is True


def test_one_that_is_waited_for_is_never_noted_late():
    assert verdict(EXPERTS, swapped("all_to_all", "all_reduce"))["ok"] is False


def test_nothing_recorded_does_not_conform():
    assert verdict(job_of("ddp"), [])["ok"] is False


def message(kind: str, rank: int, peer: int, start: float, end: float) -> Span:
    return Span(rank, f"pp:{min(rank, peer)}>{max(rank, peer)}", kind, 0, start, end, payload="activation", peer=peer)


def test_waiting_is_taken_out_of_messages():
    """Entered at 0, sent at 5, there at 6; the sender looks for its end only at 9."""
    recv, send = settle([message("recv", 1, 0, 0.0, 6.0), message("send", 0, 1, 5.0, 9.0)])
    assert (recv.start, recv.end) == (5.0, 6.0)
    assert (send.start, send.end) == (5.0, 6.0)


def test_messages_pair_first_in_first_out():
    spans = [message("send", 0, 1, t, t + 9) for t in (0.0, 1.0)] + [
        message("recv", 1, 0, t, t + 1) for t in (0.0, 1.5)
    ]
    settled = settle(spans)
    assert [s.end for s in settled[:2]] == [1.0, 2.5]
    assert [s.start for s in settled[2:]] == [0.0, 1.5]


def test_a_send_noted_late_began_before_it_was_received():
    recv, send = settle([message("recv", 1, 0, 0.0, 6.0), message("send", 0, 1, 6.5, 9.0)])
    assert send.start <= recv.start <= recv.end == send.end == 6.0
