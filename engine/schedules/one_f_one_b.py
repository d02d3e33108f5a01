"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473): fill, then one forward and one backward in turn.

At most min(M, P - stage) activations in flight; the makespan is GPipe's. One stage a rank. torch's Schedule1F1B wants
as many microbatches as stages; the order itself is sound with fewer.
"""

from engine.schedules import Action
from engine.schedules.rules import Requirement, at_least_the_stages


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    return [_rank(rank, min(num_microbatches, num_ranks - rank), num_microbatches) for rank in range(num_ranks)]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    return at_least_the_stages("1f1b", num_ranks, num_microbatches)


def _rank(stage: int, warmup: int, num_microbatches: int) -> list[Action]:
    forward, backward = ([Action(k, stage, m) for m in range(num_microbatches)] for k in ("forward", "backward"))
    return forward[:warmup] + in_turn(backward, forward[warmup:])


def in_turn(first: list[Action], second: list[Action]) -> list[Action]:
    """One of each until one of them is used up, then the rest of the other."""
    pairs = list(zip(first, second, strict=False))
    return [action for pair in pairs for action in pair] + first[len(pairs) :] + second[len(pairs) :]
