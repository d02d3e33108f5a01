"""Runs on GPUs, without one: what CUDA's events and the profiler's marks of NCCL say is made up here, and what the
recorder makes of it is known by hand."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from engine import modes
from engine.job import prepare
from engine.spec import Spec

torch = pytest.importorskip("torch")

# ruff: noqa: E402
from torch.autograd import DeviceType

from engine.real import clock, worker
from engine.real import recorder as recording
from engine.real.clock import DeviceClock, clock_of
from engine.real.events import COALESCED, Event, communications
from engine.real.recorder import Recorder
from engine.real.training import Place, mark_updates, update


class Device:
    """A GPU that passes each event 1 ms after the one before, however fast the host calls."""

    def __init__(self):
        self.passed, self.waits = 0, 0

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(number=None, synchronize=lambda: None)

        def record() -> None:
            self.passed += 1
            event.number = self.passed

        event.record = record
        event.elapsed_time = lambda other: float(other.number - event.number)
        return event

    def synchronize(self, _: object) -> None:
        self.waits += 1


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.Event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(clock.DeviceClock, "activities", clock.HostClock.activities)
    return made


def test_each_device_has_its_clock(device):
    assert isinstance(clock_of(torch.device("cuda", 0)), DeviceClock)
    assert not isinstance(clock_of(torch.device("cpu")), DeviceClock)


def test_a_rank_has_its_gpu_and_computes_in_fp32_there(monkeypatch):
    """Convolutions may use TF32 by default, which would not equal one device: parity is in fp32."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert worker.device_of("cuda", 6) == torch.device("cuda", 2) == chosen[0]
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_moment_is_when_the_device_came_to_it(device):
    ours = DeviceClock(torch.device("cuda", 0))
    began = ours._set
    first, second = ours.moment(), ours.moment()
    assert first < second
    span = recording.Span(0, "compute", "forward", 0, first, second, -1, -1, "", "", "", -1, 0)
    assert list(ours.told([span])) == []  # the step did not end: nobody knows yet
    waits = device.waits
    ours.settle()
    assert device.waits == waits + 1
    ((start, end),) = [(each.start, each.end) for each in ours.told([span])]
    assert (start - began, end - began) == (1_000_000, 2_000_000)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"recompute": "full", "layers": 2}], ids=str)
def test_a_step_is_written_as_the_device_ran_it(settings, device, tmp_path):
    """A training whose host is done in a few ms, and whose device takes 1 ms from mark to mark: every span lasts whole
    ms of the device's, ops are the plan's, and none begins before the one in front of it is over."""
    job = prepare(
        Spec(mode="single", devices=1, model="gpt", hidden=16, heads=2, context=8, global_batch=4, **settings)
    )
    ours = Recorder(tmp_path / "spans.jsonl", 0, time.time_ns(), clock=DeviceClock(torch.device("cuda", 0)))
    place = Place(0, 1, torch.device("cpu"), ours, tmp_path)
    training = modes.run("single").training(job, place)
    if job.spec.recompute == "full":
        from engine.real.recompute import recompute

        recompute(training.chain, job)
    mark_updates(training.optimizer, ours)
    for step in range(2):
        ours.begin_step(step)
        training.make_gradients(step)
        update(training, ours)
        ours.end_step()
    ours.flush()
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    planned = [op.kind for op in modes.plan(job).program(0).ops]
    for step in range(2):
        spans = sorted((start, end, kind) for _, _, kind, of, start, end, *_ in lines if of == step)
        assert [kind for _, _, kind in spans] == planned
        took = [(end - start) * 1000 for start, end, _ in spans]
        assert all(round(each) >= 1 and each == pytest.approx(round(each), abs=1e-6) for each in took)
        assert all(end <= start + 1e-9 for (_, end, _), (start, _, _) in pairwise(spans))


def seen(name, start, end, number, on=DeviceType.CPU, shapes=(), dtypes=()) -> SimpleNamespace:
    """An event as the profiler gives it."""
    told = {
        "name": name, "start_ns": start, "duration_ns": end - start, "correlation_id": number, "device_type": on,
        "shapes": shapes, "dtypes": dtypes,
    }  # fmt: skip
    return SimpleNamespace(**{each: lambda value=value: value for each, value in told.items()})


def test_a_collective_of_nccl_takes_what_its_kernel_took():
    floats = {"shapes": [[8]], "dtypes": ["float"]}
    on = {"on": DeviceType.CUDA}
    events = [
        seen("FSDP::all_gather (block1)", 90, 120, 1),
        seen("nccl:_all_gather_base", 100, 110, 2, **floats),
        seen("nccl:_reduce_scatter_base", 130, 140, 3, **floats),
        seen("nccl:send 0->1", 150, 160, 4, **floats),
        seen("nccl:all_reduce_barrier", 170, 180, 5, **floats),
        seen("nccl:all_reduce", 190, 200, 6, **floats),
        seen("nccl:_all_gather_base", 500, 700, 2, **on),  # NCCL's mark on the device has its call's number
        seen("nccl:_reduce_scatter_base", 800, 900, 3, **on),
        seen("nccl:send 0->1", 400, 950, 4, **on),
        seen("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 500, 700, 77, **on),
        seen("ampere_sgemm_128x64_nn", 300, 400, 78, **on),
    ]
    assert communications(events, on_device=True) == [
        Event("all_gather", 100, 110, 32, ("FSDP::all_gather (block1)",), took=(500, 700)),
        Event("reduce_scatter", 130, 140, 32, took=(800, 900)),
        Event("send", 150, 160, 32, took=(400, 950)),
        Event("all_reduce", 190, 200, 32),  # no kernel was seen: its call is what is known
    ]


def test_one_of_gloo_is_where_it_was_seen():
    assert communications([seen("gloo:all_reduce", 5, 9, 1, shapes=[[2]], dtypes=["double"])]) == [
        Event("all_reduce", 5, 9, 16)
    ]


def test_messages_that_nccl_sends_as_one_are_those_announced_before(monkeypatch, tmp_path):
    """A ring's turn: a send and a receive in one kernel, and then a message of its own."""
    ours = Recorder(tmp_path / "spans.jsonl", 0, 0)
    times = iter(range(100, 1000, 10))
    monkeypatch.setattr(Recorder, "now", staticmethod(lambda: next(times)))
    ours.begin_step(0)  # at 100
    ours.message("send", payload="kv", peer=1, size=64, axis="cp", part="block1.0")  # at 110
    ours.message("recv", payload="kv", peer=3, size=48, axis="cp", part="block1.0")  # at 120
    monkeypatch.setattr(Recorder, "now", staticmethod(lambda: 150))
    ours.message("send", payload="kv", peer=1, size=32, axis="cp", part="block1.1")
    monkeypatch.setattr(Recorder, "now", staticmethod(lambda: 300))
    ours.end_step()
    events = [Event(COALESCED, 140, 145, 0, took=(200, 260)), Event("send", 160, 165, 32, took=(270, 290))]
    monkeypatch.setattr(recording, "communications", lambda *_, **__: events)
    ours.flush()
    found = []
    for line in (tmp_path / "spans.jsonl").read_text().splitlines():
        _, _, kind, _, start, end, _, _, part, _, _, _, size = json.loads(line)
        found.append((kind, part, size, round(start * 1e9), round(end * 1e9)))
    assert found == [
        ("send", "block1.0", 64, 200, 260),
        ("recv", "block1.0", 48, 200, 260),
        ("send", "block1.1", 32, 270, 290),
    ]
