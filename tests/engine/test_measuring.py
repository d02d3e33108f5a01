"""What processes found while they measured this machine -> the curves and speeds of its calibration, by arithmetic that
can be done by hand."""

from __future__ import annotations

import json
import time

import pytest

from engine.calibration import calibrate
from engine.calibration.calibrate import Measured, Measuring, Part, curves, probes, speeds
from engine.job import prepare
from engine.spec import Spec


def test_a_core_is_as_fast_as_what_all_do_on_it():
    """Alone a step takes 9 s of a core, 10 and 11 while both are busy, 12 in the mean of four that take turns."""
    four = [{"1": 9.0, "2": 10.0, "4": 11.0}, {"2": 11.0, "4": 12.0}, {"4": 10.0}, {"4": 15.0}]
    assert speeds(four, 2, 9.0) == (pytest.approx(9 / 10.5), pytest.approx(0.75))
    # Faster than alone, or crowded faster than each on its own, is noise.
    two = [{"1": 9.0, "2": 8.0, "4": 10.0}, {"2": 8.0, "4": 10.0}]
    assert speeds(two, 2, 9.0) == (1.0, 0.9)
    assert speeds([{"1": 9.0, "2": 12.0, "4": 10.0}], 2, 9.0) == (0.75, 0.75)


def test_how_fast_a_machine_was_is_kept_each_time_that_it_was_measured():
    def part(processes: int, *ranks: dict) -> Measured:
        return Measured(Part("", processes, {}, 1), None, [*ranks], 1.0, 0.0)

    four = [{"1": 1.0, "2": 2.0, "4": 4.0}, {"2": 2.5, "4": 4.0}]
    shared = part(2, {"step_seconds": [3.0, 3.5]}, {"step_seconds": [3.0]})
    assert probes(four, [part(1, {"step_seconds": [1.5]}), shared]) == {"1": (1.0, 1.5), "2": (2.0, 2.5, 3.0, 3.5, 3.0)}


def test_the_first_steps_of_a_probe_do_not_count(monkeypatch):
    """They touch memory for the first time; in no time at all one step more is taken."""
    from engine.real.speed import WARM, Probe

    took = iter([9.0] * WARM + [1.0])
    monkeypatch.setattr(Probe, "step", lambda self: next(took))
    assert Probe.__new__(Probe).step_seconds(0.0) == 1.0 and not [*took]


def parts_of(gpus: int, monkeypatch) -> list[Part]:
    monkeypatch.setattr(calibrate, "count_gpus", lambda: gpus)
    return [part for part in Measuring()._parts(2, [1, 2]) if part.asked["device"] == "cuda"]


def test_gpus_are_measured_where_there_are_any_and_nccl_where_there_are_several(monkeypatch):
    assert parts_of(0, monkeypatch) == []
    assert [(part.name, part.processes) for part in parts_of(1, monkeypatch)] == [("gpu_rates", 1)]
    eight = parts_of(8, monkeypatch)
    assert [part.processes for part in eight] == [1, 2, 8]
    assert ["send" in part.asked["kinds"] for part in eight[1:]] == [True, False]


def test_a_device_that_is_waited_for_says_of_a_call_when_it_began_and_ended():
    """Two ranks reduce: the second is called 3 ns later, and done at 19. A message is there at 7, from a call at 2."""
    from engine.real.calibration import of_device

    reduced = [{"all_reduce/64": {"busy": 1.0, "calls": of_device([mark], [None])}} for mark in ((0, 18), (3, 19))]
    assert curves(reduced, 2) == {"all_reduce/2": ((64.0, pytest.approx(16e-9), 2.0),)}
    sent = [
        {"send/64": {"busy": 0.5, "calls": of_device([mark], [half])}} for mark, half in (((2, 12), 6), ((1, 11), 7))
    ]
    assert curves(sent, 2) == {"send/2": ((64.0, pytest.approx(5e-9), 1.0),)}


def test_cores_that_others_kept_busy_are_those_that_no_rank_used(tmp_path):
    for rank, busy in ((0, 7.0), (1, 7.5)):
        spent = {"seconds": 2.0, "used": 1.5, "busy": busy}
        (tmp_path / f"rank{rank}.found.json").write_text(json.dumps({"found": {}, "spent": spent}))
    assert Measured.of(Part("links2", 2, {}, 1), tmp_path).others == pytest.approx((7.0 - 3.0) / 2.0)


