"""A graph of ops, the seconds of each were it alone, and cores that all ranks share -> when each starts and ends.

Processor sharing, event by event (Kleinrock 1967, doi 10.1145/321386.321388): at any moment each running op asks for
so many cores, and where they ask for more than there are, all of them slow down alike. It is what a fair scheduler
does with threads, at times longer than its turns. So cores are never idle while somebody waits for one, and never do
more than there are of them.

All running ops slow down by one factor. In the time of a clock that slows down with them an op ends when it would have
ended alone, so one heap of ends is enough, however many ops run. What asks for no core (a latency) has the plain clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

RUN, RECV, SEND, SYNC_SEND, CALL, SYNC_CALL, AWAIT, PASS = range(8)  # what is done at a node
CALLED = (SEND, SYNC_SEND, CALL, SYNC_CALL)  # the rank does something for it, before anybody else does


@dataclass(slots=True)
class Cores:
    """Ops that run, and the time. `count` cores; with all of them busy, each is `together` times as fast as alone."""

    count: int
    together: float = 1.0
    now: float = 0.0
    _virtual: float = 0.0  # of the clock that slows down
    _asked: float = 0.0  # cores
    _sharing: list[tuple[float, int, float]] = field(default_factory=list)  # virtual end, op, cores asked for
    _waiting: list[tuple[float, int]] = field(default_factory=list)  # end, op

    def speed(self, asked: float) -> float:
        """Of each op, where all together ask for so many cores; 1 for one that has the machine to itself."""
        if not asked:
            return 1.0
        busy = min(max(asked - 1.0, 0.0) / (self.count - 1), 1.0) if self.count > 1 else 0.0
        return (1.0 - (1.0 - self.together) * busy) * min(1.0, self.count / asked)

    def begin(self, op: int, seconds: float, asks: float, alone: float) -> None:
        """An op that asks for `asks` cores, and takes `seconds` where all that runs asks for `alone`."""
        if not asks:
            heapq.heappush(self._waiting, (self.now + seconds, op))
            return
        self._asked += asks
        heapq.heappush(self._sharing, (self._virtual + seconds * self.speed(alone), op, asks))

    def end_next(self) -> int | None:
        """The op that ends next, at the time `now`; None where none runs. Of several, the first by number."""
        speed = self.speed(self._asked)
        shared = self.now + (self._sharing[0][0] - self._virtual) / speed if self._sharing else np.inf
        plain = self._waiting[0][0] if self._waiting else np.inf
        if not self._sharing and not self._waiting:
            return None
        if plain <= shared:
            self._virtual += (plain - self.now) * speed
            self.now, op = heapq.heappop(self._waiting)
            return op
        self._virtual, op, asks = heapq.heappop(self._sharing)
        self.now = shared
        # What is left of a sum of fractions is no op.
        self._asked = self._asked - asks if self._sharing else 0.0
        return op


def last_of(num: int) -> float:
    """By how many standard deviations the last of so many comes after the mean one, where they come normally
    distributed: the expected largest of them (Blom 1958, Statistical Estimates and Transformed Beta-Variables)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A plan that does not deadlock, one entry a node, in program order, role after role.

    `seconds`: of each, were it alone. `asks`: cores that all who do this at once ask for; `alone`: those that one asks
    for. `acts`, `lanes`, `meets`, `waits` and `first` (the roles' first nodes, and their number) are those of
    `engine.graph.scheduler.schedule`, whose rules these are. `leads`: seconds that a rank computes before it does this,
    on one core, which are no part of it; `players`: ranks of each role. `uneven`: the variance, in seconds, that a
    second of computing adds to when a rank is done; `members`: of how many ranks the last decides when this begins.
    """

    seconds: Sequence[float]
    asks: Sequence[float]
    alone: Sequence[float]
    acts: Sequence[int]
    lanes: Sequence[int]
    meets: Sequence[int]
    waits: dict[int, list[int]]
    first: Sequence[int]
    leads: Sequence[float]
    players: Sequence[int]
    uneven: float
    members: Sequence[int]


def share(cores: Cores, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every node; members of a collective share those of its call."""
    sharing = _Sharing(cores, work)
    sharing.run()
    meets = np.asarray(work.meets)
    shared = np.where(meets < 0, np.arange(len(meets)), meets)
    return sharing.start[shared], sharing.end[shared]


class _Sharing:
    """What has begun and ended, who waits for what, and how far each role is in its program.

    `cores` runs three things for a node: the op by the node's number; what leads to it, `nodes` later; and the wait for
    the last of those who do it, `2 * nodes` later.
    """

    def __init__(self, cores: Cores, work: Work) -> None:
        self.cores, self.work = cores, work
        self.nodes = nodes = len(work.seconds)
        self.start, self.end = np.zeros(nodes), np.full(nodes, np.inf)
        self.ended, self.issued = [False] * nodes, [False] * nodes
        self.led = [not lead for lead in work.leads] or [True] * nodes
        self.missing = [0] * nodes  # members that have not made a call yet
        for node, act in enumerate(work.acts):
            if act in (CALL, SYNC_CALL):
                self.missing[work.meets[node]] += 1
        self.queues: dict[int, deque[int]] = {}  # of each lane, what has begun and what waits for it
        self.woken: dict[int, list[int]] = {}  # roles that wait for the end of a node
        self.at, self.last = list(work.first[:-1]), list(work.first[1:])
        self.role_of = np.repeat(np.arange(len(self.at)), np.diff(work.first)).tolist()
        self.since = [0.0] * len(self.at)  # seconds for which each role has computed since it last waited for others

    def run(self) -> None:
        for role in range(len(self.at)):
            self._go_on(role)
        while (ended := self.cores.end_next()) is not None:
            phase, node = divmod(ended, self.nodes)
            if phase == 2:
                self._queue(node)
            elif phase == 1:
                self._go_on(self.role_of[node])
            else:
                self._end(node)

    def _go_on(self, role: int) -> None:
        """To the role's next op that computes, or that has to be waited for."""
        work = self.work
        while self.at[role] < self.last[role]:
            node = self.at[role]
            act = work.acts[node]
            if not self.led[node] and (act in CALLED or self._pending(node, act) is None):
                self.led[node] = True
                self.cores.begin(self.nodes + node, work.leads[node], work.players[role], 1.0)
                self.since[role] += work.leads[node]
                return
            if act in CALLED and not self.issued[node]:
                self._issue(node, act, role)
            if act != RUN and (need := self._pending(node, act)) is not None:
                self.woken.setdefault(need, []).append(role)
                return
            if act in (SYNC_CALL, AWAIT):
                self.since[role] = 0.0
            if act in (RUN, AWAIT):
                self.since[role] += work.seconds[node]
                self._begin(node)
                return
            self.at[role] += 1

    def _pending(self, node: int, act: int) -> int | None:
        """What has not ended of that for which the role waits at this node."""
        meets = self.work.meets
        if act in (RECV, SYNC_CALL):
            return None if self.ended[meets[node]] else meets[node]
        if act == SYNC_SEND:
            return None if self.ended[node] else node
        if act == AWAIT:
            wanted = (meets[n] if meets[n] >= 0 else n for n in self.work.waits[node])
            return next((n for n in wanted if not self.ended[n]), None)
        return None

    def _issue(self, node: int, act: int, role: int) -> None:
        """A send by itself, a call once its last member has made it."""
        self.issued[node] = True
        if act in (SEND, SYNC_SEND):
            self._begin_late(node, role)
            return
        call = self.work.meets[node]
        self.missing[call] -= 1
        if not self.missing[call]:
            self._begin_late(call, role)

    def _begin_late(self, node: int, role: int) -> None:
        """Once the last has come of those who do this, who have computed for as long as this role.

        Ranks that do the same are not done with it at the same moment. A call of several ranks begins when the last of
        them has made it (Kruskal and Weiss 1985, doi 10.1109/TSE.1985.231547, for tasks on processors), and so does a
        message between ranks of one role arrive.
        """
        uneven = self.work.uneven
        late = last_of(self.work.members[node]) * math.sqrt(uneven * self.since[role]) if uneven else 0.0
        if late:
            self.cores.begin(2 * self.nodes + node, late, 0.0, 0.0)
        else:
            self._queue(node)

    def _queue(self, node: int) -> None:
        """Behind what its lane has begun before."""
        line = self.queues.setdefault(self.work.lanes[node], deque())
        line.append(node)
        if len(line) == 1:
            self._begin(node)

    def _begin(self, node: int) -> None:
        self.start[node] = self.cores.now
        self.cores.begin(node, self.work.seconds[node], self.work.asks[node], self.work.alone[node])

    def _end(self, node: int) -> None:
        self.end[node], self.ended[node] = self.cores.now, True
        if self.work.acts[node] in (RUN, AWAIT):
            role = self.role_of[node]
            self.at[role] += 1
            self._go_on(role)
            return
        line = self.queues[self.work.lanes[node]]
        line.popleft()
        if line:
            self._begin(line[0])
        for role in self.woken.pop(node, ()):
            self._go_on(role)
