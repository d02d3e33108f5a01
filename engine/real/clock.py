"""A moment of a training -> nanoseconds of Unix time: at once on a CPU, and when the step is over on a GPU.

When a call returns, a CPU has computed what it asked for. A GPU has not: there a moment is an event that the device
passes when it has done all that was called before on that stream, and its own clock says later when that was.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import torch
from torch._C._profiler import ProfilerActivity

from engine.timeline import Span


class HostClock:
    """Of ranks on the CPU: a moment is known when it is asked for."""

    activities = frozenset({ProfilerActivity.CPU})
    moment = staticmethod(time.time_ns)

    def begin(self) -> None:
        """A step begins."""

    def settle(self) -> None:
        """The step ends: the moments in it are known."""

    def told(self, spans: Iterable[Span]) -> Iterable[Span]:
        """Spans from moment to moment -> spans in ns."""
        return spans


class DeviceClock:
    """Of a rank on a GPU: a moment is a number, the later the higher, until `settle` has waited for the device.

    Its clock is set by the host's at the begin of each step, when the device is idle and passes an event at once: to
    about 10 us, and CUDA's float32 of milliseconds since then stays exact to 1 us for steps of up to 8 seconds.
    """

    activities = frozenset({ProfilerActivity.CPU, ProfilerActivity.CUDA})

    def __init__(self, device: torch.device):
        self.device = device
        self._count = itertools.count(1)  # the backward's thread asks too
        self._events: dict[int, torch.cuda.Event] = {}
        self._times: dict[int, int] = {}  # ns
        self.begin()

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        before = time.time_ns()
        self._zero = self._event()
        self._zero.synchronize()
        self._set = (before + time.time_ns()) // 2
        self._events, self._times = {}, {}

    def moment(self) -> int:
        number = next(self._count)
        self._events[number] = self._event()
        return number

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        since = {number: self._zero.elapsed_time(event) for number, event in self._events.items()}  # ms
        self._times |= {number: self._set + round(each * 1e6) for number, each in since.items()}
        self._events = {}

    def told(self, spans: Iterable[Span]) -> Iterable[Span]:
        """Those of a step that did not end are left out: when the device was where is not known."""
        times = self._times
        return [s._replace(start=times[s.start], end=times[s.end]) for s in spans if {s.start, s.end} <= times.keys()]

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
