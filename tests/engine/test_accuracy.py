"""A difference between a predicted step and a measured one is divided rightly, and its reason is the one that was put
in: hand-made timelines, each with one thing wrong."""

from __future__ import annotations

import dataclasses
import itertools
import json
from statistics import fmean

import pytest

from bench.accuracy import told
from engine.archive import read_json
from engine.cli.tables import seconds
from engine.cost import calibration
from engine.outcome import periods
from engine.outcome.accuracy import REASONS, accuracy, by_kind, explain, shared_with, without_waiting
from engine.outcome.finish import _slower, other_cores
from engine.plan import Mesh
from engine.predict import predict
from engine.real import cores
from engine.spec import Spec
from engine.timeline import Span, Timeline
from tests.engine.proof import finished


def timeline(*steps: dict[int, list[tuple[str, float, float]]], source: str = "measured") -> Timeline:
    """Of each step, rank -> (kind, start, end)."""
    spans = []
    for step, ranks in enumerate(steps):
        for rank, ops in ranks.items():
            for kind, start, end in ops:
                lane = "compute" if kind in ("forward", "backward", "optimizer") else "dp"
                spans.append(Span(rank, lane, kind, step, start, end))
    return Timeline.of(spans, source, len(steps[0]))


# Two ranks compute 3 s and 6 s, reduce for 1 s: a step of 10 s.
PLANNED = timeline({r: [("forward", 0, 3), ("backward", 3, 9), ("all_reduce", 9, 10)] for r in (0, 1)})


def compare(measured: Timeline, **given) -> dict:
    took = list(measured.step_seconds().values())
    return accuracy(PLANNED, measured, **({"step_times": took, "predicted_step_time": 10.0} | given))


def test_what_went_as_predicted_needs_no_reason():
    found = compare(PLANNED)
    assert found["step"] == {"kind": "step", "predicted": 10.0, "measured": 10.0, "error": 0.0}
    assert found["reason"] is None
    assert {row["kind"]: (row["predicted"], row["measured"], row["error"]) for row in found["ops"]} == {
        "forward": (3, 3, 0), "backward": (6, 6, 0), "all_reduce": (1, 1, 0),
    }  # fmt: skip


def test_an_op_that_took_longer():
    slow = {r: [("forward", 0, 3), ("backward", 3, 13), ("all_reduce", 13, 14)] for r in (0, 1)}
    found = compare(timeline(slow))
    assert found["reason"] == {
        "code": "ops",
        "share": 1.0,
        "values": {"seconds": 4.0, "longer": True, "kind": "backward"},
    }
    assert found["step"]["error"] == pytest.approx(10 / 14 - 1)
    assert explain(found["reason"], seconds) == "backward took 4 s longer than predicted"


def test_an_op_that_took_less():
    quick = {r: [("forward", 0, 1), ("backward", 1, 7), ("all_reduce", 7, 8)] for r in (0, 1)}
    reason = compare(timeline(quick))["reason"]
    assert (reason["code"], reason["values"]) == ("ops", {"seconds": 2.0, "longer": False, "kind": "forward"})
    assert explain(reason, seconds) == "forward took 2 s less than predicted"


def test_a_communication_that_took_longer_and_is_not_hidden():
    slow = {r: [("forward", 0, 3), ("backward", 3, 9), ("all_reduce", 9, 14)] for r in (0, 1)}
    reason = compare(timeline(slow))["reason"]
    assert (reason["code"], reason["values"]["kind"]) == ("copies", "all_reduce")
    assert reason["values"]["seconds"] == 4.0


def test_time_between_ops():
    gaps = {r: [("forward", 1, 4), ("backward", 6, 12), ("all_reduce", 13, 14)] for r in (0, 1)}
    found = compare(timeline(gaps), step_times=[14.0])
    assert found["reason"]["code"] == "between"
    assert found["reason"]["values"]["seconds"] == pytest.approx(4.0)


def test_one_rank_that_computes_longer_while_the_other_waits():
    """Rank 1 takes 4 s longer, so rank 0's reduction begins early: that is waiting, not communication."""
    uneven = {
        0: [("forward", 0, 3), ("backward", 3, 9), ("all_reduce", 9, 14)],
        1: [("forward", 0, 3), ("backward", 3, 13), ("all_reduce", 13, 14)],
    }
    settled = without_waiting(timeline(uneven), Mesh(("dp",), (2,)))
    assert [span.start for span in settled.spans() if span.kind == "all_reduce"] == [13, 13]
    found = compare(settled)
    assert found["parts"] == {"ops": 2.0, "copies": 0.0, "imbalance": 2.0, "between": 0.0}
    assert sum(found["parts"].values()) == 4.0
    more = compare(settled, waited=0.5)  # of the 2 s half a second was waiting for a core
    assert more["reason"]["code"] == "imbalance"


