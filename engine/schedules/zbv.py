"""ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): zero bubble with 1F1B's memory, on stages placed in a V.

A rank has a stage on the way down and one on the way up, so the last stage, where the loss is, lies on rank 0 beside
the first. Exactly two stages a rank. With F = I = W of a stage and M >= 2P-1, no rank waits between its first op and
its last. Any number of microbatches: fewer than 2P-1 run in the order of 2P-1, without those that are not there, as in
torch's ScheduleZBVZeroBubble.
"""

from engine.schedules import Action, numbered


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    count = max(num_microbatches, 2 * num_ranks - 1)
    out = []
    for rank in range(num_ranks):
        actions = numbered.actions(_steps(rank, num_ranks, count), (rank, 2 * num_ranks - 1 - rank))
        out.append([action for action in actions if action.microbatch < num_microbatches])
    return out


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    return None


def _steps(rank: int, num_ranks: int, count: int) -> list[str]:
    below = num_ranks - rank
    steps = ["F0"] * (2 * below - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * below
    forwards_left = count - steps.count("F0")
    for i in range(count - num_ranks):
        steps += ["F0"] * (i < forwards_left) + ["I0", "W0", "F1", "I1", "W1"]
    return steps + ["I0", "I1"] * rank + ["I0", "W0"] * below + ["W1"] * rank + ["W0"] * rank
