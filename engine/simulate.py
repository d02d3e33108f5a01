"""A Plan and a Machine -> the Timeline that they predict, by list scheduling; a deadlock is found and shown.

Every lane runs its ops in program order, so the schedule is the longest path through the graph of `engine.matching`:
an op starts when all it waits for have ended. A collective starts when its last member is ready. A message leaves
when its send is ready, since sends are buffered; its receive has the transfer's own start and end, and its rank goes
on once the receive is reached and the message is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.columns import Ops
from engine.cost.collectives import busy_cores, collective_seconds, message_seconds, rounds_and_bytes
from engine.cost.compute import compute_seconds
from engine.cost.machine import Machine
from engine.cost.memory import by_category
from engine.cost.sharing import AWAIT, CALL, PASS, RECV, RUN, SEND, SYNC_CALL, SYNC_SEND, Cores, share
from engine.matching import NO_NODE, Graph, PlanError, describe, match
from engine.plan import COLLECTIVES, Plan
from engine.timeline import NONE, Timeline

UNKNOWN = -1.0  # end of a node that has not been scheduled
SHOWN_RANKS, SHOWN_OPS = 8, 2  # of a deadlock: ranks of the circle; ops before and after the arrow


class DeadlockError(PlanError):
    """Ops that wait for each other in a circle. The message shows each rank's program with an arrow where it stands."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One predicted step. Lists have one entry a role of `plan`; `timeline` repeats each role on all its ranks.

    `start` and `end` are seconds, one entry a node of `graph`.
    """

    plan: Plan
    graph: Graph
    start: np.ndarray
    end: np.ndarray
    timeline: Timeline
    makespan: float
    bytes_sent: list[float]
    memory: list[dict[str, int]]  # by category, each at its most
    peak_memory: list[int]
    peak_in_flight: list[int]

    def per_rank(self, values: list) -> list:
        return [values[role] for role in self.plan.roles]


def simulate(plan: Plan, machine: Machine) -> Simulation:
    graph = match(plan)
    plan = graph.plan
    seconds = durations(graph, machine)
    start, end = schedule(graph, seconds)
    if machine.cores:
        start, end = on_shared_cores(graph, seconds, machine)
    peaks = [peaks_of(Ops.of(program.ops), 0) for program in plan.programs]
    memory = [by_category(program.memory, kept) for program, (kept, _) in zip(plan.programs, peaks, strict=True)]
    return Simulation(
        plan,
        graph,
        start,
        end,
        _timeline(graph, start, end),
        float(end.max(initial=0.0)),
        _bytes_sent(graph),
        memory,
        [sum(held.values()) for held in memory],
        [in_flight for _, in_flight in peaks],
    )


def on_shared_cores(graph: Graph, seconds: np.ndarray, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every node where ranks are processes that share a machine's cores; copies use them too."""
    ranks = np.bincount(graph.plan.roles, minlength=len(graph.plan.programs))
    alone = []
    for op in graph.templates:
        group = graph.plan.mesh.degree(op.axis) if op.kind in COLLECTIVES else 2
        alone.append(machine.threads(graph.plan.world_size) if op.is_compute else busy_cores(op, group, machine))
    alone = np.array(alone, dtype=np.float64)[graph.which]
    together = np.repeat(ranks, np.diff(graph.first)).astype(np.float64)  # how often each node is done at once
    called = np.array([op.kind in COLLECTIVES for op in graph.templates], dtype=bool)[graph.which]
    if called.any():  # once a group, and not once a member
        groups = np.zeros(len(seconds))
        degree = np.array([graph.plan.mesh.degree(op.axis) for op in graph.templates])[graph.which]
        np.add.at(groups, graph.meets[called], (together / degree)[called])
        together[called] = groups[graph.meets[called]]
    columns = (seconds, alone * together, alone, _acts(graph), _lanes(graph), graph.meets)
    cores = Cores(machine.cores, machine.together)
    return share(cores, *(column.tolist() for column in columns), graph.waits, graph.first)


