"""GPipe (Huang et al. 2019, arXiv:1811.06965): every forward, then every backward. M activations in flight."""

from engine.schedules import Action


def order(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    forward = [Action("forward", m) for m in range(num_microbatches)]
    backward = [Action("backward", m) for m in range(num_microbatches)]
    return [forward + backward for _ in range(num_stages)]
