"""A machine's name -> its numbers (`engine.cost.catalogue`); this machine's are those of its calibration."""

from __future__ import annotations

from engine.asking.rules import SpecError, closest
from engine.cost import calibration
from engine.cost.catalogue import MACHINES as MACHINES
from engine.cost.catalogue import gpus_of_calibration, of_calibration
from engine.cost.hardware import EVERYBODY as EVERYBODY
from engine.cost.hardware import Link as Link
from engine.cost.hardware import Machine as Machine


def machine(name: str, device: str = "cpu") -> Machine:
    """On the `device` `cuda` the machine `local` is its GPUs, if they were measured. Raises SpecError for a name that
    is not known, and for a calibration that was asked for and does not hold."""
    if name not in MACHINES:
        raise SpecError("unknown_name", "machine", name, suggest=closest(name, MACHINES))
    if name != "local":
        return MACHINES[name]
    made = calibration.find().calibration
    return (gpus_of_calibration(made) if device == "cuda" else None) or of_calibration(made)


def shares_cores(name: str) -> bool:
    """Whether a machine's ranks are processes that share its cores, whatever its calibration says."""
    return name in MACHINES and MACHINES[name].cores > 0
