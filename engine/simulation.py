"""A Plan and a Machine -> the step that they predict: when each op starts and ends, bytes sent, memory at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from engine.asking.slow import Slow
from engine.cost.collectives import busy_cores, communication_seconds, rounds_and_bytes
from engine.cost.compute import compute_seconds
from engine.cost.contention import CHANNELS, hidden, slowed
from engine.cost.held import OverTime, memory_of, over_time
from engine.cost.local import local_leads, local_seconds
from engine.cost.machine import Machine
from engine.cost.placement import apart
from engine.cost.sharing import Cores, Work, share
from engine.graph.columns import Ops
from engine.graph.matching import Graph, match
from engine.graph.roles import numbered
from engine.graph.scheduler import acts_of, lanes_of, schedule
from engine.plan import COLLECTIVES, Op, Plan
from engine.timeline import NONE, Timeline

NOTHING = Slow()


@dataclass(frozen=True)
class Simulation:
    """One predicted step of `plan`, whose ranks of one role do the same at the same times. Lists have one entry a role.

    `start` and `end` are seconds, one entry a node of `graph`, which knows what a node waited for: the node before it
    in its program, `graph.meets` and `graph.waits`. `waited`: seconds that a rank waits for a core while it
    computes, where ranks share them.
    """

    plan: Plan
    graph: Graph
    start: np.ndarray
    end: np.ndarray
    makespan: float
    bytes_sent: list[float]
    memory: list[dict[str, int]]  # by category, each at its most
    peak_memory: list[int]
    peak_in_flight: list[int]
    waited: list[float]

    def per_rank(self, values: list) -> list:
        return [values[role] for role in self.plan.roles]

    def memory_over_time(self, role: int) -> OverTime:
        """What a rank of a role holds from the step's begin to its end."""
        nodes = slice(self.graph.first[role], self.graph.first[role + 1])
        return over_time(self.plan.programs[role], self.start[nodes], self.end[nodes])

    @cached_property
    def timeline(self) -> Timeline:
        """Every op of every rank: it costs what all ranks cost."""
        return self.of_ranks(range(self.plan.world_size))

    @cached_property
    def by_role(self) -> Timeline:
        """Every op of one rank a role, the lowest, which stands for all ranks of its role: it costs what roles cost."""
        stands_for = np.zeros(self.plan.world_size, dtype=np.int64)
        stands_for[self.graph.representative] = self.graph.num_ranks
        timeline = self.of_ranks(self.graph.representative)
        return replace(timeline, stands_for=tuple(stands_for.tolist()))

    def of_ranks(self, ranks: Sequence[int]) -> Timeline:
        """Every op of some ranks, which are in rising order; each rank's in the order of its program."""
        return _timeline(self.graph, self.start, self.end, np.array(ranks, dtype=np.int64))


def simulate(plan: Plan, machine: Machine, slow: Slow = NOTHING) -> Simulation:
    """`slow`: ranks and links that are slower than the machine says."""
    graph = matched(plan, machine, slow)
    plan = graph.plan
    seconds = durations(graph, machine, slow)
    start, end = schedule(graph, seconds)
    if machine.cores:
        start, end = on_shared_cores(graph, seconds, machine)
    held = [memory_of(program) for program in plan.programs]
    return Simulation(
        plan,
        graph,
        start,
        end,
        float(end.max(initial=0.0)),
        _bytes_sent(graph),
        [memory for memory, _ in held],
        [sum(memory.values()) for memory, _ in held],
        [in_flight for _, in_flight in held],
        _waited(graph, end - start - seconds),
    )


def matched(plan: Plan, machine: Machine, slow: Slow = NOTHING) -> Graph:
    """The graph of a plan, in which ranks of one role are as slow as each other and lie alike: one stands for all."""
    slower = slow.apart(plan.world_size)
    columns = [*apart(plan, machine), *([] if slower is None else [np.array(slower)])]
    return match(plan, numbered(*columns) if columns else None)


