"""DualPipeV (DeepSeek's DualPipe cut in half, github.com/deepseek-ai/DualPipe): a forward and a backward run as one.

In the steady state a rank overlaps the forward of one of its two stages with the backward of the other, so that the
communication inside one (an expert layer's all-to-all) hides behind the compute of the other. Two stages a rank,
placed in a V; at least as many microbatches as stages, 2P. Idle (P-1)(F&B + B - 3W), where F&B is a pair's time.
torch's ScheduleDualPipeV.
"""

from engine.schedules import Action, numbered
from engine.schedules.rules import Requirement, at_least_the_stages, insist


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    insist(broken_rule(num_ranks, stages_per_rank, num_microbatches))
    return [
        numbered.actions(steps(rank, num_ranks, num_microbatches), (rank, 2 * num_ranks - 1 - rank))
        for rank in range(num_ranks)
    ]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Requirement | None:
    return at_least_the_stages("dualpipev", 2 * num_ranks, num_microbatches)


def steps(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """The eight steps of DeepSeek's own code, in order."""
    below = num_ranks - 1 - rank
    pairs = ["F0&B1", "F1&B0"] * (num_microbatches - 2 * num_ranks + rank + 1)
    if below == 0:
        pairs = ["F0", "B1", *pairs[1:]]  # apart, since nobody is below: its gradient is there at once
    # From the middle of the last backwards on, weights' halves wait, so that gradients travel sooner.
    last = ["B1", "B0"] * (rank + 1)
    halves = [word.replace("B", "I") for word in last]
    last = last[: rank + 1] + halves[rank + 1 :]
    return (
        ["F0"] * (2 * below)
        + ["F0", "F1"] * (rank + 1)
        + ["I1", "W", "F1"] * below
        + pairs
        + ["B1", "F1&B0"] * below
        + last
        + ["W", "I0"] * below
        + ["W"] * (rank + 1)
    )
