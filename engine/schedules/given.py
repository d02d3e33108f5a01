"""A pipeline's order that a person gives as CSV -> the same as of a schedule by name: order, placement, pipelines.

A file of passes alone gets its messages here, as torch gives them (`messages.add_early`); one with messages keeps its
own. Either way every rank must come to its end, and each link must carry its messages in one order: `check` walks
through what the ranks do, where a send never waits (gloo; `rendezvous` asks the same where it does).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine import schedules
from engine.schedules import MESSAGES, Action, csv_form, messages, other_end, ranks_of, rendezvous
from engine.schedules.csv_form import OF_A_STAGE, cell
from engine.schedules.grid import show
from engine.schedules.messages import WAYS, OrderError

if TYPE_CHECKING:
    from engine.spec import Spec


class Layout(NamedTuple):
    """Who does what: the order of every rank, the stages of every rank, the stages that a microbatch goes through."""

    order: list[list[Action]]
    placement: list[tuple[int, ...]]
    pipelines: list[range]
    has_messages: bool = False

    @property
    def num_microbatches(self) -> int:
        return 1 + max(action.microbatch for actions in self.order for action in actions)

    @property
    def stages_per_rank(self) -> int | None:
        """None where ranks have different numbers of them."""
        numbers = {len(stages) for stages in self.placement}
        return numbers.pop() if len(numbers) == 1 else None


def layout(spec: Spec, ranks: int) -> Layout:
    """Of the file where one is given, else of the schedule on so many ranks."""
    if spec.schedule_file is not None:
        return read(spec.schedule_file)
    shape = (spec.schedule, ranks, spec.stages_per_rank)
    order = schedules.order(spec.schedule, ranks, spec.microbatches, spec.stages_per_rank)
    return Layout(order, schedules.placement(*shape), schedules.pipelines(*shape))


@functools.lru_cache(maxsize=16)
def read(text: str) -> Layout:
    """ScheduleFileError: what is not a schedule. OrderError: one in which ranks wait for each other for ever, or which
    does not train a model. What only a sharded stage does (UNSHARD ...) is left out."""
    parsed = csv_form.parse_order(text)
    order = [[action for action in actions if action.kind not in OF_A_STAGE] for actions in parsed]
    if not any(action.kind == "backward" or action.kind == "backward_weight" for row in order for action in row):
        raise OrderError("it has no backward, and a training needs one")
    pipelines = messages.pipelines_of(order)
    if len(pipelines) > 1:
        raise OrderError(f"its stages are {len(pipelines)} pipelines that share no microbatch, and one is trained")
    placement = [tuple(sorted({action.stage for action in actions})) for actions in order]
    found = Layout(order, placement, pipelines, any(a.kind in MESSAGES for actions in order for a in actions))
    check(lowered(found))
    return found


def lowered(found: Layout) -> list[list[Action]]:
    """With messages, as torch runs it."""
    return found.order if found.has_messages else messages.add_early(found.order, found.pipelines)


def blocked(text: str) -> str | None:
    """Where the ranks would stand still if each send waited for its receive (NCCL), or None."""
    try:
        rendezvous.check(lowered(read(text)))
    except OrderError as error:
        return str(error)
    return None


def check(order: Sequence[Sequence[Action]]) -> None:
    """OrderError: a message that its link does not bring in this order, or ranks that wait for each other."""
    rank_of = ranks_of([{action.stage for action in actions} for actions in order])
    _check_links(order, rank_of)
    last = max(rank_of)
    at, done = [0] * len(order), set()  # done: passes, and messages that were sent
    received: list[set[Action]] = [set() for _ in order]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            mine = received[rank]
            while at[rank] < len(actions) and _is_ready(actions[at[rank]], rank, rank_of, last, mine, done):
                action = actions[at[rank]]._replace(overlaps_next=False)
                (mine if action.kind.startswith("recv") else done).add(action)
                at[rank], moved = at[rank] + 1, True
    standing = {rank: place for rank, place in enumerate(at) if place < len(order[rank])}
    if standing:
        raise OrderError(f"these ranks wait for each other, or for what never comes:\n{_show(order, standing)}")


def _is_ready(
    action: Action, rank: int, rank_of: dict[int, int], last: int, received: set[Action], done: set[Action]
) -> bool:
    kind, stage, microbatch, _ = action
    if kind.startswith("recv"):
        return True  # it is issued, and waited for by what needs it
    if kind.startswith("send"):
        made = ("forward",) if kind == "send_forward" else ("backward", "backward_input")
        return any(Action(of, stage, microbatch) in done for of in made)
    if kind not in WAYS or stage == (0 if WAYS[kind] == "forward" else last):
        return True  # a weights' half, or the end of the pipeline: it needs what its own rank has
    source = stage + (-1 if WAYS[kind] == "forward" else 1)
    if rank_of[source] == rank:
        made = ("forward",) if kind == "forward" else ("backward", "backward_input")
        return any(Action(of, source, microbatch) in done for of in made)
    message = Action(f"recv_{WAYS[kind]}", stage, microbatch)
    return message in received and Action(f"send_{WAYS[kind]}", source, microbatch) in done


def _check_links(order: Sequence[Sequence[Action]], rank_of: dict[int, int]) -> None:
    """The k-th receive of a rank from another takes the k-th that this one sends it."""
    links: dict[tuple[int, int], tuple[list, list]] = {}  # (source, target): sends, receives; each with its place
    for rank, actions in enumerate(order):
        for place, action in enumerate(actions):
            if action.kind in MESSAGES:
                peer, sends = rank_of[other_end(action.kind, action.stage)], action.kind.startswith("send")
                pair = links.setdefault((rank, peer) if sends else (peer, rank), ([], []))
                pair[0 if sends else 1].append((place, action))
    for (source, target), (sent, taken) in links.items():
        for k in range(max(len(sent), len(taken))):
            arrows = {rank: ends[k][0] for rank, ends in ((source, sent), (target, taken)) if k < len(ends)}
            if len(arrows) < 2:
                raise OrderError(f"a message without its other end:\n{_show(order, arrows)}")
            kind, stage, microbatch, _ = sent[k][1]
            if taken[k][1][:3] != (kind.replace("send", "recv"), other_end(kind, stage), microbatch):
                raise OrderError(f"rank {target} would take one message for another:\n{_show(order, arrows)}")


def _show(order: Sequence[Sequence[Action]], arrows: dict[int, int]) -> str:
    return show([list(map(cell, actions)) for actions in order], arrows)
