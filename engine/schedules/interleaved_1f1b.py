"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): 1F1B over several stages a rank, in a loop.

Microbatches go in rounds of M / R, with R = max(1, M // P) rounds: a rank takes a round through its first stage, then
through its next. With P dividing M the idle time is (P-1)(F+B) of *one stage*, so V stages a rank make it V times
smaller, for V times the messages. M must be a multiple of R: torch's ScheduleInterleaved1F1B (Megatron: of P).
"""

from engine.schedules import Action
from engine.schedules.row import in_turn
from engine.schedules.rules import Requirement, insist, num_rounds, whole_rounds


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    insist(broken_rule(num_ranks, stages_per_rank, num_microbatches))
    out = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forward = in_rounds("forward", stages, num_ranks, num_microbatches)
        backward = in_rounds("backward", stages[::-1], num_ranks, num_microbatches)
        # Two for each rank below: an activation on its way down, and a gradient on its way up.
        first = fill(stages_per_rank, num_ranks, num_microbatches) + 2 * (num_ranks - 1 - rank)
        both, fills = forward + backward, min(first, len(forward))
        turns = in_turn(range(fills, len(forward)), range(len(forward), len(both)))
        out.append(forward[:fills] + [both[i] for i in turns.tolist()])
    return out


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    return whole_rounds("interleaved_1f1b", num_ranks, num_microbatches)


def in_rounds(kind: str, stages: range, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Round by round, and in each round stage by stage, one action a microbatch."""
    size = round_size(num_ranks, num_microbatches)
    starts = range(0, num_microbatches, size)
    return [Action(kind, stage, m) for start in starts for stage in stages for m in range(start, start + size)]


def fill(stages_per_rank: int, num_ranks: int, num_microbatches: int) -> int:
    """Forwards that the last rank does before its first backward, less one: a round in all of its stages but one."""
    return (stages_per_rank - 1) * round_size(num_ranks, num_microbatches)


def round_size(num_ranks: int, num_microbatches: int) -> int:
    return num_microbatches // num_rounds(num_ranks, num_microbatches)
