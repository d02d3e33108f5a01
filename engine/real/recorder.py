"""Marks in the training code and the profiler's events -> spans in the rank's file, a batch of steps at a time.

Compute ops are marked by the code that calls them. Communication is seen by torch's profiler limited to user scope:
it skips every aten op and keeps each gloo operation with its true start and end on the thread that ran it, and the
shape and type of its tensor, whoever called it. Both clocks count nanoseconds of Unix time. On a GPU marks are events
of the device (`clock.py`), and NCCL's operations what their kernels took on it (`events.py`).
"""

from __future__ import annotations

import functools
import json
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.autograd.profiler import _disable_profiler, _enable_profiler, _prepare_profiler, record_function

from engine.plan import Mesh, Op, lane_of
from engine.real.clock import DeviceClock, HostClock
from engine.real.events import COALESCED, Event, communications
from engine.real.paced import Pace, Unpaced
from engine.real.passed import Pass
from engine.timeline import NONE, Span

# Starting and stopping the profiler takes about 1 ms, so it runs over whole steps for at least this long. What a rank
# that is killed did since is lost, its steps are not.
WINDOW = 1.0  # seconds
ENCODER = json.JSONEncoder(separators=(",", ":"))
CALLED = "lockstep::calls"  # the mark around collectives that were said to come

# How a backend may carry out a collective: gloo's reduce_scatter is an all_reduce (pytorch#149869).
CARRIED_OUT = {"reduce_scatter": ("reduce_scatter", "all_reduce")}


# What is announced is the same in every step, and to look an op up takes a tenth of making it.
_op = functools.lru_cache(maxsize=4096)(Op)


