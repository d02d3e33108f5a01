"""Lockstep's engine: what a training on many devices will do (`simulate`), and that training for real (`start`).

    >>> import engine
    >>> engine.simulate(engine.Spec(mode="pipeline", devices=4, machine="unit")).step_time
    33.0
    >>> handle = engine.start(engine.Spec(mode="ddp", devices=2, steps=5))
    >>> handle.result()["parity"]["ok"]
    True

Nothing here imports torch; the processes that train do. What is asked for is imported when it is: every command begins
here, before there is anybody to answer Ctrl-C.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.asking.rules import SpecError
    from engine.launch import Handle
    from engine.predict import Prediction
    from engine.spec import Spec

__all__ = ["Spec", "SpecError", "simulate", "start"]
LATER = {"Spec": "engine.spec", "SpecError": "engine.asking.rules"}  # PEP 562


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)


def simulate(spec: Spec) -> Prediction:
    """Predict one step. `.summary()` has the numbers, `.timeline` every op of every rank."""
    from engine.predict import predict

    return predict(spec)


def start(spec: Spec, **options: Any) -> Handle:
    """Train for real, in processes of their own; returns at once. The handle has `poll()`, `stop()`, `result()`."""
    from engine.launch import start

    return start(spec, **options)
