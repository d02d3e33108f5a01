"""An order of computing -> the same with its sends and receives, and those as the ops of a rank's program.

A stage sends an activation to the stage after it and a gradient to the one before, unless both are on one rank. A send
comes right after what made it. A link keeps its order, so a rank receives from another in the order in which that one
sends. When it issues a receive is a choice, and two functions make it:

- `add_late`: just before what needs it. Nobody waits for more than he needs, so this is the order to plan and predict.
- `add_early`: as soon as its sender has computed. So does torch for several stages a rank (`_add_send_recv` in
  torch.distributed.pipelining.schedules), whose receives run in the background. Both ranks of a pair then have their
  messages in one order, so that even sends that wait for their receive do not block each other.

Either way every link carries the same messages in the same order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from engine.graph.columns import Ops, unroll
from engine.plan import Op
from engine.schedules import MESSAGES, PASSES, Action, other_end
from engine.schedules.csv_form import cell
from engine.schedules.grid import show

# Which way a pass goes through the stages. A weights' half needs what its rank has, and nobody needs it.
WAYS = {"forward": "forward", "backward": "backward", "backward_input": "backward"}
STEP = {"forward": 1, "backward": -1}
PAYLOADS = {"forward": "activation", "backward": "gradient"}


class OrderError(ValueError):
    """An order in which something can never be computed. The message shows where the ranks stand."""


def add_late(order: Sequence[Sequence[Action]], pipelines: Sequence[range]) -> list[list[Action]]:
    """Each receive just before what needs it, after those that the same rank sends earlier: they have come by then.

    OrderError: what is needed is never sent, or comes later on the same rank. Ranks that wait for each other are left
    to `engine.simulation`.
    """
    route = _find_route(order, pipelines)
    links: dict[tuple[int, int], deque[_Arrival]] = defaultdict(deque)  # what is still to come, by (source, target)
    for rank, actions in enumerate(order):
        for kind, stage, microbatch, _ in actions:
            if target := route.targets.get((kind, stage)):
                if target.rank != rank:
                    links[rank, target.rank].append((target.way, target.stage, microbatch))
    out = []
    for rank, actions in enumerate(order):
        row: list[Action] = []
        there: set[_Arrival] = set()
        for place, group in groups(actions):
            for kind, stage, microbatch, _ in group:
                if source := route.sources.get((kind, stage)):
                    need, link = (source.way, stage, microbatch), links[source.rank, rank]
                    while need not in there and link:
                        row.append(_receive(link[0]))
                        there.add(link.popleft())
                    if need not in there:
                        raise OrderError(f"what is needed here has not been computed:\n{_show(order, {rank: place})}")
                    there.remove(need)
            row += group
            for kind, stage, microbatch, _ in group:
                if target := route.targets.get((kind, stage)):
                    if target.rank == rank:
                        there.add((target.way, target.stage, microbatch))
                    else:
                        row.append(Action(f"send_{target.way}", stage, microbatch))
        out.append(row)
    for (_, target), link in links.items():
        out[target] += map(_receive, link)  # sent, and needed by nobody
    return out


def add_early(order: Sequence[Sequence[Action]], pipelines: Sequence[range]) -> list[list[Action]]:
    """Each receive as soon as its sender has computed, where ranks take turns, an action each; OrderError: a circle.

    Actions that are not in PASSES take their turn, need nothing and send nothing.
    """
    route = _find_route(order, pipelines)
    out: list[list[Action]] = [[] for _ in order]
    there: set[_Arrival] = set()
    waiting = {rank: deque(groups(actions)) for rank, actions in enumerate(order) if actions}
    while waiting:
        moved = False
        for rank, queue in list(waiting.items()):
            _, group = queue[0]
            sources = [(route.sources.get(action[:2]), action) for action in group]
            if not all((source.way, *action[1:3]) in there for source, action in sources if source):
                continue
            moved = True
            out[rank] += group
            for kind, stage, microbatch, _ in group:
                if target := route.targets.get((kind, stage)):
                    arrival = (target.way, target.stage, microbatch)
                    there.add(arrival)
                    if target.rank != rank:
                        out[rank].append(Action(f"send_{target.way}", stage, microbatch))
                        out[target.rank].append(_receive(arrival))
            queue.popleft()
            if not queue:
                del waiting[rank]
        if not moved:
            stand = {rank: queue[0][0] for rank, queue in waiting.items()}
            raise OrderError(f"these ranks wait for each other:\n{_show(order, stand)}")
    return out


def groups(actions: Sequence[Action]) -> Iterator[tuple[int, list[Action]]]:
    """(place of the first, actions that run as one); most are alone."""
    group: list[Action] = []
    for i, action in enumerate(actions):
        group.append(action)
        if not action.overlaps_next or i == len(actions) - 1:
            yield i + 1 - len(group), group
            group = []


def pipelines_of(order: Sequence[Sequence[Action]]) -> list[range]:
    """The pipelines of an order that was read from a file: a stage that shares no microbatch with the stage before it
    begins another one. `engine.schedules.pipelines` has those of a schedule by name."""
    microbatches: dict[int, set[int | None]] = {}
    for action in (a for actions in order for a in actions if a.kind in PASSES):
        microbatches.setdefault(action.stage, set()).add(action.microbatch)
    starts = [s for s in sorted(microbatches) if not microbatches[s] & microbatches.get(s - 1, set())]
    return [range(a, b) for a, b in pairwise([*starts, max(microbatches, default=-1) + 1])]


def unrolled(
    actions: Sequence[Action],
    compute: Mapping[tuple[str, int], Sequence[Op]],
    sizes: Mapping[int, int],
    rank_of: Mapping[int, int],
    *,
    before: Sequence[Op] = (),
    after: Sequence[Op] = (),
    waits: bool = False,
) -> Ops:
    """A rank's actions, with their messages, as the ops of its program; `before` and `after` them, other ops.

    `compute`: the ops of one pass, by (kind, stage). `sizes`: bytes of the activation that leaves a stage, which are
    also those of the gradient that comes back to it. `rank_of`: the rank of a stage, its coordinate on the axis pp.
    `waits`: until what is sent has left.
    """
    calls = [(action[:2], action.microbatch) for action in actions]
    passes = {}
    for kind, stage in dict.fromkeys(call for call, _ in calls):
        message = _message(kind, stage, sizes, rank_of, waits=waits) if kind in MESSAGES else None
        passes[kind, stage] = compute[kind, stage] if message is None else [message]
    return unroll(passes, calls, before=before, after=after)


def _message(kind: str, stage: int, sizes: Mapping[int, int], rank_of: Mapping[int, int], *, waits: bool) -> Op:
    verb, way = kind.split("_")
    other = other_end(kind, stage)
    size = sizes[min(stage, other)]
    return Op(
        kind=verb,
        stage=stage,
        payload=PAYLOADS[way],
        axis="pp",
        peer=rank_of[other],
        bytes=size,
        asynchronous=verb == "send" and not waits,
    )


def _show(order: Sequence[Sequence[Action]], stand: Mapping[int, int]) -> str:
    return show([list(map(cell, actions)) for actions in order], stand)


_Arrival = tuple[str, int, int | None]  # (way, stage, microbatch): what a stage has been given to work on


def _receive(arrival: _Arrival) -> Action:
    return Action(f"recv_{arrival[0]}", *arrival[1:])


class _Source(NamedTuple):
    way: str
    rank: int


class _Target(NamedTuple):
    way: str
    stage: int
    rank: int


class _Route(NamedTuple):
    """By (kind, stage) of a pass: the rank that makes what it needs, and where what it makes goes; its own included."""

    sources: dict[tuple[str, int], _Source]
    targets: dict[tuple[str, int], _Target]


def _find_route(order: Sequence[Sequence[Action]], pipelines: Sequence[range]) -> _Route:
    rank = {action.stage: rank for rank, actions in enumerate(order) for action in actions if action.kind in PASSES}
    if odd := rank.keys() ^ {stage for pipeline in pipelines for stage in pipeline}:
        raise OrderError(f"the stages of the order are not those of its pipelines: {sorted(odd)}")
    route = _Route({}, {})
    for stages in pipelines:
        for kind, way in WAYS.items():
            for stage, following in pairwise(stages[:: STEP[way]]):
                route.targets[kind, stage] = _Target(way, following, rank[following])
                route.sources[kind, following] = _Source(way, rank[stage])
    return route
