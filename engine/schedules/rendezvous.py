"""An order with its messages -> whether it also gets on where a send waits for its receive; if not, who waits for whom.

The rules of NCCL without grouped calls, as torch uses it for pipelines: the sends and receives between two ranks run in
the order in which each of the two issues them, on a stream of that pair alone, and none ends before both ends have
reached it. Issuing does not wait; computing waits for what it receives. Where sends are buffered (gloo, or small
messages) `engine.simulation` tells what happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.schedules import MESSAGES, PASSES, Action, other_end
from engine.schedules.csv_form import cell
from engine.schedules.grid import show
from engine.schedules.messages import WAYS, OrderError

Queue = deque[tuple[int, Action]]  # (place in the rank's row, send or receive)


def check(order: Sequence[Sequence[Action]]) -> None:
    """OrderError: ranks that wait for each other, with an arrow at the message that each is stuck at."""
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions if action.kind in PASSES}
    queues: dict[tuple[int, int], Queue] = {}  # what a rank has issued and not ended, by (rank, peer)
    at = [0] * len(order)
    coming = {action for actions in order for action in actions if action.kind.startswith("recv")}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions) and _needed(actions[at[rank]]) not in coming:
                action = actions[at[rank]]
                if action.kind in MESSAGES:
                    queues.setdefault((rank, rank_of[other_end(action.kind, action.stage)]), deque()).append(
                        (at[rank], action)
                    )
                at[rank] += 1
                moved = True
        for (rank, peer), queue in queues.items():
            other = queues.get((peer, rank))
            while rank < peer and queue and other and _meet(queue[0][1], other[0][1]):
                coming -= {queue.popleft()[1], other.popleft()[1]}
                moved = True
    queues = {pair: queue for pair, queue in queues.items() if queue}
    if queues or any(place < len(actions) for place, actions in zip(at, order, strict=True)):
        raise OrderError(_explain(order, at, queues, rank_of))


def _needed(action: Action) -> Action | None:
    """The receive that a pass waits for, if its rank has one."""
    way = WAYS.get(action.kind)
    return Action(f"recv_{way}", action.stage, action.microbatch) if way else None


def _meet(one: Action, two: Action) -> bool:
    """Whether two messages are the ends of the same one."""
    send, recv = (one, two) if one.kind.startswith("send") else (two, one)
    same = recv.kind == send.kind.replace("send", "recv") and recv.microbatch == send.microbatch
    return same and recv.stage == other_end(send.kind, send.stage)


def _explain(
    order: Sequence[Sequence[Action]], at: list[int], queues: dict[tuple[int, int], Queue], rank_of: dict[int, int]
) -> str:
    """Words for ranks that wait for each other, or for one whose message is not taken or sent by the other."""
    waits: dict[int, tuple[int, int]] = {}  # rank -> (the rank that it waits for, the place of what cannot end)
    for (rank, peer), queue in queues.items():
        waits[rank] = (peer, queue[0][0])
    for rank, place in enumerate(at):
        if place < len(order[rank]):
            need = _needed(order[rank][place])
            peer = rank_of[other_end(need.kind, need.stage)]
            queue = queues.get((rank, peer))
            waits[rank] = (peer, queue[0][0] if queue else place)
    chain = [min(waits)]
    while (peer := waits[chain[-1]][0]) in waits and peer not in chain:
        chain.append(peer)
    if peer in chain:
        chain = chain[chain.index(peer) :]
        words = f"these ranks wait for each other: {' -> '.join(map(str, [*chain, peer]))}"
    else:
        chain = chain[-1:]
        words = f"rank {chain[0]} waits for rank {peer}, which has ended"
    rows = [list(map(cell, actions)) for actions in order]
    return f"{words}\n{show(rows, {rank: waits[rank][1] for rank in chain})}"
