"""Looped BFS (breadth-first pipeline, Lamy-Poirier 2022, arXiv:2211.05953): every microbatch of a stage, then the next.

Stages are placed in a loop, any number a rank. All V * M activations are in flight when the first backward begins. As
in torch's ScheduleLoopedBFS, backwards take microbatches from the last to the first.
"""

from engine.schedules import Action


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    return [_rank(range(rank, num_ranks * stages_per_rank, num_ranks), num_microbatches) for rank in range(num_ranks)]


def broken_rule(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    return None


def _rank(stages: range, num_microbatches: int) -> list[Action]:
    forward = [Action("forward", stage, m) for stage in stages for m in range(num_microbatches)]
    return forward + [action._replace(kind="backward") for action in reversed(forward)]
