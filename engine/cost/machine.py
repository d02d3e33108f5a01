"""A machine's name -> its numbers (`engine.cost.hardware`), from the catalogue."""

from __future__ import annotations

from engine.cost.catalogue import MACHINES as MACHINES
from engine.cost.hardware import EVERYBODY as EVERYBODY
from engine.cost.hardware import Link as Link
from engine.cost.hardware import Machine as Machine
from engine.rules import SpecError, closest


def machine(name: str) -> Machine:
    if name not in MACHINES:
        raise SpecError("unknown_name", "machine", name, suggest=closest(name, MACHINES))
    return MACHINES[name]
