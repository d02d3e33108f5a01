"""The program of a rank and a clock -> the same program in time: each op ends when it would on the pictured machine.

A rank keeps the moment up to which its program has come, as `engine.simulation` does, and sleeps until that moment
where an op begins or ends. Moments are absolute, so a sleep that is a little too long makes the next one shorter, and
errors do not add up. What ranks must know of each other, when a message arrives and when a collective was called,
they tell each other in a file that all of them have mapped; CLOCK_MONOTONIC is the same for all processes of a machine.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

from engine import modes
from engine.asking import slow
from engine.graph.scheduler import schedule
from engine.job import Job
from engine.scale_model.paced import TABLE
from engine.scale_model.pacing import CALL, COMPUTE, RECEIVE, SEND, Beat, key_of, of_rank
from engine.scale_model.pictured import machine_of
from engine.simulation import durations, matched
from engine.timeline import NONE, Span

WORD = 8  # bytes of a moment
# A rank that is late catches up by so much, or by such a part of a step where that is more, at the cost of ops that are
# shorter than they should be; what is more than that (a fault, a machine that is too busy) stays lost.
CATCH_UP = 50_000_000  # ns
PART = 1 / 30
LEAD = 3_000_000  # ns, from the last rank's coming to a step to the step's begin: all have seen it by then
LOOK = 300e-6  # seconds between looks for another rank's moment


class Table:
    """Moments (ns) of all ranks, mapped from a file in the run folder: for each rank when it came to a step (of even
    and of odd steps), then for each op of its program when its message arrives, or when it called a collective.

    A step's moments are later than its begin, and all of earlier steps are before it: so nothing is ever cleared.
    """

    def __init__(self, path: Path, ranks: int, ops: int):
        self._ranks, self._ops = ranks, ops
        size = WORD * ranks * (2 + ops)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            self._words = memoryview(mmap.mmap(fd, size)).cast("q")
        finally:
            os.close(fd)

    def came(self, step: int, rank: int) -> int:
        return step % 2 * self._ranks + rank

    def of_op(self, rank: int, place: int) -> int:
        return 2 * self._ranks + rank * self._ops + place

    def __getitem__(self, slot: int) -> int:
        return self._words[slot]

    def __setitem__(self, slot: int, moment: int) -> None:
        self._words[slot] = moment


class Moved(NamedTuple):
    """A message or a collective of a step that is over."""

    free: bool  # whether it is asynchronous, and so may be noted after those that come next
    kind: str
    bytes: int  # in the miniature
    times: tuple[int, int]  # start, end (ns)


class Pace:
    """One rank's. `begin` and `complete` are called around every compute op, `sending` before every send."""

    def __init__(self, job: Job, small: Job, rank: int, folder: Path):
        """`job`: what is pictured, with its dilation. `small`: its miniature, which is what runs."""
        self.job, self.small, self.rank = job, small, rank
        steps = (*range(modes.FIRST_STEADY_STEP), None)
        ops = max(len(program.ops) for step in steps for program in modes.plan(job, step).programs)
        self.table = Table(folder / TABLE, job.processes, ops)
        self.origin = 0  # when the step began
        self.active = False
        self._programs: dict[int, list[Beat]] = {}  # by the first step that is like theirs
        self._program: list[Beat] = []
        self._late: dict[int, int] = {}  # ns by which ranks catch up in them, by the same
        self._compute: dict[tuple, int] = {}
        self._moved: dict[tuple[int, str], list[Moved]] = {}  # step, lane: what it carried, in the program's order
        self._sizes: dict[int, dict[str, list[int]]] = {}  # the same of programs: bytes in the miniature, by lane

    # --- a step --------------------------------------------------------------------------------------------------

    def meet(self, step: int) -> None:
        """Return at the moment at which this step begins on all ranks."""
        self._prepare(step)
        self.doing, before = f"step {step}", self.origin
        slots = [self.table.came(step, rank) for rank in range(self.job.processes)]
        self.table[slots[self.rank]] = max(time.monotonic_ns(), before + 1)
        self.clock = self.origin = max(self._seen(slot, rank, before + 1) for rank, slot in enumerate(slots)) + LEAD
        self._place, self._step, self.active = 0, step, True
        self._ended: dict[int, int] = {}  # place of a communication: when it was over
        self._times: dict[int, tuple[int, int]] = {}  # of each communication: when it moved
        self._free: dict[str, int] = defaultdict(int)  # lane: from when on it is free
        self._calls: dict[str, deque[int]] = defaultdict(deque)  # axis: collectives that are not over
        self._sends: dict[tuple, deque[int]] = defaultdict(deque)
        for place, beat in enumerate(self._program):
            if beat.act == SEND:
                self._sends[beat.key].append(place)
        self._sleep()

    def _prepare(self, step: int) -> None:
        alike = modes.first_alike(self.job, step)
        if alike not in self._programs:
            spec = self.job.spec
            plan, slower = modes.plan(self.job, step), slow.of_spec(spec)
            on = machine_of(self.job)
            graph = matched(plan, on, slower)
            seconds = durations(graph, on, slower)
            self._programs[alike] = of_rank(graph, seconds, spec.dilation, self.rank)
            step_time = schedule(graph, seconds)[1].max(initial=0.0) * spec.dilation
            self._late[alike] = max(CATCH_UP, round(PART * step_time * 1e9))
            self._sizes[alike] = sizes = defaultdict(list)
            small = modes.plan(self.small, step)
            for op in small.program(self.rank).ops:
                if not op.is_compute:
                    sizes[small.lane(self.rank, op)].append(op.bytes)
        self._program, self._catch_up = self._programs[alike], self._late[alike]
        self._compute = {beat.key: place for place, beat in enumerate(self._program) if beat.act == COMPUTE}

    def end_step(self) -> None:
        """Return when all that this rank has to do in the step is over, also what nobody waits for."""
        left = next((beat for beat in self._program[self._place :] if beat.act == COMPUTE), None)
        if left is not None:
            raise RuntimeError(f"step {self._step} is over, and this rank has not come to its {_said(left.key)}")
        self._go_to(len(self._program))
        for place, beat in enumerate(self._program):
            if beat.act == CALL or beat.act == RECEIVE:
                self.clock = max(self.clock, self._end_of(place))
        self._sleep()
        sizes = {lane: iter(each) for lane, each in self._sizes[modes.first_alike(self.job, self._step)].items()}
        for place in sorted(self._times):
            beat = self._program[place]
            one = Moved(beat.act == CALL and not beat.holds_up, beat.key[0], next(sizes[beat.lane]), self._times[place])
            self._moved.setdefault((self._step, beat.lane), []).append(one)
        self.active = False

    # --- its ops -------------------------------------------------------------------------------------------------

    def place(self, kind: str, stage: int, microbatch: int, part: str) -> float:
        """Where in its program a compute op is; nowhere, at infinity, if it is not planned."""
        return self._compute.get(_compute_key(kind, stage, microbatch, part), math.inf)

    def begin(self, kind: str, stage: int = NONE, microbatch: int = NONE, part: str = "") -> None:
        """Return when this compute op can begin. To ask again, or for one that is not planned, does nothing."""
        place = self._compute.get(_compute_key(kind, stage, microbatch, part)) if self.active else None
        if place is None or place < self._place:
            return
        self._go_to(place)
        self.clock = max(self.clock, *map(self._end_of, self._program[place].waits), 0)
        self._sleep()

    def complete(self, kind: str, stage: int = NONE, microbatch: int = NONE, part: str = "") -> None:
        """Return when this compute op is over."""
        place = self._compute.get(_compute_key(kind, stage, microbatch, part)) if self.active else None
        if place is None or place < self._place:
            return
        self._go_to(place + 1)
        self._sleep()

    def sending(self, *, payload: str, stage: int | None, microbatch: int | None, part: str, axis: str, peer: int):
        """A message is about to be sent: tell its receiver when it arrives, before it does."""
        places = self._sends[key_of("send", stage, microbatch, part, payload, axis, peer)] if self.active else ()
        if places:
            self._go_to(places.popleft() + 1)

    def moved(self, span: Span, offset: int) -> Span:
        """A message or a collective as it moved on the pictured link. To be asked in the order of each lane, where an
        asynchronous collective may have been noted late: those after it are known by their bytes
        (`engine.outcome.conform`).

        `offset`: ns from CLOCK_MONOTONIC to the clock of the span.
        """
        lane = self._moved.get((span.step, span.lane))
        if not lane:
            return span
        which, this = 0, (span.kind, span.bytes)
        while which < len(lane) and lane[which].free and (lane[which].kind, lane[which].bytes) != this:
            which += 1
        start, end = lane.pop(which if which < len(lane) else 0).times
        return span._replace(start=start + offset, end=end + offset)

    # --- the clock -----------------------------------------------------------------------------------------------

    def _go_to(self, place: int) -> None:
        """Go through the program up to this place, as the simulator does."""
        while self._place < place:
            here, beat = self._place, self._program[self._place]
            if beat.act == COMPUTE:
                self.clock = max(self.clock, *map(self._end_of, beat.waits), 0) + beat.length
            elif beat.act == SEND:
                begin = max(self.clock, self._free[beat.lane])
                self._over(here, begin, begin + beat.length)
                self.table[self.table.of_op(self.rank, here)] = self._ended[here]
            elif beat.act == CALL:
                self.table[self.table.of_op(self.rank, here)] = self.clock
                self._calls[beat.lane].append(here)
            if beat.act != COMPUTE and beat.holds_up:
                self.clock = max(self.clock, self._end_of(here))
            self._place += 1

    def _end_of(self, place: int) -> int:
        """When a communication that this rank has come to is over; waits for the others to say."""
        beat = self._program[place]
        if place not in self._ended and beat.act == RECEIVE:
            arrived = self._told(*beat.ends[0])
            self._over(place, arrived - beat.length, arrived)
        while place not in self._ended:
            call = self._calls[beat.lane].popleft()
            one = self._program[call]
            begin = max(self._free[one.lane], *(self._told(*end) for end in one.ends))
            self._over(call, begin, begin + one.length)
        return self._ended[place]

    def _over(self, place: int, begin: int, end: int) -> None:
        self._times[place], self._ended[place] = (begin, end), end
        self._free[self._program[place].lane] = end

    def _told(self, rank: int, place: int) -> int:
        return self._seen(self.table.of_op(rank, place), rank, self.origin)

    def _seen(self, slot: int, rank: int, after: int) -> int:
        """What another rank says, once it is of this step."""
        limit = time.monotonic() + self.job.spec.timeout
        while (moment := self.table[slot]) < after:
            if time.monotonic() > limit:
                raise RuntimeError(f"rank {rank} has not come to what rank {self.rank} waits for; it is lost")
            time.sleep(LOOK)
        return moment

    def _sleep(self) -> None:
        now = time.monotonic_ns()
        self.clock = max(self.clock, now - self._catch_up)
        while now < self.clock:
            time.sleep((self.clock - now) / 1e9)
            now = time.monotonic_ns()


class Unpaced:
    """Of a run that is no scale model: nothing waits."""

    active = False

    def _nothing(self, *_, **__) -> None:
        return None

    begin = complete = sending = meet = end_step = _nothing

    def moved(self, span: Span, offset: int) -> Span:
        return span


def _compute_key(kind: str, stage: int, microbatch: int, part: str) -> tuple:
    known = [None if where == NONE else where for where in (stage, microbatch)]
    return key_of(kind, *known, part, "", "", None)


def _said(key: tuple) -> str:
    return " ".join(str(word) for word in key if word not in (None, ""))
