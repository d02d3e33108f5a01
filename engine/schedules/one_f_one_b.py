"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473): fill, then one forward and one backward in turn.

At most min(M, P - stage) activations in flight; the makespan is GPipe's.
"""

from engine.schedules import Action


def order(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    forward = [Action("forward", m) for m in range(num_microbatches)]
    backward = [Action("backward", m) for m in range(num_microbatches)]
    return [_stage(min(num_microbatches, num_stages - stage), forward, backward) for stage in range(num_stages)]


def _stage(warmup: int, forward: list[Action], backward: list[Action]) -> list[Action]:
    in_turn = zip(backward, forward[warmup:], strict=False)
    steady = [action for pair in in_turn for action in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]