def test_a_collective_that_began_early_everywhere_is_left_as_it_is():
    """Negative control of the one above: nobody waits for anybody."""
    assert (without_waiting(PLANNED, Mesh(("dp",), (2,)))["start"] == PLANNED["start"]).all()


def test_compute_that_had_to_wait_for_a_core():
    slow = {r: [("forward", 0, 5), ("backward", 5, 13), ("all_reduce", 13, 14)] for r in (0, 1)}
    found = compare(timeline(slow), waited=3.5, ranks=2, cores=2)
    assert found["reason"]["code"] == "contention"
    assert found["parts"]["contention"] == 3.5 and found["parts"]["ops"] == 0.5
    assert "2 ranks on 2 cores" in explain(found["reason"], seconds)
    # Had it been predicted, it would be no reason.
    assert compare(timeline(slow), waited=3.5, predicted_waited=3.5)["reason"]["code"] == "ops"


def test_a_machine_that_was_slower_than_when_it_was_calibrated():
    """All takes 1.2 times as long, and the backward half a second more: of 2.5 s 2 are the machine's."""
    slow = {r: [("forward", 0, 3.6), ("backward", 3.6, 11.3), ("all_reduce", 11.3, 12.5)] for r in (0, 1)}
    found = compare(timeline(slow), slower=1.2)
    assert found["parts"] == pytest.approx({"speed": 2.0, "ops": 0.5, "copies": 0, "imbalance": 0, "between": 0})
    assert found["reason"]["code"] == "speed" and found["reason"]["values"]["longer"]
    assert found["at_speed"] == {"kind": "step", "predicted": 12.0, "measured": 12.5, "error": pytest.approx(-0.04)}
    assert found["step"]["error"] == pytest.approx(10 / 12.5 - 1)  # what was said before the run stays as it was
    # Of the 1.3 s in which they waited for a core, 1.2 were predicted at that speed.
    assert compare(timeline(slow), slower=1.2, waited=1.3, predicted_waited=1.0)["parts"]["contention"] == (
        pytest.approx(0.1)
    )


def test_a_machine_that_was_faster():
    quick = {r: [("forward", 0, 2.4), ("backward", 2.4, 7.2), ("all_reduce", 7.2, 8)] for r in (0, 1)}
    found = compare(timeline(quick), slower=0.8)
    assert found["at_speed"]["error"] == pytest.approx(0) and found["parts"]["speed"] == pytest.approx(-2.0)
    assert explain(found["reason"], seconds).startswith("this machine was faster")


def test_where_its_speed_is_not_known_it_is_no_part():
    found = compare(PLANNED)
    assert (found["slower"], found["at_speed"]) == (None, None) and "speed" not in found["parts"]


def test_a_run_that_ended_before_has_no_speed(tmp_path, monkeypatch):
    """Of two ranks a step of the probe took 0.1 and 0.3 s after it."""
    then = dataclasses.replace(calibration.find().calibration, probe={"2": (0.1, 0.1)})
    monkeypatch.setattr(calibration, "find", lambda: calibration.Found(then, "calibrated", None))
    assert _slower(tmp_path, 4) is None
    for rank, step_seconds in enumerate((0.1, 0.3)):
        assert _slower(tmp_path, 4) is None
        (tmp_path / f"rank{rank}.speed.json").write_text(json.dumps({"step_seconds": step_seconds}))
    assert _slower(tmp_path, 4) == pytest.approx(2.0)


def lines(*steps: tuple[float, float, tuple[float, float]]) -> list[list[dict]]:
    """(end, seconds that cores were busy, CPU seconds of each of two ranks) of each step -> each rank's lines."""
    ranks = [[{"end": end, "cpu": cpu[rank]} for end, _, cpu in steps] for rank in (0, 1)]
    for row, (_, busy, _) in zip(ranks[0], steps, strict=True):
        row["busy"] = busy
    return ranks