def durations(graph: Graph, machine: Machine) -> np.ndarray:
    """Seconds of every node, were it never to wait. A receive takes none of its own: its send carries the message."""
    seconds: list[float] = []
    for program in graph.plan.programs:
        seconds += compute_seconds(Ops.of(program.ops).templates, machine, graph.plan.world_size)
    for i, op in enumerate(graph.templates):
        if op.kind in COLLECTIVES:
            seconds[i] = collective_seconds(op, graph.plan.mesh.degree(op.axis), machine)
        elif op.kind == "send":
            seconds[i] = message_seconds(op.bytes, machine)
    of_node = np.array(seconds, dtype=np.float64)[graph.which]
    uneven = np.array([op.kind == "all_to_all" for op in graph.templates], dtype=bool)[graph.which]
    if uneven.any():  # members may give more than others: it takes as long as the most takes
        calls, longest = graph.meets[uneven], of_node.copy()
        np.maximum.at(longest, calls, of_node[uneven])
        of_node[uneven] = longest[calls]
    return of_node


def schedule(graph: Graph, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every node. Members of a collective share both, and so do the two ends of a message.

    Each role is a coroutine that goes through its program until it needs an end that is not known yet; there it
    yields its node. Roles take turns, down and up in turn as messages do in a pipeline; the order makes no
    difference to any time. When all have had a turn and none got on, it is a deadlock.
    """
    if not np.all((seconds >= 0) & (seconds < np.inf)):
        raise PlanError("every op must take 0 or more seconds, and finitely many")
    acts, lanes = _acts(graph), _lanes(graph)
    # A receive is about its send, a collective about its call; a send is about its lane.
    about = np.where(graph.meets < 0, lanes, graph.meets)
    calls = graph.meets[(acts == CALL) | (acts == SYNC_CALL)]
    missing = dict(zip(*(column.tolist() for column in np.unique(calls, return_counts=True)), strict=True))
    free = [0.0] * (1 + lanes.max(initial=0))  # from when on each lane is free
    # Plain lists: reading and writing one entry of an array costs more.
    start, ended = [UNKNOWN] * len(seconds), [UNKNOWN] * len(seconds)  # `ended`: of sends and calls only

    def run(role: int, start=start, ended=ended, free=free) -> Iterator[int]:
        now, nodes = 0.0, range(graph.first[role], graph.first[role + 1])
        columns = (column[nodes.start : nodes.stop].tolist() for column in (acts, about, seconds))
        for node, act, other, length in zip(nodes, *columns, strict=True):
            if act == RUN:
                start[node] = now
                now += length
            elif act == RECV:
                arrival = ended[other]
                while arrival == UNKNOWN:
                    yield node
                    arrival = ended[other]
                if now < arrival:
                    now = arrival
            elif act <= SYNC_SEND:
                begin = free[other]
                if begin < now:
                    begin = now
                start[node] = begin
                free[other] = ended[node] = begin + length
                if act == SYNC_SEND:
                    now = ended[node]
            elif act <= SYNC_CALL:
                start[other] = max(start[other], now)
                missing[other] -= 1
                if not missing[other]:
                    # All members have made their earlier calls on this lane, so what is known of it is final.
                    lane = lanes[other]
                    start[other] = max(start[other], free[lane])
                    free[lane] = ended[other] = start[other] + length
                while act == SYNC_CALL and ended[other] == UNKNOWN:
                    yield node
                now = ended[other] if act == SYNC_CALL else now
            elif act == AWAIT:
                for need in graph.waits[node]:
                    other = graph.meets[need] if graph.meets[need] >= 0 else need
                    while ended[other] == UNKNOWN:
                        yield node
                    now = max(now, ended[other])
                start[node] = now
                now += length

    programs = [run(role) for role in range(len(graph.plan.programs))]
    standing = dict.fromkeys(range(len(programs)), NO_NODE)  # the node at which each unfinished role waits
    while standing:
        before, standing = standing, {}
        for role in reversed(before):
            node = next(programs[role], None)
            if node is not None:
                standing[role] = node
        if standing == before:
            raise DeadlockError(_show_deadlock(graph, standing, ended))
    shared = np.where(graph.meets < 0, np.arange(len(seconds)), graph.meets)
    begin = np.array(start)
    return begin[shared], (begin + seconds)[shared]


def _acts(graph: Graph) -> np.ndarray:
    """What the scheduler does at each node."""
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


def _lanes(graph: Graph) -> np.ndarray:
    """A number for the lane of each node."""
    numbers = {lane: i for i, lane in enumerate(dict.fromkeys(graph.lanes))}
    return np.array([numbers[lane] for lane in graph.lanes], dtype=np.int64)[graph.which]


def _show_deadlock(graph: Graph, standing: dict[int, int], ended: list[float]) -> str:
    """Words for a circle among the roles in `standing`, each of which stands at a node and cannot go on."""
    circle = [min(standing)]
    while (following := _blocker(graph, standing, ended, circle[-1])) not in circle:
        circle.append(following)
    circle = circle[circle.index(following) :]
    ranks = [graph.representative[role] for role in circle]
    lines = ["these ranks wait for each other: " + " -> ".join(map(str, [*ranks, ranks[0]][: SHOWN_RANKS + 1]))]
    for role, rank, other in zip(circle[:SHOWN_RANKS], ranks, [*ranks[1:], ranks[0]], strict=False):
        node, first, last = standing[role], graph.first[role], graph.first[role + 1]
        lines.append(f"rank {rank} waits for rank {other}:")
        for i in range(max(first, node - SHOWN_OPS), min(last, node + SHOWN_OPS + 1)):
            lines.append(f"{'>' if i == node else ' '} {describe(graph.op(i))}")
    if len(circle) > SHOWN_RANKS:
        lines.append(f"and {len(circle) - SHOWN_RANKS} more ranks in this circle")
    return "\n".join(lines)


def _blocker(graph: Graph, standing: dict[int, int], ended: list[float], role: int) -> int:
    """The role that a stuck role waits for: who has yet to send, or to join the call."""
    needs = graph.waits.get(standing[role], [standing[role]])
    needs = [graph.meets[need] if graph.meets[need] >= 0 else need for need in needs]
    need = next(need for need in needs if ended[need] == UNKNOWN)
    if graph.op(need).kind == "send":
        return graph.role(need)
    members = np.flatnonzero(graph.meets == need).tolist()
    return next(graph.role(node) for node in members if standing.get(graph.role(node), node) < node)


def peaks_of(ops: Ops, standing: int) -> tuple[int, int]:
    """(most bytes at once, most passes in flight at once) of one program. A microbatch is in flight in a stage from its
    first forward op there to its last backward op there; in two stages of one rank it is so twice. `standing` bytes are
    held the whole step long."""
    microbatch = ops.microbatch + 1
    if microbatch.max(initial=0) > len(ops):  # keys below must be small numbers, and microbatches may not be
        microbatch = np.unique(microbatch, return_inverse=True)[1]

    def nodes(*kinds: str) -> np.ndarray:
        return np.flatnonzero(np.array([op.kind in kinds for op in ops.templates], dtype=bool)[ops.which])

    def keys(of: list) -> np.ndarray:
        """A small number for each op: equal for equal microbatches of templates that are equal in `of`."""
        numbers = {value: i for i, value in enumerate(dict.fromkeys(of))}
        template = np.array([numbers[value] for value in of], dtype=np.int64)
        return template[ops.which] * (microbatch.max(initial=0) + 1) + microbatch

    forward, freeing = nodes("forward"), nodes("backward", "backward_weight")
    backward = nodes("backward", "backward_input", "backward_weight")
    making = nodes("forward", "recompute")
    saved = np.array([op.saved for op in ops.templates], dtype=np.int64)[ops.which[making]]
    part = keys([(op.stage, op.part) for op in ops.templates])
    held_by = np.zeros(part.max(initial=0) + 1, dtype=np.int64)
    np.add.at(held_by, part[making], saved)
    chunk = keys([op.stage for op in ops.templates])
    in_chunk = np.bincount(chunk[making], weights=saved, minlength=chunk.max(initial=0) + 1).astype(np.int64)
    freeing = freeing[_is_first(part[freeing])]
    held = np.zeros(len(ops), dtype=np.int64)
    held[making] = saved
    whole = np.array([not op.part for op in ops.templates], dtype=bool)[ops.which[freeing]]  # of all layers of a stage
    held[freeing] = -np.where(whole, in_chunk[chunk[freeing]], held_by[part[freeing]])
    sending = nodes("send")
    held[sending] = np.array([op.saved for op in ops.templates], dtype=np.int64)[ops.which[sending]]
    started, done = forward[_is_first(chunk[forward])], backward[::-1][_is_first(chunk[backward[::-1]])]
    in_flight = np.zeros(len(ops), dtype=np.int64)
    in_flight[started] = 1
    in_flight[done] -= 1
    loaded = max((op.saved for op in ops.templates if op.kind == "load"), default=0)  # a batch goes when the next comes
    return standing + loaded + int(held.cumsum().max(initial=0)), int(in_flight.cumsum().max(initial=0))


def _is_first(keys: np.ndarray) -> np.ndarray:
    """Whether each entry is the first one of its value."""
    places = np.arange(len(keys))
    first = np.empty(keys.max(initial=0) + 1, dtype=np.int64)
    first[keys[::-1]] = places[::-1]  # of several, the last one written stays
    return first[keys] == places


def _bytes_sent(graph: Graph) -> list[float]:
    """Bytes that a rank of each role puts on its links."""
    sent = [0.0] * len(graph.plan.programs)
    uses = np.bincount(graph.which, minlength=len(graph.templates)).tolist()
    for op, (role, _), times in zip(graph.templates, graph.lanes, uses, strict=True):
        if op.kind == "send":
            sent[role] += op.bytes * times
        elif op.kind in COLLECTIVES:
            sent[role] += rounds_and_bytes(op, graph.plan.mesh.degree(op.axis))[1] * times
    return sent


def _timeline(graph: Graph, start: np.ndarray, end: np.ndarray) -> Timeline:
    """The roles' spans, repeated on every rank that plays the role; each rank's in the order of its program."""
    plan, templates = graph.plan, graph.templates
    lengths = np.diff(graph.first)[list(plan.roles)]
    rank = np.repeat(np.arange(plan.world_size), lengths)
    if len(plan.programs) == plan.world_size and plan.roles == tuple(range(plan.world_size)):
        node = slice(None)
    else:
        role_starts = np.array(graph.first[:-1])[list(plan.roles)]
        node = np.arange(len(rank)) + np.repeat(role_starts - (np.cumsum(lengths) - lengths), lengths)
    which = graph.which[node]

    def text(values: list[str]) -> np.ndarray:
        return np.array(values, dtype=object)[which]

    def number(values: list[int | None]) -> np.ndarray:
        return np.array([NONE if value is None else value for value in values], dtype=np.int64)[which]

    columns = {
        "rank": rank,
        "lane": text([lane for _, lane in graph.lanes]),
        "kind": text([op.kind for op in templates]),
        "step": np.zeros(len(rank), dtype=np.int64),
        "start": start[node],
        "end": end[node],
        "stage": number([op.stage for op in templates]),
        "microbatch": graph.microbatch[node],
        "part": text([op.part for op in templates]),
        "payload": text([op.payload for op in templates]),
        "group": text([op.axis for op in templates]),
        # From a rank to its peer it is as far as from the lowest rank of its role to the peer of that one.
        "peer": rank + number([_to_peer(graph, i) for i in range(len(templates))]),
        "bytes": number([op.bytes for op in templates]),
    }
    columns["peer"][number([op.peer for op in templates]) == NONE] = NONE
    return Timeline(columns, "simulated", plan.world_size)


def _to_peer(graph: Graph, template: int) -> int:
    op, rank = graph.templates[template], graph.representative[graph.lanes[template][0]]
    return 0 if op.peer is None else graph.plan.peer_rank(rank, op) - rank
