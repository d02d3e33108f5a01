"""A graph and the seconds of its nodes -> when each starts and ends; a deadlock is found and shown.

Every lane runs its ops in program order, so the schedule is the longest path through the graph of
`engine.graph.matching`: an op starts when all it waits for have ended. A collective starts when its last member is
ready. A message leaves when its send is ready, since sends are buffered; its receive has the transfer's own start and
end, and its rank goes on once the receive is reached and the message is there.

What a role does between two points at which it meets others is a run of known length. So a program is first contracted
to steps, each of which waits for one end, goes on for so long, and then sends one message or joins one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from engine.cost.sharing import AWAIT, CALL, PASS, RECV, RUN, SEND, SYNC_CALL, SYNC_SEND
from engine.graph.matching import Graph, PlanError, describe
from engine.plan import COLLECTIVES

UNKNOWN = -1.0  # end of a node that has not been scheduled
NUM_ACTS = 8
SHOWN_RANKS, SHOWN_OPS = 8, 2  # of a deadlock: ranks of the circle; ops before and after the arrow


class DeadlockError(PlanError):
    """Ops that wait for each other in a circle. The message shows each rank's program with an arrow where it stands."""


class Steps(NamedTuple):
    """Arrays with one entry a step, role after role; `slot`, `runs`, `before` and `after` have one a node."""

    first: np.ndarray  # its first node; the last node is the one before the next step's first
    waiter: np.ndarray  # the node at which the role waits for `need`
    need: np.ndarray  # slot of the send or call that must have ended
    length: np.ndarray  # seconds that it goes on for
    post: np.ndarray  # slot of what it then sends or joins
    took: np.ndarray  # seconds of that
    lane: np.ndarray  # on which it is; 0: nothing is sent; of a call that others join, less than 0: ~lane
    bounds: np.ndarray  # the first step of each role; one more entry is the number of steps
    slot: np.ndarray  # of a send or a member of a call: where its times are kept, or its call's; else the last slot
    runs: np.ndarray  # whether the node is part of a run
    before: np.ndarray  # seconds of its role's runs before the node
    after: np.ndarray  # and with it
    members: dict[int, int]  # of each slot of a call, how many join it


