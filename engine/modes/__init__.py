"""A mode's name -> its lesson, its plan and its run. Adding a parallelism is one folder here and one line in MODES.

Each folder has the same three files: `__init__.py` (the lesson), `plan.py` (what it will do, without torch) and
`run.py` (how PyTorch does it; the only one that imports torch).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from engine.asking.masked import counting
from engine.graph.reduced import in_fp32
from engine.lessons import Lesson as Lesson
from engine.lessons import Step as Step
from engine.spec import MODES as MODES

if TYPE_CHECKING:
    from engine.job import Job
    from engine.plan import Plan

FIRST_STEADY_STEP = 2  # what a mode does differently at first (DDP finds its buckets), it has done by then


def lesson(mode: str) -> Lesson:
    return import_module(f"engine.modes.{mode}").LESSON


def plan(job: Job, step: int | None = None) -> Plan:
    """What every rank does in optimizer step `step` (from 0); in the last of a period, if none is given.

    A mode whose steps are not all alike, once steady, gives `period(job)`: after so many they are as they were.
    """
    step = last_of_period(job) if step is None else step
    made = import_module(f"engine.modes.{job.spec.mode}.plan").plan(job, first_alike(job, step))
    return counting(job, in_fp32(job, made))


def last_of_period(job: Job) -> int:
    """The first such step that is steady."""
    return -(-(FIRST_STEADY_STEP + 1) // period(job)) * period(job) - 1


def first_alike(job: Job, step: int) -> int:
    """The first step with the plan of this one."""
    return step if step <= FIRST_STEADY_STEP else FIRST_STEADY_STEP + (step - FIRST_STEADY_STEP) % period(job)


def period(job: Job) -> int:
    """After so many steps a mode's steps are as they were; the last of a period is the one that is predicted."""
    module = import_module(f"engine.modes.{job.spec.mode}.plan")
    return module.period(job) if hasattr(module, "period") else 1


def run(mode: str) -> ModuleType:
    """The mode's `run` module; imports torch."""
    return import_module(f"engine.modes.{mode}.run")
