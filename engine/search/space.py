"""Settings that are given -> the layouts that the others leave open: meshes, how each works, orders of its pipeline.

A mesh is a way to write the devices as a product of degrees. A rank goes through its part of a batch in equal pieces:
microbatches of a pipeline, or micro-steps. Stages of a rank: for each length of the longest stage the fewest, since
more of no shorter length only add messages. What breaks a rule among these is refused where it is prepared.

Of models that are only planned, sequences are dealt out over devices (cp) from some length on and as far as published
trainings do, unless it is asked for: a mesh more to bound and to outline for each that has no cp takes its time.
And three settings are no choice, since they cost nothing and save time or memory: attention in one kernel, an
optimizer's state that replicas share, and gradients that ranks of fsdp share beside a pipeline. They are on, unless
given.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from engine import schedules
from engine.asking.settings import (
    MODE_SETTINGS,
    MODEL_AXES,
    MODEL_DEFAULTS,
    SPLIT_BACKWARD,
    default_model,
    planned_only,
)
from engine.cost.machine import Machine
from engine.model.presets import PRESETS, family
from engine.spec import MODES, RECOMPUTE, Spec

AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
ORDER = ("schedule", "stages_per_rank")  # of a pipeline
SEARCHED = ("mode", *AXES, "sequence_parallel", "expert_tp", "recompute", "accumulate", "microbatches", *ORDER)
AS_TODAY = {"flash": True, "share_optimizer": True, "share_gradients": True}
LONG = 8192  # tokens; from so many on, sequences may be dealt out
LEAST_DEALT = 4096  # tokens of a sequence that a rank has, in each published training that dealt them out
NOT_THE_SAME = ("local_sgd",)  # a mode that trains something else than one device would
DEFAULTS = {name: Spec.__dataclass_fields__[name].default for name in SEARCHED}
MOST_MICROSTEPS = Spec.__dataclass_fields__["accumulate"].metadata["high"]

Settings = dict[str, Any]


def base_of(spec: Spec, held: Collection[str]) -> Spec:
    """The spec with what is given, and nothing of what is searched; the model is never searched."""
    spec = spec.with_(model=spec.model or default_model(spec.mode))
    today = AS_TODAY if spec.model in PRESETS else {}
    today = {name: value for name, value in today.items() if name not in held}
    return spec.with_(**today | {name: value for name, value in DEFAULTS.items() if name not in held})


def meshes(spec: Spec, held: Collection[str]) -> Iterator[Settings]:
    """Mode, degrees, whether tensor ranks share tokens too, and whether they have experts whole. A model that can run
    has modes for meshes of one axis and for replicas of shards; of one that is only planned every mesh is one of the
    mode hybrid."""
    modes = [spec.mode] if "mode" in held else ["hybrid"]
    if "mode" not in held and planned_only(spec) is None and not set(held) & set(AXES):
        modes = [mode for mode in MODES if mode not in NOT_THE_SAME and (mode != "single" or spec.devices == 1)]
    most_dealt = _most_dealt(spec)
    for mode in modes:
        free = [axis for axis in _axes(mode, spec.model) if axis not in held and (axis != "cp" or most_dealt > 1)]
        given = {axis: degree for axis in AXES if axis in held and (degree := getattr(spec, axis)) is not None}
        rest, beyond = divmod(spec.devices, math.prod(given.values()))
        if beyond or (not free and (rest > 1 or not given)):  # it says all of it, or is wrong and will be refused
            yield {"mode": mode}
            continue
        for degrees in products(rest, len(free)):
            mesh = dict(zip(free, degrees, strict=True))
            if mesh.get("cp", 1) > most_dealt:
                continue
            several = {axis for axis, degree in (mesh | given).items() if degree > 1}
            if len(modes) > 1 and (len(several) < 2 or (mode == "hybrid" and several == {"dp", "fsdp"})):
                continue  # it is a mode by its own name
            beside_tp = {"sequence_parallel": True} | ({"expert_tp": 1} if family(spec.model) == "moe" else {})
            choices = [
                ({}, {name: value}) if _has_choice(name, mode, held, "tp" in several) else ({},)
                for name, value in beside_tp.items()
            ]
            for one in itertools.product(*choices):
                yield {"mode": mode} | mesh | functools.reduce(operator.or_, one)


def _most_dealt(spec: Spec) -> float:
    """Over how many ranks its sequences may be dealt out without being asked for."""
    if planned_only(spec) is None:
        return math.inf
    tokens = spec.context or MODEL_DEFAULTS[spec.model]["context"]
    return tokens // LEAST_DEALT if tokens >= LONG else 1


def _axes(mode: str, model: str) -> Sequence[str]:
    """Those whose degrees are settings."""
    if mode == "hybrid":
        return MODEL_AXES.get(model, MODEL_AXES[""])
    return [axis for axis in AXES if axis in MODE_SETTINGS[mode]]


def _has_choice(name: str, mode: str, held: Collection[str], applies: bool) -> bool:
    return applies and name not in held and name in MODE_SETTINGS[mode]


def products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many, in order; of none if it is 1."""
    if factors <= 1:
        yield (number,) * factors
        return
    for first in divisors(number):
        for rest in products(number // first, factors - 1):
            yield first, *rest


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def is_staged(spec: Spec) -> bool:
    """Whether it is a pipeline with an order."""
    return spec.mode == "pipeline" or (spec.mode == "hybrid" and (spec.pp or 1) > 1)


def recomputations(spec: Spec, held: Collection[str], on: Machine) -> tuple[str | None, ...]:
    """From what takes least; where memory cannot run out there is no reason for more."""
    return (spec.recompute,) if "recompute" in held else RECOMPUTE[: None if on.memory_size else 1]


def pieces(spec: Spec, held: Collection[str], staged: bool, batch: int) -> list[Settings]:
    """Into how many equal pieces `batch`, what a replica gets in a step, is cut."""
    name = "microbatches" if staged else "accumulate"
    if name in held or (name == "microbatches" and spec.schedule_file is not None):
        return [{}]
    if staged and "accumulate" in held:
        batch //= spec.accumulate
    return [{name: number} for number in divisors(max(1, batch)) if staged or number <= MOST_MICROSTEPS]


def by_fewest(numbers: Sequence[Settings]) -> Iterator[tuple[Settings, list[Settings]]]:
    """Numbers of pieces, as of `pieces`, that cut none of the others' pieces further, and with each those that cut
    its own."""
    left = list(numbers)
    while left:
        first, count = left[0], math.prod(left[0].values())
        own = [one for one in left[1:] if math.prod(one.values()) % count == 0]
        yield first, own
        left = [one for one in left[1:] if one not in own]


def orders(spec: Spec, held: Collection[str], ranks: int, layers: int) -> list[Settings]:
    """Schedules of a pipeline of so many ranks, and stages of a rank."""
    if spec.schedule_file is not None:
        return [{}]
    found = []
    for name, shape in schedules.TABLE.items():
        if "schedule" in held and name != spec.schedule:
            continue
        order = {} if "schedule" in held else {"schedule": name}
        if "stages_per_rank" in held or shape.stages_per_rank is not None:
            found.append(order)
            continue
        fewest = 1 if name in SPLIT_BACKWARD else 2  # with one stage the others are gpipe and 1f1b
        shortest = {-(-layers // (ranks * count)): count for count in range(layers // ranks, fewest - 1, -1)}
        found += [order | {"stages_per_rank": count} for count in reversed(shortest.values())]
    return found
