"""Degrees as asked for -> those of every axis, which together make the number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.asking.rules import SpecError
from engine.asking.settings import MODE_SETTINGS
from engine.model.presets import family
from engine.plan import AXES
from engine.spec import MAX_DEVICES, Spec

FIRST_TO_GROW = ("fsdp", "dp", "tp", "pp")  # which axis is proposed for devices that no degree speaks for
WITH_EXPERTS = ("ep", "dp")  # the same, where there are some


def told(degrees: dict[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


def splits(devices: int, like: dict[str, int]) -> Iterator[dict[str, int]]:
    """Degrees of the same axes that make so many devices, those first that are most like the given ones."""

    def far(degrees: tuple[int, ...]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(degrees, like.values(), strict=True))

    return (dict(zip(like, degrees, strict=True)) for degrees in sorted(_factors(devices, len(like)), key=far))


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in (d for d in range(1, number + 1) if number % d == 0):
        yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def fill_degrees(spec: Spec) -> Spec:
    """The degrees of a mesh of any axes. What is left over goes to the one axis that is left out; where several are,
    it is asked for. Without any degree: pairs of tensor ranks, and shards over the pairs; or pairs that share out the
    experts, and replicas."""
    to_grow, (pair, rest_of) = FIRST_TO_GROW, ("tp", "fsdp")
    if family(spec.model) == "moe":
        to_grow, (pair, rest_of) = WITH_EXPERTS, ("ep", "dp")
    axes = [axis for axis in AXES if axis in MODE_SETTINGS[spec.mode]]
    given = {axis: getattr(spec, axis) for axis in axes if getattr(spec, axis) is not None}
    if not given:
        pairs = spec.devices > 2 and spec.devices % 2 == 0
        given = {rest_of: spec.devices // 2, pair: 2} if pairs else {to_grow[0]: spec.devices}
    product, text = math.prod(given.values()), told(given)
    free = [axis for axis in to_grow if axis not in given]
    rest, beyond = divmod(spec.devices, product)
    if beyond or (rest > 1 and not free):
        good = sorted({product, product * max(1, round(spec.devices / product))})
        good = [devices for devices in good if devices <= MAX_DEVICES]
        raise SpecError("degrees_product", "devices", spec.devices, suggest=good, degrees=text)
    if rest > 1 and len(free) > 1:
        names = {"degrees": text, "rest": rest, "devices": spec.devices}
        raise SpecError("degrees_left", free[0], None, suggest=[rest], **names)
    filled = dict.fromkeys(axes, 1) | given | (dict.fromkeys(free, rest) if rest > 1 else {})
    return spec.with_(**filled)