def _waited(graph: Graph, longer: np.ndarray) -> list[float]:
    compute = np.array([op.is_compute for op in graph.templates], dtype=bool)[graph.which]
    sums = np.concatenate([[0.0], np.cumsum(np.where(compute, longer, 0.0))])
    return np.diff(sums[graph.first]).tolist()


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
    leads: list[float] = []
    if machine.local:
        crowding = machine.crowding(graph.plan.world_size)
        leads = (crowding * np.array(local_leads(graph, machine.local)))[graph.which].tolist()
    work = Work(
        seconds=seconds.tolist(),
        asks=(alone * together).tolist(),
        alone=alone.tolist(),
        acts=acts_of(graph).tolist(),
        lanes=lanes_of(graph).tolist(),
        meets=graph.meets.tolist(),
        waits=graph.waits,
        first=graph.first,
        leads=leads,
        players=ranks.tolist(),
        uneven=machine.uneven,
        members=_met(graph),
    )
    return share(Cores(machine.cores, machine.together), work)


def _met(graph: Graph) -> list[int]:
    """How many ranks come to each node of which the last one decides when it begins: members of a collective, the two
    ends of a message between ranks that do the same, as round a ring; 1 of any other."""
    kinds = np.array([op.kind for op in graph.templates])
    met = np.array([graph.plan.mesh.degree(op.axis) if op.kind in COLLECTIVES else 1 for op in graph.templates])
    met = met[graph.which]
    programs = ([op for op in program.ops if op.kind != "load"] for program in graph.plan.programs)
    does = [[(op.kind, op.stage, op.part) for op in ops] for ops in programs]
    for received in np.flatnonzero((kinds == "recv")[graph.which]).tolist():
        sent = int(graph.meets[received])
        if does[graph.role(sent)] == does[graph.role(received)]:
            met[sent] = 2
    return met.tolist()


def durations(graph: Graph, machine: Machine, slow: Slow = NOTHING) -> np.ndarray:
    """Seconds of every node, were it never to wait. A receive takes none of its own: its send carries the message."""
    if machine.local is not None:
        seconds = local_seconds(graph, machine.local, machine.threads)
    else:
        seconds = []
        for program in graph.plan.programs:
            seconds += compute_seconds(Ops.of(program.ops).templates, machine, graph.plan.world_size)
    crowding = machine.crowding(graph.plan.world_size)
    known: dict[tuple, float] = {}  # of communication that many ops repeat
    groups: dict[tuple, Sequence[int]] = {}  # of a role on an axis, or to a peer there
    for i, op in enumerate(graph.templates):
        if op.is_compute:
            seconds[i] *= slow.computing(graph.representative[graph.lanes[i][0]]) * crowding
        elif op.kind == "send" or op.kind in COLLECTIVES:
            place = (graph.lanes[i][0], op.axis, op.peer, op.ring)
            if (group := groups.get(place)) is None:
                group = groups[place] = graph.group(i)
            if machine.local is None:
                same = (op.kind, op.bytes, group)
                if same not in known:
                    known[same] = communication_seconds(op, group, machine)
                seconds[i] = known[same]
            if slow.links:
                seconds[i] *= slow.moving(group)
    of_node = np.array(seconds, dtype=np.float64)[graph.which]
    if machine.sms:
        _crowd(graph, of_node, CHANNELS / machine.sms)
    if machine.overlaps_exchanges:
        _hide(graph, of_node)
    uneven = np.array([op.kind == "all_to_all" for op in graph.templates], dtype=bool)[graph.which]
    if uneven.any():  # members may give more than others: it takes as long as the most takes
        calls, longest = graph.meets[uneven], of_node.copy()
        np.maximum.at(longest, calls, of_node[uneven])
        of_node[uneven] = longest[calls]
    return of_node


def _crowd(graph: Graph, seconds: np.ndarray, share: float) -> None:
    """Compute beside a collective in the background gets that much less of a device."""
    background = np.array([op.asynchronous and op.kind in COLLECTIVES for op in graph.templates])[graph.which]
    computes = np.array([op.is_compute for op in graph.templates])[graph.which]
    for first, end in pairwise(graph.first):
        own = np.flatnonzero(background[first:end])
        if len(own):
            after = slice(first + own[0], end)
            columns = (column[after].tolist() for column in (seconds, background, computes))
            seconds[after] = slowed(*columns, share)