@pytest.mark.parametrize(
    ("last", "other"),
    [
        ((14.0, 108.0, (5.0, 5.0)), 0.0),  # in 4 s two ranks used 2 x 4 s, and cores were busy for 8 s
        ((14.0, 108.0, (3.0, 3.0)), 1.0),  # of 8 s they used 4
        ((14.0, 107.9, (5.0, 5.0)), 0.0),  # ticks are coarse: never less than none
        ((10.2, 108.0, (5.0, 5.0)), None),  # too short to be told in ticks
    ],
)
def test_cores_that_other_programs_kept_busy(last, other):
    steps = lines((10.0, 100.0, (1.0, 1.0)), (12.0, 104.0, (2.0, 3.0)), last)
    assert other_cores(steps, range(3)) == other
    assert other_cores(steps, range(2, 3)) is None
    found = {"other_cores": other, "cores": 2}
    assert shared_with(found) == ({"other": "1.0", "cores": 2} if other else None)


def test_where_the_kernel_does_not_tell_nothing_is_said(tmp_path):
    steps = lines((10.0, None, (1.0, 1.0)), (14.0, None, (2.0, 3.0)))
    assert other_cores(steps, range(2)) is None
    assert shared_with({}) is None  # a run of earlier days
    assert cores.busy(tmp_path / "none") is None


