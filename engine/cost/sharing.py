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


def share(
    cores: Cores,
    seconds: Sequence[float],
    asks: Sequence[float],
    alone: Sequence[float],
    acts: Sequence[int],
    lanes: Sequence[int],
    meets: Sequence[int],
    waits: dict[int, list[int]],
    first: Sequence[int],
    leads: Sequence[float] = (),
    players: Sequence[int] = (),
    uneven: float = 0.0,
    members: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every node of a plan that does not deadlock; members of a collective share those of its call.

    One entry a node, in program order, role after role; `first` are the roles' first nodes, and their number. `asks`:
    cores that all who do this at once ask for; `alone`: those that one asks for. `leads`: seconds that a rank computes
    before it does this, on one core, which are no part of it; `players`: ranks of each role. `acts`,
    `lanes`, `meets` and `waits` are those of `engine.simulate.schedule`, whose rules these are.

    Ranks that do the same are not done with it at the same moment: `uneven` is the variance, in seconds, that a second
    of it adds. A call of `members` ranks begins when the last of them has made it (Kruskal and Weiss 1985, doi
    10.1109/TSE.1985.231547, for tasks on processors), and so does a message between ranks of one role arrive.
    """
    nodes = len(seconds)
    led = [not lead for lead in leads] or [True] * nodes
    missing = [0] * nodes  # members that have not made a call yet
    for node in range(nodes):
        if acts[node] in (CALL, SYNC_CALL):
            missing[meets[node]] += 1
    start, end = np.zeros(nodes), np.full(nodes, np.inf)
    ended, issued = [False] * nodes, [False] * nodes
    queues: dict[int, deque[int]] = {}  # of each lane, what has begun and what waits for it
    woken: dict[int, list[int]] = {}  # roles that wait for the end of a node
    at, last = list(first[:-1]), list(first[1:])
    role_of = np.repeat(np.arange(len(at)), np.diff(first)).tolist()
    since = [0.0] * len(at)  # seconds for which each role has computed since it last waited for others

    def begin(node: int) -> None:
        start[node] = cores.now
        cores.begin(node, seconds[node], asks[node], alone[node])

    def queue(node: int) -> None:
        line = queues.setdefault(lanes[node], deque())
        line.append(node)
        if len(line) == 1:
            begin(node)

    def begins_late(node: int, role: int) -> None:
        """Once the last has come of those who do this: they have computed for as long as this role."""
        late = last_of(members[node]) * math.sqrt(uneven * since[role]) if uneven else 0.0
        if late:
            cores.begin(2 * nodes + node, late, 0.0, 0.0)
        else:
            queue(node)

    def pending(node: int, act: int) -> int | None:
        """What has not ended of that for which the role waits at this node."""
        if act in (RECV, SYNC_CALL):
            return None if ended[meets[node]] else meets[node]
        if act == SYNC_SEND:
            return None if ended[node] else node
        if act == AWAIT:
            wanted = (meets[n] if meets[n] >= 0 else n for n in waits[node])
            return next((n for n in wanted if not ended[n]), None)
        return None

    def go_on(role: int) -> None:
        """To the role's next op that computes, or that has to be waited for."""
        while at[role] < last[role]:
            node = at[role]
            act = acts[node]
            if not led[node] and (act in CALLED or pending(node, act) is None):
                led[node] = True
                cores.begin(nodes + node, leads[node], players[role], 1.0)
                since[role] += leads[node]
                return
            if act in (SEND, SYNC_SEND) and not issued[node]:
                issued[node] = True
                begins_late(node, role)
            elif act in (CALL, SYNC_CALL) and not issued[node]:
                issued[node] = True
                missing[meets[node]] -= 1
                if not missing[meets[node]]:
                    begins_late(meets[node], role)
            if act != RUN and (need := pending(node, act)) is not None:
                woken.setdefault(need, []).append(role)
                return
            if act in (SYNC_CALL, AWAIT):
                since[role] = 0.0
            if act in (RUN, AWAIT):
                since[role] += seconds[node]
                begin(node)
                return
            at[role] += 1

    for role in range(len(at)):
        go_on(role)
    while (node := cores.end_next()) is not None:
        if node >= 2 * nodes:
            queue(node - 2 * nodes)
            continue
        if node >= nodes:  # what came before it
            go_on(role_of[node - nodes])
            continue
        end[node], ended[node] = cores.now, True
        if acts[node] in (RUN, AWAIT):
            role = role_of[node]
            at[role] += 1
            go_on(role)
            continue
        line = queues[lanes[node]]
        line.popleft()
        if line:
            begin(line[0])
        for role in woken.pop(node, ()):
            go_on(role)
    shared = np.where(np.asarray(meets) < 0, np.arange(nodes), meets)
    return start[shared], end[shared]
