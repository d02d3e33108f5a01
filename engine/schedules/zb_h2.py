"""ZB-H2 (Qi et al. 2023, arXiv:2401.10241, section 2.2): more forwards to begin with, and no rank ever waits.

The lower part of its figure 3. In turn x a rank does forward x, the input's half of backward x - 2(P-1-rank) and the
weights' half of backward x - 2(P-1), as far as there are such. Up to min(M, 2P-1) activations in flight, about twice
1F1B's. With F = I = W and M >= 2P-1 every rank works without a break from its first op to its last, so the step
takes M(F+I+W) + (P-1)F; what is left is the ramp, which the paper hides too, by letting ranks start their next step
apart. One stage a rank. PyTorch has no such schedule.
"""

from engine.schedules import Action


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    return [_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    return None


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    late = {"forward": 0, "backward_input": 2 * (num_ranks - 1 - rank), "backward_weight": 2 * (num_ranks - 1)}
    turns = range(num_microbatches + 2 * (num_ranks - 1))
    there = range(num_microbatches)
    return [Action(kind, rank, x - behind) for x in turns for kind, behind in late.items() if x - behind in there]
