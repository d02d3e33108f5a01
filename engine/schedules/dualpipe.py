"""DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1): two copies of one pipeline, run against each other.

Rank r has stage r of the copy that starts at rank 0, and stage P-1-r of the one that starts at the last rank; half of
the microbatches go each way. So a forward of one copy can overlap a backward of the other from the first rank to the
last. Stage P + k is stage k of the second copy, which therefore lies in a V; it takes microbatches M/2 to M-1. P must
be even, M even and at least 2P. Idle (P/2-1)(F&B + B - 3W), with twice the parameters. PyTorch has no such schedule.
"""

from engine.schedules import Action, numbered
from engine.schedules.dualpipev import steps
from engine.schedules.rules import Requirement, insist, two_ways


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    insist(broken_rule(num_ranks, stages_per_rank, num_microbatches))
    half = num_microbatches // 2
    out = []
    for rank in range(num_ranks):
        # A rank does what DualPipeV does on half the ranks; the second half of them is its mirror image.
        stages, first = (rank, 2 * num_ranks - 1 - rank), (0, half)
        if rank >= num_ranks // 2:
            stages, first = stages[::-1], first[::-1]
        words = steps(min(rank, num_ranks - 1 - rank), num_ranks // 2, half)
        out.append(numbered.actions(words, stages, first))
    return out


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    return two_ways("dualpipe", num_ranks, num_microbatches)
