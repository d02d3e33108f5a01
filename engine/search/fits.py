"""A prediction -> whether it fits into its machine's memory; and if not which rank lacks how much, and what would fit.

What would make it fit is tried, not guessed: every change of settings below is planned anew, and those whose fullest
rank fits are simulated. Where none does, the one that leaves the fullest rank least is kept, and another sought
beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from engine import modes
from engine.asking.rules import SpecError
from engine.asking.settings import DATA_MODES, MODE_AXIS, MODE_SETTINGS, degree
from engine.cost.held import memory_of
from engine.cost.machine import Machine
from engine.cost.memory import CATEGORIES, room
from engine.job import Job, prepare
from engine.plan import AXES
from engine.predict import Prediction, predict
from engine.spec import Spec

TOGETHER = 5  # changes at most
MICROSTEPS = 3  # the first, the last, and one of those between, which are alike: more hold no more
FOUND = 4  # that fit, and are simulated

WHOLE = ("data_parallel", "ddp", "zero1", "zero2", "local_sgd")  # modes of which each device has the whole model

Change = dict[str, Any]


def fits(prediction: Prediction, *, suggest: bool = True) -> dict[str, Any]:
    """`fits` is None where the machine's memory is not known. `capacity`: what PyTorch can have of a device, beside
    `runtime`, what CUDA and NCCL hold. `category`: what takes most on the fullest rank."""
    simulation, capacity = prediction.simulation, room_of(prediction.job, prediction.machine)
    peaks = simulation.peak_memory
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    held = simulation.memory[fullest]
    rank = int(simulation.graph.representative[fullest])
    found: dict[str, Any] = {"capacity": capacity, "rank": rank, "peak": peaks[fullest]}
    found["runtime"] = None if capacity is None else prediction.machine.memory_size - capacity
    found["category"] = max(CATEGORIES, key=held.__getitem__)
    found["fits"] = None if capacity is None else peaks[fullest] <= capacity
    if found["fits"] is not False:
        return found
    sizes = zip(peaks, simulation.graph.num_ranks, strict=True)
    found["over"] = peaks[fullest] - capacity
    found["ranks_over"] = int(sum(number for peak, number in sizes if peak > capacity))
    found["would_fit"] = (
        would_fit(prediction.job.spec, prediction.machine, prediction.dilation or 1.0) if suggest else []
    )
    return found


def room_of(job: Job, on: Machine) -> int | None:
    """Bytes of a device that PyTorch can have, of a job's mesh."""
    exchanges = (job.expert_axis != "") + (job.degree("cp") > 1 and job.spec.attention == "ulysses")
    return room(on, {axis: job.degree(axis) for axis in AXES}, exchanges)


def would_fit(spec: Spec, on: Machine, dilation: float = 1.0) -> list[dict[str, Any]]:
    """The nearest settings that fit, the fastest first: what is changed (null: left open), bytes of the fullest rank,
    seconds of a step, those of a scale model `dilation` times as long. Empty where none of those tried does."""
    spec, kept = spec.with_(paced=None, dilation=None), {}
    found: list[tuple[Change, Spec, int]] = []
    for _ in range(TOGETHER):
        least, best = math.inf, None
        for change in _changes(prepare(spec.with_(**kept)).spec):
            try:
                changed = spec.with_(**kept | change)
                peak = _fullest(changed)
                over = peak - room_of(prepare(changed), on)
            except SpecError:
                continue  # a combination that does not work is none to suggest
            if over <= 0:
                found.append((kept | change, changed, peak))
                if len(found) == FOUND:
                    break
            if over < least:
                least, best = over, change
        if found or best is None:
            break
        kept |= best
    out = []
    for change, changed, peak in found:
        out.append({"settings": change, "peak_memory": peak, "step_time": dilation * predict(changed).step_time})
    return sorted(out, key=lambda one: one["step_time"])