def _hide(graph: Graph, seconds: np.ndarray) -> None:
    """Exchanges among experts beside passes of another micro-batch take what of them is waited for."""
    of = {
        "exchanges": [op.kind == "all_to_all" and op.payload != "control" for op in graph.templates],
        "forward": [op.kind == "forward" for op in graph.templates],
        "backward": [op.kind.startswith(("backward", "recompute")) for op in graph.templates],
    }
    columns = {name: np.array(values, dtype=bool)[graph.which] for name, values in of.items()}
    for first, end in pairwise(graph.first):
        own = {name: column[first:end].tolist() for name, column in columns.items()}
        seconds[first:end] = hidden(seconds[first:end].tolist(), **own)


def _bytes_sent(graph: Graph) -> list[float]:
    """Bytes that a rank of each role puts on its links."""
    sent = [0.0] * len(graph.plan.programs)
    uses = np.bincount(graph.which, minlength=len(graph.templates)).tolist()
    degrees = {axis: graph.plan.mesh.degree(axis) for axis in {op.axis for op in graph.templates} if axis}
    for op, (role, _), times in zip(graph.templates, graph.lanes, uses, strict=True):
        if op.kind == "send":
            sent[role] += op.bytes * times
        elif op.kind in COLLECTIVES:
            sent[role] += rounds_and_bytes(op, degrees[op.axis])[1] * times
    return sent


def _timeline(graph: Graph, start: np.ndarray, end: np.ndarray, ranks: np.ndarray) -> Timeline:
    """The spans of roles, repeated on those of their ranks that are in `ranks`."""
    plan, role = graph.plan, np.array(graph.plan.roles, dtype=np.int64)[ranks]
    lengths = np.diff(graph.first)[role]
    rank = np.repeat(ranks, lengths)
    node = np.arange(len(rank)) + np.repeat(np.array(graph.first)[role] - (np.cumsum(lengths) - lengths), lengths)
    templates, lanes, ahead, moved = _seen_from(graph, ranks)
    which = graph.which[node] + np.repeat(moved, lengths)

    def text(values: list[str]) -> np.ndarray:
        return np.array(values, dtype=object)[which]

    def number(values: list[int | None]) -> np.ndarray:
        return np.array([NONE if value is None else value for value in values], dtype=np.int64)[which]

    columns = {
        "rank": rank,
        "lane": text(lanes),
        "kind": text([op.kind for op in templates]),
        "step": np.zeros(len(rank), dtype=np.int64),
        "start": start[node],
        "end": end[node],
        "stage": number([op.stage for op in templates]),
        "microbatch": graph.microbatch[node],
        "part": text([op.part for op in templates]),
        "payload": text([op.payload for op in templates]),
        "group": text([op.axis for op in templates]),
        "peer": rank + number(ahead),
        "bytes": number([op.bytes for op in templates]),
    }
    columns["peer"][number([op.peer for op in templates]) == NONE] = NONE
    return Timeline(columns, "simulated", plan.world_size)


def _seen_from(graph: Graph, ranks: np.ndarray) -> tuple[list[Op], list[str], list[int], list[int]]:
    """The templates of a graph as these ranks do them, once for all that stand where it makes no difference; of
    each its lane, and how far it is to its peer; and of each rank, how much further on they are than in the graph."""
    plan, further, of_rank = graph.plan, {}, []
    templates, lanes, ahead, columns = [], [], [], (graph.templates, graph.lanes)
    first = np.searchsorted([role for role, _ in graph.lanes], range(len(plan.programs) + 1)).tolist()
    for rank in ranks.tolist():
        place = role, *_ = plan.place(rank)
        if place not in further:
            further[place] = len(templates) - first[role]
            for op, (_, lane) in zip(*(each[first[role] : first[role + 1]] for each in columns), strict=True):
                templates.append(plan.on(rank, op))
                lanes.append(plan.lane(rank, op) if op.ring else lane)
                ahead.append(0 if op.peer is None else plan.peer_rank(rank, op) - rank)
        of_rank.append(further[place])
    return templates, lanes, ahead, of_rank
