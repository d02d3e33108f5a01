"""A schedule's name, stages and microbatches -> the order in which every stage computes. One file a schedule."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

FILES = {"gpipe": "gpipe", "1f1b": "one_f_one_b"}


class Action(NamedTuple):
    kind: str  # forward, backward
    microbatch: int


def order(schedule: str, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """One list of actions a stage. Pure: no processes, no tensors, no times."""
    return import_module(f"engine.schedules.{FILES[schedule]}").order(num_stages, num_microbatches)
