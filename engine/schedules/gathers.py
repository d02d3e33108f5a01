"""An order of computing -> the same with the actions of sharded stages, where torch's runtime of schedules has them.

A stage is gathered (`unshard`) when it is among the next ACTIVE stages that its rank computes with, and given up
(`reshard`) when it no longer is; its gradients are reduced (`reduce_grad`) after its last backward. These are the rules
of `_add_unshard_reshard` and `_add_reduce_grad` in torch.distributed.pipelining.schedules. Its GPipe and 1F1B, which
have one stage a rank, do not go through that runtime: there each layer is gathered by its first forward. Messages that
are in the order already stay where they are. Under Megatron-LM's distributed optimizer a stage that was gathered stays
so until the step ends (`kept`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from engine.schedules import MESSAGES, Action
from engine.schedules.messages import groups

ACTIVE = 3  # stages that a rank has gathered at a time: one for forward, one for backward, one ahead
LAST = ("backward", "backward_weight")  # the last pass of a microbatch through a stage


def add_gathers(order: Sequence[Sequence[Action]], *, kept: bool = False) -> list[list[Action]]:
    return [list(_with_gathers(actions, kept=kept)) for actions in order]


def _with_gathers(actions: Sequence[Action], *, kept: bool) -> Iterator[Action]:
    passes = [group for _, group in groups(actions)]
    places: dict[int, deque[int]] = {}  # of each stage, where its passes are that are still to come
    last: dict[int, int] = {}  # of each stage, its last backward
    for i, group in enumerate(passes):
        for action in () if group[0].kind in MESSAGES else group:
            places.setdefault(action.stage, deque()).append(i)
            last[action.stage] = i if action.kind in LAST else last.get(action.stage, -1)
    gathered: list[int] = []
    for i, group in enumerate(passes):
        if group[0].kind in MESSAGES:
            yield from group
            continue
        wanted = _next_stages(places)
        for stage in [stage for stage in gathered if stage not in wanted and not kept]:
            gathered.remove(stage)
            yield Action("reshard", stage, None)
        for stage in [stage for stage in wanted if stage not in gathered]:
            gathered.append(stage)
            yield Action("unshard", stage, None)
        yield from group
        for action in group:
            places[action.stage].popleft()
        yield from (Action("reduce_grad", a.stage, None) for a in group if a.kind in LAST and last[a.stage] == i)
    yield from (Action("reshard", stage, None) for stage in gathered if not kept)


def _next_stages(places: dict[int, deque[int]]) -> list[int]:
    """The stages that come next, until there are enough; of two that overlap, both."""
    following = sorted((ahead[0], stage) for stage, ahead in places.items() if ahead)
    if len(following) > ACTIVE:
        following = [pair for pair in following if pair[0] <= following[ACTIVE - 1][0]]
    return [stage for _, stage in following]
