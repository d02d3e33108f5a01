"""A schedule's name, ranks, microbatches, stages a rank -> the order in which every rank computes. One file a schedule.

Each file has `order`, a pure function, and what the schedule asks of its numbers in `broken_rule`. Adding a schedule is
one file here and one line in TABLE. `engine.schedules.messages` adds sends and receives, `engine.schedules.csv_form`
reads and writes orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from engine.schedules.rules import Requirement, insist, room, stages_a_rank

LOOP, V_SHAPE = "loop", "v"


class Shape(NamedTuple):
    """Where a schedule is written, how it places stages on ranks, and how many a rank must have (None: any number)."""

    file: str
    placement: str
    stages_per_rank: int | None


TABLE = {
    "gpipe": Shape("gpipe", LOOP, 1),
    "1f1b": Shape("one_f_one_b", LOOP, 1),
    "looped_bfs": Shape("looped_bfs", LOOP, None),
    "interleaved_1f1b": Shape("interleaved_1f1b", LOOP, None),
    "interleaved_zero_bubble": Shape("interleaved_zero_bubble", LOOP, None),
    "zb_h2": Shape("zb_h2", LOOP, 1),
    "zb_2p": Shape("zb_2p", LOOP, 1),
    "zbv": Shape("zbv", V_SHAPE, 2),
    "dualpipev": Shape("dualpipev", V_SHAPE, 2),
    "dualpipe": Shape("dualpipe", V_SHAPE, 2),
}

# What a rank computes in an order; `backward_input` and `backward_weight` are the halves of `backward`.
PASSES = ("forward", "backward", "backward_input", "backward_weight")
MESSAGES = ("send_forward", "recv_forward", "send_backward", "recv_backward")


class Action(NamedTuple):
    """One thing that a rank does for one microbatch of one stage: one of PASSES, or of what a later step adds.

    With `overlaps_next` it runs as one with the next action of its rank (torch's OVERLAP_F_B): what either needs must
    be there before both, and what they make leaves after both.
    """

    kind: str
    stage: int
    microbatch: int | None
    overlaps_next: bool = False


def order(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[Sequence[Action]]:
    """One row of actions a rank. Pure: no processes, no tensors, no times.

    ValueError where the numbers break a rule without which there is no order. `check` asks for more: for all that
    PyTorch's own schedule insists on.
    """
    insist(_broken_stages(schedule, stages_per_rank))
    return _module(schedule).order(num_ranks, num_microbatches, stages_per_rank)


def check(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    """The first of the schedule's own rules, and of any plan's, that these numbers break, with the nearest values that
    keep it; or None."""
    broken = _broken_stages(schedule, stages_per_rank)
    broken = broken or _module(schedule).broken_rule(num_ranks, stages_per_rank, num_microbatches)
    return broken or room(num_ranks * stages_per_rank, num_microbatches)


def placement(schedule: str, num_ranks: int, stages_per_rank: int = 1) -> list[tuple[int, ...]]:
    """The stages of each rank. Loop: stage s on rank s % P. V: down the ranks and up again, r and 2P-1-r on rank r."""
    insist(_broken_stages(schedule, stages_per_rank))
    if TABLE[schedule].placement == V_SHAPE:
        return [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return [tuple(range(rank, num_ranks * stages_per_rank, num_ranks)) for rank in range(num_ranks)]


def pipelines(schedule: str, num_ranks: int, stages_per_rank: int = 1) -> list[range]:
    """The stages that a microbatch goes through, first to last. All of them; in DualPipe one half or the other, which
    are two copies of one model: stage P + k has the layers of stage k."""
    insist(_broken_stages(schedule, stages_per_rank))
    if schedule == "dualpipe":
        return [range(num_ranks), range(num_ranks, 2 * num_ranks)]
    return [range(num_ranks * stages_per_rank)]


def other_end(message: str, stage: int) -> int:
    """The stage that a stage sends to or receives from: forward goes up by one, backward down."""
    return stage + (1 if message in ("send_forward", "recv_backward") else -1)


def ranks_of(stages_of_ranks: Sequence[Sequence[int]]) -> dict[int, int]:
    """The rank of each stage, from the stages of each rank."""
    return {stage: rank for rank, stages in enumerate(stages_of_ranks) for stage in stages}


def _broken_stages(schedule: str, stages_per_rank: int) -> Requirement | None:
    wanted = TABLE[schedule].stages_per_rank
    return None if wanted in (None, stages_per_rank) else stages_a_rank(schedule, stages_per_rank, wanted)


def _module(schedule: str):
    return import_module(f"engine.schedules.{TABLE[schedule].file}")