@pytest.mark.parametrize(("each", "wanted"), [((0.0,), [0.0]), ((9.0, 1.0), [1.0]), ((9.0, 10.0), [9.0])])
def test_what_others_disturbed_is_measured_once_more_and_the_calmer_one_kept(monkeypatch, each, wanted):
    parts, left = [Part("links2", 2, {}, 1)], [*each]

    def measure(self, part, folder, launcher, tell):
        return Measured(part, folder, [], 1.0, left.pop(0))

    monkeypatch.setattr(Measuring, "_parts", lambda *_: parts)
    monkeypatch.setattr(Measuring, "_measure", measure)
    monkeypatch.setattr(Measuring, "_calibration", lambda self, found, began: [one.others for one in found])
    monkeypatch.setattr(calibrate.Launcher, "warm", lambda self: None)
    assert Measuring().run() == wanted and not left


def test_a_training_whose_cores_others_took_is_done_once_more_and_the_calmer_one_counts(tmp_path, monkeypatch):
    """Four that each take a second, of which 2.5 are left for more: the second was calmer at first, and for the last
    there is no time."""
    import torch

    from engine.real import calibration as measuring

    waited = {"job0": 0.1, "job1": 0.3, "job1-again": 0.4, "job2": 0.5, "job2-again": 0.1, "job3": 0.9}
    done = []

    def train(job, folder, *_):
        done.append(folder.name)
        return job, waited[folder.name], 1.0

    monkeypatch.setattr(measuring, "trained", train)
    monkeypatch.setattr(measuring.speed.Probe, "step_seconds", lambda *_: 0.01)
    asked = {"jobs": [Spec(mode="single", devices=1, model="mlp", dataset="synthetic").to_dict()] * 4}
    asked |= {"origin": 0, "budget": 0.0, "again": 2.5}
    found, kept = measuring.trainings(asked, tmp_path, torch.device("cpu"), 0, 1)
    assert done == [*waited] and len(kept) == 1 + len(done)
    assert found["folders"] == ["job0", "job1", "job2-again", "job3"]


def test_how_long_a_training_waited_for_a_core_is_what_the_kernel_says(tmp_path, monkeypatch):
    """A clock of the kernel's that goes half as fast as time: half of it."""
    import torch

    from engine.real import calibration as measuring

    job = prepare(Spec(mode="single", devices=1, model="mlp", dataset="synthetic", steps=3, parity_steps=0))
    monkeypatch.setattr(measuring.cores, "waited", lambda: time.perf_counter() / 2)
    _, waited, seconds = measuring.trained(job, tmp_path / "job0", 0, torch.device("cpu"), 0, 1)
    assert waited == pytest.approx(0.5, rel=1e-2) and seconds > 0
    assert len((tmp_path / "job0" / "rank0.steps.jsonl").read_text().splitlines()) == 3


def test_a_collective_takes_from_its_last_start_to_its_last_end():
    """By hand: two calls of two ranks, 300 and 500 ns; 0.5 and 1 cores busy."""
    calls = ([[[0, 650], [0, 600]], [[900, 1800], [1000, 1700]]], [[[0, 550], [300, 500]], [[900, 1700], [1200, 1600]]])
    found = [{"all_reduce/64": {"busy": busy, "calls": c}} for busy, c in zip((0.5, 1.0), calls, strict=True)]
    assert curves(found, 2) == {"all_reduce/2": ((64.0, pytest.approx(400e-9), 1.5),)}


@pytest.mark.parametrize(
    ("each", "wanted"),
    [
        ([[900], [200], [600]], [550, 550, 600]),
        ([[100], [200], [600]], [100, 200, 600]),
        ([[900], [200, 300, 300], [600]], [425, 425, 600]),  # by their calls
        ([[900], [500], [400]], [600, 600, 600]),
    ],
)
def test_a_smaller_tensor_takes_no_longer_than_a_larger_one(each, wanted):
    calls = {f"all_reduce/{64 * 2**i}": [[[0, t], [0, t]] for t in times] for i, times in enumerate(each)}
    found = [{key: {"busy": 1.0, "calls": times} for key, times in calls.items()}] * 2
    assert [point[1] for point in curves(found, 2)["all_reduce/2"]] == pytest.approx([t * 1e-9 for t in wanted])


def test_a_message_takes_from_its_send_to_the_end_of_its_receive():
    """Called at 100, there at 350 ns, though it was seen to be sent at 400 only."""
    ends = ([[[100, 900], [400, 410], [420, 700]]], [[[0, 650], [10, 350], [500, 600]]])
    found = [{"send/64": {"busy": 0.5, "calls": calls}} for calls in ends]
    assert curves(found, 2) == {"send/2": ((64.0, pytest.approx(250e-9), 1.0),)}