def test_a_core_is_busy_when_it_is_not_idle_and_waits_for_no_disk(tmp_path, monkeypatch):
    """proc(5): user nice system idle iowait irq softirq steal guest guest_nice, in ticks, on cores that it may use."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 9999 500 4 5 6 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\nintr 5\n")
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(cores.os, "sysconf", lambda name: 100)
    assert cores.busy(stat) == (100 + 20 + 30 + 4 + 5 + 6) / 100


def test_a_run_of_few_steps_that_begins_slowly():
    steady = {r: [("forward", 0, 3), ("backward", 3, 9), ("all_reduce", 9, 10)] for r in (0, 1)}
    found = compare(timeline(steady, steady, steady), step_times=[16.0, 16.0, 10.0])
    assert found["parts"]["start_up"] == pytest.approx(16 - 13)
    assert compare(timeline(steady, steady), step_times=[10.0, 10.0])["parts"]["start_up"] == 0.0


def test_seconds_of_a_kind_are_of_a_mean_rank_in_the_middle_step():
    odd = {0: [("forward", 0, 90)], 1: [("forward", 0, 90)]}
    even = {0: [("forward", 0, 2), ("forward", 2, 4)], 1: [("forward", 0, 2)]}
    assert by_kind(timeline(even, odd, even)) == {"forward": 3.0}


def test_a_run_without_steps_has_no_error_and_no_reason():
    nothing = Timeline.of([], "measured", 2)
    found = accuracy(PLANNED, nothing, step_times=[], predicted_step_time=10.0)
    assert found["step"]["measured"] is None and found["step"]["error"] is None and found["reason"] is None


def test_every_reason_can_be_said_both_ways():
    values = {"seconds": 1e-3, "kind": "forward", "ranks": 4, "cores": 2}
    for code in REASONS:
        for longer in (True, False):
            assert "1 ms" in explain({"code": code, "values": values | {"longer": longer}}, seconds)


def test_the_result_of_a_real_run_holds_it_for_every_kind_of_op(launcher, runs_dir):
    spec = Spec(mode="fsdp", devices=2, model="gpt", layers=2, hidden=32, context=16, dataset="synthetic", steps=10)
    result = finished(spec.with_(global_batch=4, parity_steps=0), launcher, runs_dir)
    found = result["accuracy"]
    kinds = {"load", "forward", "backward", "optimizer", "all_gather", "reduce_scatter"}
    assert {row["kind"] for row in found["ops"]} == kinds
    assert all(row["predicted"] > 0 and row["measured"] > 0 and row["error"] > -1 for row in found["ops"])
    assert found["step"]["measured"] == pytest.approx(result["step_time"])
    assert found["step"]["predicted"] == pytest.approx(result["predicted_step_time"])
    assert (found["machine"], found["calibration"]) == ("local", "shipped")
    probed = [read_json(runs_dir / result["run_id"] / f"rank{rank}.speed.json")["step_seconds"] for rank in range(2)]
    slower = calibration.find().calibration.slower(2, fmean(probed))  # None where this machine is as fast as that one
    assert found["slower"] == slower
    at_speed = found["step"]["predicted"] * slower if slower else None
    assert (found["at_speed"] or {"predicted": None})["predicted"] == pytest.approx(at_speed)
    assert ("speed" in found["parts"]) is (slower is not None)
    parts = [value for name, value in found["parts"].items() if name != "start_up"]
    assert sum(parts) == pytest.approx(found["step"]["measured"] - found["step"]["predicted"])


def test_steps_in_which_ranks_do_not_meet_count_as_mean_ones_of_whole_periods():
    """Two ranks on one core, which take turns as the kernel likes, and meet after every third step: at 30, 66, 96."""
    ends = [[6, 12, 30, 36, 42, 66, 72, 90, 96, 108], [18, 24, 30, 48, 60, 66, 78, 84, 96, 102]]
    steps = [[{"start": float(a), "end": float(b)} for a, b in itertools.pairwise([0, *of_rank])] for of_rank in ends]
    turns = periods.whole(range(2, 10), 3)
    assert turns == [range(3, 6), range(6, 9)]
    assert [periods.seconds(steps, turn) for turn in turns] == [12.0, 10.0]
    steps[0][6]["start"] += 5.0  # before which it did something else
    assert periods.seconds(steps, turns[1]) == (30.0 - 5.0) / 3
    assert periods.whole(range(2, 5), 3) == [range(2, 3), range(3, 4), range(4, 5)]  # none is whole
    assert periods.whole(range(2, 5), 1) == [range(2, 3), range(3, 4), range(4, 5)]
    # By themselves: from the last end of the one before, or if both begin later, from there.
    assert periods.seconds(steps, range(4, 5)) == 12.0
    steps[0][4]["start"] = steps[1][4]["start"] = 50.0
    assert periods.seconds(steps, range(4, 5)) == 10.0


def test_what_is_predicted_and_measured_of_a_period_is_of_its_mean_step():
    prediction = predict(Spec(mode="local_sgd", devices=2, sync_every=4, machine="h100", global_batch=32))
    mean = periods.predicted(prediction)
    assert mean.steps == [0] and len(mean) == 3 * len(prediction.between.timeline) + len(prediction.timeline)
    assert mean.makespan <= prediction.mean_step_time
    last, found = by_kind(prediction.timeline), by_kind(mean)
    assert found["all_reduce"] == pytest.approx(last["all_reduce"] / 4)
    assert found["forward"] == pytest.approx(last["forward"])
    # Measured so, step by step, two such periods are the same.
    parts = [*([prediction.between.timeline] * 3), prediction.timeline] * 2
    spans, begin = [], 0.0
    for step, part in enumerate(parts):
        spans += [span._replace(step=step, start=span.start + begin, end=span.end + begin) for span in part.spans()]
        begin += prediction.between.makespan if (step + 1) % 4 else prediction.step_time
    seen = periods.measured(Timeline.of(spans, "measured", 2), [range(4), range(4, 8)])
    assert seen.steps == [3, 7]
    assert by_kind(seen) == pytest.approx(found)


def test_what_rounds_say_of_predictions_and_of_the_machine_itself():
    """Case a is off by +10 and +10 %, b by -20 and +25 %; measured, one run is 1.25 times the other, in both."""
    runs = {"a": ((1.1, 1.0), (1.375, 1.25)), "b": ((0.8, 1.0), (1.0, 0.8))}
    rounds = []
    for i in range(2):
        rows = {}
        for case, each in runs.items():
            predicted, measured = each[i]
            row = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
            rows[case] = row | {"slower": 1.0 + i, "at_speed": (1 + i) * predicted / measured - 1}
        rounds.append({"made": 0.0, "disturbed": {"calibration": None, "runs": []}, "rows": rows})
    found = told(rounds)
    assert found["error"] == pytest.approx({"a": 0.1, "b": 0.025})
    assert found["median_error"] == pytest.approx(0.0625)
    assert found["of_rounds"] == pytest.approx([0.15, 0.175])
    assert found["slower"] == [1.0, 2.0]
    assert found["at_speed"] == pytest.approx([0.15, (1.2 + 1.5) / 2])  # twice 1.1 and 1.25 is off by 1.2 and 1.5
    assert found["floor"] == pytest.approx((0.25 + 0.2) / 2)
    assert found["calibrations"] == pytest.approx((0.25 + 0.2) / 2)
    assert found["one_side"] == {"a": pytest.approx(0.1)}
    alone = told(rounds[:1])
    assert alone["floor"] is None and alone["one_side"] == {}
