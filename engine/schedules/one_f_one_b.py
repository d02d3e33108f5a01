"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473): fill, then one forward and one backward in turn.

At most min(M, P - stage) activations in flight; the makespan is GPipe's. One stage a rank. torch's Schedule1F1B wants
as many microbatches as stages; the order itself is sound with fewer.
"""

import numpy as np

from engine.schedules.row import Row, forward_and_backward, in_turn
from engine.schedules.rules import Requirement, at_least_the_stages


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[Row]:
    return [_rank(rank, min(num_microbatches, num_ranks - rank), num_microbatches) for rank in range(num_ranks)]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    return at_least_the_stages("1f1b", num_ranks, num_microbatches)


def _rank(stage: int, warmup: int, num_microbatches: int) -> Row:
    forward, backward = range(num_microbatches), range(num_microbatches, 2 * num_microbatches)
    places = np.concatenate([forward[:warmup], in_turn(backward, forward[warmup:])])
    return forward_and_backward(stage, num_microbatches, places)