def schedule(graph: Graph, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every node. Members of a collective share both, and so do the two ends of a message.

    Each role is a coroutine that goes through its steps until it needs an end that is not known yet; there it yields.
    Roles take turns, down and up in turn as messages do in a pipeline; the order makes no difference to any time.
    When all have had a turn and none got on, it is a deadlock.
    """
    if not np.all((seconds >= 0) & (seconds < np.inf)):
        raise PlanError("every op must take 0 or more seconds, and finitely many")
    steps = _contracted(graph, seconds)
    slots, missing = int(steps.slot[-1]), steps.members
    free = [0.0] * (1 + np.maximum(steps.lane, ~steps.lane).max(initial=0))  # from when on each lane is free
    # Plain lists: reading and writing one entry of an array costs more. The last two slots are of nothing.
    start, ended = [UNKNOWN] * (slots + 2), [*[UNKNOWN] * slots, 0.0, 0.0]
    begins: list[list[float]] = [[] for _ in graph.plan.programs]  # of each role's steps so far
    columns = (steps.need, steps.length, steps.post, steps.took, steps.lane)

    def run(role: int, start=start, ended=ended, free=free) -> Iterator[int]:
        now, begin_at = 0.0, begins[role].append
        mine = slice(steps.bounds[role], steps.bounds[role + 1])
        for need, length, post, took, lane in zip(*(column[mine].tolist() for column in columns), strict=True):
            arrival = ended[need]
            while arrival == UNKNOWN:
                yield need
                arrival = ended[need]
            if now < arrival:
                now = arrival
            begin_at(now)
            now += length
            if lane >= 0:
                begin = free[lane]
                if begin < now:
                    begin = now
                start[post] = begin
                free[lane] = ended[post] = begin + took
            else:
                start[post] = max(start[post], now)
                missing[post] -= 1
                if not missing[post]:
                    # All members have made their earlier calls on this lane, so what is known of it is final.
                    start[post] = max(start[post], free[~lane])
                    free[~lane] = ended[post] = start[post] + took

    programs = [run(role) for role in range(len(graph.plan.programs))]
    standing = dict.fromkeys(range(len(programs)), -1)  # the slot for which each unfinished role waits
    while standing:
        before, standing = standing, {}
        for role in reversed(before):
            need = next(programs[role], None)
            if need is not None:
                standing[role] = need
        if standing == before:
            at = {role: int(steps.waiter[steps.bounds[role] + len(begins[role])]) for role in standing}
            raise DeadlockError(_show_deadlock(graph, at, lambda node: ended[steps.slot[node]] != UNKNOWN))
    began = np.fromiter(chain.from_iterable(begins), dtype=np.float64, count=len(steps.first))
    return _expanded(graph, seconds, steps, began, np.array(start))


def _contracted(graph: Graph, seconds: np.ndarray) -> Steps:
    num, acts = len(seconds), acts_of(graph)
    lanes = _lanes_of_templates(graph) + 1  # none is 0
    calls = np.flatnonzero(_any_of(acts, CALL, SYNC_CALL))
    call, line = graph.meets[calls], lanes[graph.which[calls]]
    alone = np.bincount(call, minlength=num)[call] == 1  # all members play one role, so all are ready at once
    in_turn = ~np.isin(line, line[acts[calls] == CALL])  # nothing on its lane overlaps what comes next
    runs, closes = _any_of(acts, RUN, AWAIT), _any_of(acts, SEND, SYNC_SEND, CALL, SYNC_CALL)
    runs[calls[alone & in_turn]] = True
    closes &= ~runs
    after = np.zeros(num + 1)
    length = np.where(runs, seconds, 0.0)
    for first, end in pairwise(graph.first):
        np.cumsum(length[first:end], out=after[first:end])
    before = np.roll(after, 1)
    before[graph.first] = 0.0
    closing = np.flatnonzero(closes)
    none, nothing = len(closing), len(closing) + 1
    slot = np.full(num + 1, none)
    slot[closing] = np.arange(none)
    joining = closes[calls] & ~alone
    slot[calls[joining]] = slot[call[joining]]
    joined, members = np.unique(slot[calls[joining]], return_counts=True)

    synchronous = closing[_any_of(acts[closing], SYNC_SEND, SYNC_CALL)]
    synchronous = synchronous[~np.isin(synchronous + 1, graph.first)]  # a program's last op holds up nothing
    receives = np.flatnonzero(acts == RECV)
    waiting = np.array([node for node, needs in graph.waits.items() for _ in needs], dtype=np.int64)
    awaited = np.array([need for needs in graph.waits.values() for need in needs], dtype=np.int64)
    awaited = np.where(graph.meets[awaited] < 0, awaited, graph.meets[awaited])
    opened = np.zeros(num + 1, dtype=bool)
    opened[graph.first] = True
    opened[closing + 1] = True
    for nodes in (synchronous + 1, receives, waiting, num):
        opened[nodes] = False
    opened = np.flatnonzero(opened)
    # In this order where several are at one node: what a call before it still holds up comes first.
    waiter = np.concatenate([synchronous, receives, waiting, opened])
    need = slot[np.concatenate([synchronous, graph.meets[receives], awaited, np.full(len(opened), num)])]
    first = waiter + (np.arange(len(waiter)) < len(synchronous))
    order = np.argsort(first, kind="stable")
    first, waiter, need = first[order], waiter[order], need[order]
    last = np.append(first, num)[1:] - 1
    some = last >= first  # else the step only waits
    posts = some & closes[last]
    sent = last[posts]
    lane, post, took = np.zeros(len(first), dtype=np.int64), np.full(len(first), nothing), np.zeros(len(first))
    post[posts], took[posts] = slot[sent], seconds[sent]
    on = lanes[graph.which]
    on[calls[joining]] = ~on[call[joining]]
    lane[posts] = on[sent]
    ran = np.where(some, after[last] - before[first], 0.0)
    bounds = np.searchsorted(waiter, graph.first)
    members = dict(zip(joined.tolist(), members.tolist(), strict=True))
    return Steps(first, waiter, need, ran, post, took, lane, bounds, slot, runs, before, after, members)


def _any_of(acts: np.ndarray, *wanted: int) -> np.ndarray:
    table = np.zeros(NUM_ACTS, dtype=bool)
    table[list(wanted)] = True
    return table[acts]


def _expanded(
    graph: Graph, seconds: np.ndarray, steps: Steps, began: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every node, from when each step began and what is in each slot started."""
    num = len(seconds)
    sizes = np.diff(steps.first, append=num)
    ran, began = np.repeat(steps.before[steps.first], sizes), np.repeat(began, sizes)
    begin, end = began + (steps.before[:-1] - ran), began + (steps.after[:-1] - ran)
    others = np.flatnonzero(~steps.runs)
    about = np.where(graph.meets[others] < 0, others, graph.meets[others])
    begin[others] = start = start[steps.slot[about]]
    end[others] = start + seconds[about]
    return begin, end


def acts_of(graph: Graph) -> np.ndarray:
    """What is to be done at each node."""
    of_template = []
    for op in graph.templates:
        if op.kind == "send":
            of_template.append(SEND if op.asynchronous else SYNC_SEND)
        elif op.kind == "recv":
            # Nothing waits at an asynchronous receive itself; what waits for it later waits for its send.
            of_template.append(PASS if op.asynchronous else RECV)
        else:
            call = CALL if op.asynchronous else SYNC_CALL
            of_template.append(call if op.kind in COLLECTIVES else RUN)
    acts = np.array(of_template, dtype=np.int8)[graph.which]
    acts[list(graph.waits)] = AWAIT
    return acts


def lanes_of(graph: Graph) -> np.ndarray:
    """A number for the lane of each node."""
    return _lanes_of_templates(graph)[graph.which]


def _lanes_of_templates(graph: Graph) -> np.ndarray:
    numbers = {lane: i for i, lane in enumerate(dict.fromkeys(graph.lanes))}
    return np.array([numbers[lane] for lane in graph.lanes], dtype=np.int64)


def _show_deadlock(graph: Graph, standing: dict[int, int], ended: Callable[[int], bool]) -> str:
    """Words for a circle among the roles in `standing`, each of which stands at a node and cannot go on."""
    ranks = [graph.representative[min(standing)]]
    while (following := _blocker(graph, standing, ended, ranks[-1])) not in ranks:
        ranks.append(following)
    ranks = ranks[ranks.index(following) :]
    lines = ["these ranks wait for each other: " + " -> ".join(map(str, [*ranks, ranks[0]][: SHOWN_RANKS + 1]))]
    for rank, other in zip(ranks[:SHOWN_RANKS], [*ranks[1:], ranks[0]], strict=False):
        role = graph.plan.roles[rank]
        node, first, last = standing[role], graph.first[role], graph.first[role + 1]
        lines.append(f"rank {rank} waits for rank {other}:")
        for i in range(max(first, node - SHOWN_OPS), min(last, node + SHOWN_OPS + 1)):
            lines.append(f"{'>' if i == node else ' '} {describe(graph.op(i))}")
    if len(ranks) > SHOWN_RANKS:
        lines.append(f"and {len(ranks) - SHOWN_RANKS} more ranks in this circle")
    return "\n".join(lines)


def _blocker(graph: Graph, standing: dict[int, int], ended: Callable[[int], bool], rank: int) -> int:
    """The rank that a stuck one waits for: who has yet to send, or to join the call."""
    plan, node = graph.plan, standing[graph.plan.roles[rank]]
    needs = [(own, int(graph.meets[own])) for own in graph.waits.get(node, [node])]
    own, need = next((own, need) for own, need in needs if need >= 0 and not ended(need))
    if graph.op(need).kind == "send":
        return plan.peer_rank(rank, graph.op(own))
    members = np.flatnonzero(graph.meets == need).tolist()
    late = {graph.role(node) for node in members if standing.get(graph.role(node), node) < node}
    return next(member for member in plan.mesh.group(rank, graph.op(need).axis) if plan.roles[member] in late)