def _fullest(spec: Spec) -> int:
    """Bytes at most on any rank."""
    job = prepare(spec)
    if job.microsteps > MICROSTEPS:
        fewer = spec.global_batch // job.microsteps * MICROSTEPS
        job = prepare(spec.with_(accumulate=MICROSTEPS, global_batch=fewer))
    plan = modes.plan(job, modes.FIRST_STEADY_STEP)
    return max(sum(memory_of(program)[0].values()) for program in plan.programs)


def _changes(spec: Spec) -> Iterator[Change]:
    """Each by itself, those that cost least first; what a change of degrees decides anew is left open."""
    yield from _of_options(spec)
    yield from _of_layout(spec)


def _of_options(spec: Spec) -> Iterator[Change]:
    has = MODE_SETTINGS[spec.mode]
    replicas = degree(spec, "dp") * degree(spec, "cp")
    if spec.master_weights and spec.mode == "hybrid" and replicas > 1 and not spec.share_optimizer:
        yield {"share_optimizer": True}
    if spec.master_weights and spec.mode == "hybrid" and min(spec.pp, spec.fsdp) > 1 and not spec.share_gradients:
        yield {"share_gradients": True}
    if "sequence_parallel" in has and degree(spec, "tp") > 1 and not spec.sequence_parallel:
        yield {"sequence_parallel": True}
    for times in (2, 4, 8):
        if spec.microbatches:
            yield {"microbatches": spec.microbatches * times}
        elif "accumulate" in has:
            yield {"accumulate": (spec.accumulate or 1) * times}
            if spec.mode in ("zero2", "fsdp", "hsdp"):  # between micro-steps gradients are in parts, too
                yield {"accumulate": (spec.accumulate or 1) * times, "sync_every_microstep": True}
    if "recompute" in has:
        kinds = {None: ("selective", "full"), "none": ("selective", "full"), "selective": ("full",)}
        yield from ({"recompute": kind} for kind in kinds.get(spec.recompute, ()))


def _of_layout(spec: Spec) -> Iterator[Change]:
    if spec.mode in WHOLE:
        yield _without(spec, "fsdp")
    if spec.mode == "layer_split":
        yield _without(spec, "pipeline") | {"accumulate": None}
    if spec.mode == "hsdp" and spec.dp > 1:
        yield {"dp": 1, "fsdp": spec.devices}
    if spec.mode == "fsdp":
        wide = (times for times in (2, 4, 8) if spec.devices % times == 0)
        yield from (_without(spec, "hybrid") | {"tp": times, "fsdp": spec.devices // times} for times in wide)
    for times in (2, 4, 8) if spec.mode not in WHOLE else ():  # devices, which have samples of their own
        yield _on_more(spec, times) | {"devices": spec.devices * times, "global_batch": spec.global_batch * times}
    if spec.mode != "hybrid":
        return
    split = {"split": None}
    if spec.dp > 1:
        yield {"fsdp": spec.fsdp * spec.dp, "dp": 1}
    for other, axis, times in itertools.product(("dp", "fsdp"), ("tp", "pp"), (2, 4)):
        if getattr(spec, other) % times == 0:
            yield {axis: getattr(spec, axis) * times, other: getattr(spec, other) // times} | split


def _on_more(spec: Spec, times: int) -> Change:
    """What makes them share: a mode of one axis that is not theirs becomes a mesh, with an axis more."""
    if spec.mode in ("hsdp", "hybrid"):
        return {"fsdp": spec.fsdp * times}
    if spec.mode == "single":
        return _without(spec, "fsdp")
    if spec.mode in DATA_MODES and spec.mode != "expert":
        return {}
    tokens = {"sequence_parallel": True} if spec.mode == "sequence" else {}
    return _without(spec, "hybrid") | {MODE_AXIS[spec.mode]: spec.devices, "fsdp": times} | tokens


def _without(spec: Spec, mode: str) -> Change:
    """Another mode, without the settings that it has not got."""
    return {"mode": mode} | {name: None for name in MODE_SETTINGS[spec.mode] if name not in MODE_SETTINGS[mode]}
