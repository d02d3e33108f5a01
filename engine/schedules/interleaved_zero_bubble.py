"""Interleaved zero bubble, ZB1P (Qi et al. 2023, arXiv:2401.10241): interleaved 1F1B, its backward cut in two halves.

Only the gradient of the input is on the way of others; that of the weights waits, `rank` of them at a time, and fills
what would be idle at the end. One stage a rank is ZB-H1 (section 2.1 there): 1F1B's memory, and idle time
(P-1)(F+I-W) in place of (P-1)(F+I+W). Stages in a loop, and microbatches in rounds, as in interleaved 1F1B.
"""

from itertools import zip_longest

from engine.schedules import Action
from engine.schedules.interleaved_1f1b import fill, in_rounds
from engine.schedules.rules import Requirement, insist, whole_rounds


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    insist(broken_rule(num_ranks, stages_per_rank, num_microbatches))
    out = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forward = in_rounds("forward", stages, num_ranks, num_microbatches)
        inputs = in_rounds("backward_input", stages[::-1], num_ranks, num_microbatches)
        weights = [action._replace(kind="backward_weight") for action in inputs]
        first = fill(stages_per_rank, num_ranks, num_microbatches) + num_ranks - 1 - rank
        turns = zip_longest(forward[first:], inputs, [None] * rank + weights)
        out.append(forward[:first] + [action for turn in turns for action in turn if action])
    return out


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    return whole_rounds("interleaved_zero_bubble", num_ranks, num_microbatches)
