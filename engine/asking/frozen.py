"""Text -> the layers that are not trained, as in fine-tuning: they keep their weights, and have no gradients.

Through a frozen layer the gradient of what came in goes back to layers before it that are trained. Where there are none
nothing goes back: autograd keeps nothing of those layers, and nobody waits for a gradient of their output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.asking.rules import SpecError
from engine.model.shapes import Layer
from engine.spec import Spec

SCHEDULES = ("gpipe", "1f1b")  # one stage a device, every backward whole


def names(spec: Spec) -> tuple[str, ...]:
    return tuple(name.strip() for name in spec.freeze.split(",")) if spec.freeze else ()


def mark(spec: Spec, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers, of which those that are frozen know it. SpecError where one is not there, or none is left."""
    frozen = names(spec)
    if spec.freeze is None:
        return layers
    known = [layer.name for layer in layers]
    if not set(frozen) < set(known):
        wanted = [name for name in known if name in frozen] or known
        suggest = [",".join(wanted[: len(known) - 1])] if len(known) > 1 else []
        raise SpecError("bad_freeze", "freeze", spec.freeze, suggest=suggest, layers=", ".join(known))
    first = next(i for i, name in enumerate(known) if name not in frozen)
    return tuple(replace(layer, frozen=layer.name in frozen, stops=i < first) for i, layer in enumerate(layers))


def check(spec: Spec) -> None:
    """Rules that join it with other settings, of a spec whose defaults are filled in."""
    if spec.freeze is None:
        return
    for other, without in (("leave_out", (None,)), ("compress", (None, "none")), ("compile_stage", (None, "none"))):
        if getattr(spec, other) not in without:
            raise SpecError("exclusive", "freeze", spec.freeze, other=other.replace("_", "-"))
    if spec.schedule not in (None, *SCHEDULES):
        raise SpecError("schedule_of_frozen", "schedule", spec.schedule, suggest=SCHEDULES)
    if spec.schedule_file is not None:
        raise SpecError("exclusive", "freeze", spec.freeze, other="schedule-file")
    if spec.receives == "early":
        raise SpecError("exclusive", "freeze", spec.freeze, other="receives early")


def trained(layers: Iterable[Layer]) -> list[Layer]:
    return [layer for layer in layers if not layer.frozen]


def goes_back(layers: Sequence[Layer]) -> bool:
    """Whether the gradient of what the last of these layers puts out is asked for."""
    return not layers[-1].stops
