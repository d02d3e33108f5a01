"""GPipe (Huang et al. 2019, arXiv:1811.06965): every forward, then every backward. M activations in flight.

One stage a rank, any number of microbatches. Idle (P-1)(F+B) on every rank.
"""

from engine.schedules.row import Row, forward_and_backward


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[Row]:
    return [forward_and_backward(rank, num_microbatches, slice(None)) for rank in range(num_ranks)]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    return None
