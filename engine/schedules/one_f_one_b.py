"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473): fill, then one forward and one backward in turn.

At most min(M, P - stage) activations in flight; the makespan is GPipe's.
"""

from engine.schedules import Action


def order(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    return [_stage(min(num_microbatches, num_stages - stage), num_microbatches) for stage in range(num_stages)]


def _stage(warmup: int, num_microbatches: int) -> list[Action]:
    actions = [Action("forward", m) for m in range(warmup)]
    for m in range(num_microbatches - warmup):
        actions += [Action("backward", m), Action("forward", warmup + m)]
    return actions + [Action("backward", m) for m in range(num_microbatches - warmup, num_microbatches)]
