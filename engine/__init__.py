"""Lockstep's engine: what a training on many devices will do (`simulate`), and that training for real (`start`).

    >>> import engine
    >>> engine.simulate(engine.Spec(mode="pipeline", devices=4, machine="unit")).step_time
    33.0
    >>> handle = engine.start(engine.Spec(mode="ddp", devices=2, steps=5))
    >>> handle.result()["parity"]["ok"]
    True

Nothing here imports torch; the processes that train do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.asking.rules import SpecError

# Before `simulate` below: the first import of the module engine.simulate binds that name here, to the module.
from engine.predict import Prediction, predict
from engine.spec import Spec

if TYPE_CHECKING:
    from engine.launch import Handle

__all__ = ["Spec", "SpecError", "simulate", "start"]


def simulate(spec: Spec) -> Prediction:
    """Predict one step. `.summary()` has the numbers, `.timeline` every op of every rank."""
    return predict(spec)


def start(spec: Spec, **options: Any) -> Handle:
    """Train for real, in processes of their own; returns at once. The handle has `poll()`, `stop()`, `result()`."""
    from engine.launch import start

    return start(spec, **options)