class Recorder:
    """Spans of one process, appended to `path` at the end of a window. With `enabled` false, nothing is kept.

    `label(kind)` is the mode's word on what its collectives are: all_reduce -> (axis dp, payload gradient).
    A mode whose collectives are told apart by PyTorch's own marks around them gives `identify(event)` -> (kind, axis,
    payload, part). Messages are labelled by `message`, which the code that issues them calls in the order in which it
    issues them, and so are collectives that are announced by `collective`. Where those are waited for, the compute of a
    layer is cut, and `parts(kind, layer)` names its pieces in order.
    """

    def __init__(
        self, path: Path, rank: int, origin: int, *, enabled: bool = True, clock: HostClock | DeviceClock | None = None
    ):
        self.path, self.rank, self.origin, self.enabled = path, rank, origin, enabled
        self.clock = clock or HostClock()
        self.moment = self.clock.moment  # of a mark; `now` is the host's
        self.label: Callable[[str], tuple[str, str]] = lambda kind: ("dp", "gradient")
        self.parts: Callable[[str, str], tuple[str, ...]] = lambda kind, layer: (layer,)
        self._pieces: dict[tuple[str, str], tuple[str, ...]] = {}
        self.identify: Callable[[Event], tuple[str, str, str, str]] = lambda event: (
            event.kind,
            *self.label(event.kind),
            "",
        )
        self.pace: Pace | Unpaced = Unpaced()  # of a scale model
        self.mesh: Mesh | None = None  # where ranks have coordinates on several axes
        self.stage = self.microbatch = NONE  # of the pass that goes on, where collectives belong to one
        self.recording = False
        self.doing = ""  # in words, for the report of an error
        self._profiling = False
        self._window_began = 0.0
        self._steps: list[tuple[int, int, int]] = []  # step, begin, end (ns)
        self._marks: list[Span] = []  # of the step that goes on, from moment to moment
        self._told: list[Span] = []  # of those before (ns)
        self._passes: list[Pass] = []
        self._passing: Pass | None = None  # the one that goes on
        self._messages: list[tuple[int, int, Op]] = []  # step, when it was announced (ns), what it is
        self._collectives: list[tuple[int, int, Op]] = []  # step, when it was called (ns), what it is
        self._microsteps: list[tuple[int, int, int]] = []  # begin, end (ns), index
        self._microstep: int | None = None  # the one that goes on
        self._expected: list[tuple[int, Op]] = []
        self._listed = False  # what is called now is in that list
        self._awaited: dict[int, int] = {}  # a result that nobody has waited for yet: the moment it was called for
        self._called: int | None = None  # the moment of a call whose result is not yet known
        self._config = ProfilerConfig(ProfilerState.KINETO, True, False, False, False, False, _ExperimentalConfig())
        self._step = -1

    now = staticmethod(time.time_ns)

    def line_up(self, step: int) -> None:
        """Of a scale model: return when the step begins on all ranks. What recording costs is outside of its steps."""
        if isinstance(self.pace, Pace):
            self.flush()
            self._profile()
            self.doing = "waiting for all ranks"
            self.pace.meet(step)

    def begin_step(self, step: int) -> None:
        self._step, self._passing = step, None
        if self.enabled:
            self._profile()
        self.clock.begin()
        if not self.enabled:
            return
        self.recording = True
        self._steps.append((step, self.now(), 0))

    def _profile(self) -> None:
        if not self._profiling:
            _prepare_profiler(self._config, self.clock.activities)
            _enable_profiler(self._config, self.clock.activities, {RecordScope.USER_SCOPE})
            self._profiling, self._window_began = True, time.monotonic()

    def end_step(self) -> None:
        self.clock.settle()
        if not self.recording:
            return
        self.pace.end_step()
        step, begin, _ = self._steps[-1]
        self._steps[-1] = (step, begin, self.now())
        self.doing = ""
        for passed in self._passes:
            passed.collect()
        self._passes.clear()
        self._tell()
        self.recording = False
        if time.monotonic() - self._window_began >= WINDOW and isinstance(self.pace, Unpaced):
            self.flush()

    def _tell(self) -> None:
        self._told += self.clock.told(self._marks)
        self._marks.clear()

    @contextmanager
    def microstep(self, index: int) -> Iterator[None]:
        """What is computed and communicated in the body belongs to this of several micro-steps."""
        begun = self.now()
        self.microbatch = self._microstep = index
        try:
            yield
        finally:
            self.microbatch, self._microstep = NONE, None
            if self.recording:
                self._microsteps.append((begun, self.now(), index))

    @contextmanager
    def span(self, kind: str, *, payload: str = "", part: str = "", **where: int) -> Iterator[None]:
        """Mark what the body does; `where` is what `mark` takes: stage, microbatch, rank."""
        self.doing = " ".join(word for word in (kind, payload, part) if word)
        at = (kind, where.get("stage", NONE), where.get("microbatch", NONE), part)
        self.pace.begin(*at)
        begun = self.moment()
        try:
            yield
            self.pace.complete(*at)
        finally:
            self.mark(kind, begun, self.moment(), payload=payload, part=part, **where)

    def mark(
        self,
        kind: str,
        start: int,
        end: int,
        *,
        stage: int = NONE,
        microbatch: int = NONE,
        part: str = "",
        payload: str = "",
        rank: int | None = None,
        size: int = 0,
        axis: str = "",
    ) -> None:
        """A span between two moments that this code itself asked for; `axis` makes it a collective."""
        if self.recording:
            rank = self.rank if rank is None else rank
            lane = axis or "compute"
            key = (stage, microbatch, part, payload)
            self._marks.append(Span(rank, lane, kind, self._step, start, end, *key, axis, NONE, size))

    def message(
        self,
        kind: str,
        *,
        payload: str,
        peer: int,
        size: int,
        axis: str = "pp",
        stage: int | None = None,
        microbatch: int | None = None,
        part: str = "",
    ) -> None:
        """A send to the coordinate `peer` of an axis is about to be issued, or a receive from it."""
        self.doing = f"{kind} {payload} of {part or f'microbatch {microbatch}'}"
        if kind == "send":
            self.pace.sending(payload=payload, stage=stage, microbatch=microbatch, part=part, axis=axis, peer=peer)
        if self.recording:
            where = {"stage": stage, "microbatch": microbatch, "part": part, "axis": axis, "peer": peer}
            self._messages.append((self._step, self.now(), _op(kind=kind, payload=payload, bytes=size, **where)))

    @contextmanager
    def calls(self, *ops: Op) -> Iterator[None]:
        """The body calls these collectives, in this order, and waits for them; none of them is of a layer."""
        self.doing, self._listed = " ".join(f"{op.kind} {op.part}" for op in ops), True
        if self.recording:
            self._expected += [(self._step, op) for op in ops]
        with record_function(CALLED):
            yield
        self._listed = False

    def collective(self, kind: str, size: int, *, axis: str, payload: str = "") -> None:
        """A collective is about to be called with a tensor of `size` bytes, for a layer's output or a gradient."""
        if self.recording and not self._listed:
            if self._passing and kind in self._passing.given:
                return
            payload = payload or (self._passing.payload if self._passing else "activation")
            where = {"stage": self.stage, "microbatch": self.microbatch}
            if self._passing:
                self._passing.pause()
            self._call(_op(kind=kind, payload=payload, axis=axis, bytes=size, **where))
            self._called = self.moment()

    def background(self, kind: str, part: str, payload: str, size: int, *, axis: str) -> None:
        """A collective for a layer is about to be called, perhaps in the background: it cuts no compute, and it may
        begin when the micro-step that called it is over."""
        if self.recording:
            where = {"part": part, "microbatch": self._microstep}
            self._call(_op(kind=kind, payload=payload, axis=axis, bytes=size, **where))

    def _call(self, op: Op) -> None:
        self._collectives.append((self._step, self.now(), op))

    def will_wait(self, result: int) -> None:
        """The result of the collective that was called last, by its address."""
        if self._called is not None:
            self._awaited[result], self._called = self._called, None

    def waited(self, result: int | None = None) -> None:
        """Such a result is there, or, if it has no address yet, that of the last call; to ask again does not count."""
        called = self._awaited.pop(result, None)
        if called is None:
            called, self._called = self._called, None
        if called is not None and self._passing:
            self._passing.resume()
            self._passing.waits.append((called, self.moment()))

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """The body issues messages and waits for some: the compute of a layer is cut by it, however short it is."""
        if self.recording:
            self._passing.pause()
        begun = self.moment()
        yield
        if self.recording:
            self._passing.resume()
            self._passing.waits.append((begun, self.moment()))

    def pieces(self, kind: str, layer: str) -> tuple[str, ...]:
        """What `parts` says: every step asks for the same, and it takes a plan's way to work it out."""
        if (kind, layer) not in self._pieces:
            self._pieces[kind, layer] = self.parts(kind, layer)
        return self._pieces[kind, layer]

    def coordinate(self, rank: int, axis: str) -> int:
        return rank if self.mesh is None else self.mesh.coordinate(rank, axis)

    def begin_pass(self, stage: int, rank: int | None) -> Pass:
        """A batch enters a chain of layers."""
        passed = self._passing = Pass(self, stage, rank, max(self.microbatch, 0))
        self._passes.append(passed)
        return passed

    def go_back(self, passed: Pass) -> None:
        """The backward of a pass begins."""
        self.doing, self._passing = "backward", passed

    def flush(self) -> None:
        """Stop the profiler and write the spans of all finished steps."""
        if not self._profiling:
            return
        seen = _disable_profiler().events()
        self._profiling = False
        events = communications(seen, on_device=isinstance(self.clock, DeviceClock))
        offset = self.now() - time.monotonic_ns()
        self._tell()
        moved = (self.pace.moved(span, offset) for span in self._label(events))
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(self._line(span) for span in (*self._told, *moved))
        self._steps.clear()
        self._told.clear()
        self._microsteps.clear()
        self._messages.clear()
        self._collectives.clear()
        self._expected.clear()

    def _line(self, span: Span) -> str:
        """Seconds since the run began: subtracted as integers, since Unix time in ns does not fit a float."""
        rank, lane, kind, step, start, end, *rest = span
        seconds = ((start - self.origin) / 1e9, (end - self.origin) / 1e9)
        return ENCODER.encode((rank, lane, kind, step, *seconds, *rest)) + "\n"

    def _label(self, events: list[Event]) -> Iterator[Span]:
        """Give every event that began inside a step its step and what it was; others (checks, barriers) are dropped."""
        messages, calls, listed = (defaultdict(deque) for _ in range(3))  # by step: a window has many
        for step, when, op in self._messages:
            messages[step, op.kind].append((when, op))
        for step, when, op in self._collectives:
            calls[step].append((when, op))
        for step, op in self._expected:
            listed[step].append(op)
        starts = [event.start for event in events]
        for step, begin, end in self._steps:
            issued = {kind: messages[step, kind] for kind in ("send", "recv")}
            called, expected = [*calls[step]], listed[step]
            for event in events[bisect_left(starts, begin) : bisect_right(starts, end)]:
                where = (step, *(event.took or (event.start, event.end)))
                if event.kind in issued or event.kind == COALESCED:
                    for op, size in _issued(issued, event):
                        key = (_or_none(op.stage), _or_none(op.microbatch), op.part, op.payload)
                        lane, peer = self._link(op)
                        yield Span(self.rank, lane, op.kind, *where, *key, op.axis, peer, size)
                    continue
                stage = microbatch = NONE
                if CALLED in event.inside and expected:
                    op = expected.popleft()
                    kind, axis, payload, part, size = event.kind, op.axis, op.payload, op.part, event.bytes
                elif op := _taken(called, event):
                    kind, axis, payload, part, size = op.kind, op.axis, op.payload, op.part, op.bytes
                    stage, microbatch = _or_none(op.stage), _or_none(op.microbatch)
                else:
                    kind, axis, payload, part = self.identify(event)
                    size = event.bytes
                if microbatch == NONE:
                    began_in = (k for first, last, k in self._microsteps if first <= event.start <= last)
                    microbatch = next(began_in, NONE)
                yield Span(self.rank, axis, kind, *where, stage, microbatch, part, payload, axis, NONE, size)

    def _link(self, op: Op) -> tuple[str, int]:
        """The lane of a message, and the rank at its other end; a coordinate is the rank where there is one axis."""
        if self.mesh is None or op.peer == NONE:
            return lane_of(op, self.rank), op.peer
        coordinate = self.mesh.coordinate(self.rank, op.axis)
        return lane_of(op, coordinate), self.mesh.peer(self.rank, op.axis, op.peer)


def _issued(queues: dict[str, deque[tuple[int, Op]]], event: Event) -> list[tuple[Op, int]]:
    """The messages that an event carried, each with its bytes: one, or all that were announced before several were sent
    as one, whose sizes are those of their tensors then."""
    if event.kind != COALESCED:
        # One that nobody announced keeps no stage and no peer, and so matches no planned op.
        queue = queues[event.kind]
        return [(queue.popleft()[1] if queue else Op(kind=event.kind, axis="pp", peer=NONE), event.bytes)]
    together = []
    for queue in queues.values():
        while queue and queue[0][0] <= event.start:
            together.append(queue.popleft()[1])
    return [(op, op.bytes) for op in together]


def _taken(called: list[tuple[int, Op]], event: Event) -> Op | None:
    """The earliest call before the event that it can be, taken off the list."""
    for i, (when, op) in enumerate(called):
        if when <= event.start and event.kind in CARRIED_OUT.get(op.kind, (op.kind,)) and event.bytes == op.bytes:
            return called.pop(i)[1]
    return None


def _or_none(value: int | None) -> int:
    return NONE if value is None else value
