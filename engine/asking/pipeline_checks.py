"""A spec of stages and its model's layers -> its schedule, split and microbatches, checked, or filled in."""

from __future__ import annotations

from engine import schedules
from engine.asking.rules import SpecError, nearest
from engine.asking.settings import (
    COMPILE_REASONS,
    MODE_SETTINGS,
    PIPELINE_SETTINGS,
    SEVERAL_STAGES,
    SPLIT_BACKWARD,
    degrees,
    replicas,
)
from engine.model.shapes import Layer, balance
from engine.schedules import given
from engine.schedules.csv_form import ScheduleFileError
from engine.schedules.messages import OrderError
from engine.spec import Spec


def name_of(axis: str, spec: Spec) -> str:
    """The setting that gives an axis its degree."""
    return axis if axis in MODE_SETTINGS[spec.mode] else "devices"


def without_pipeline(spec: Spec) -> Spec:
    for name in PIPELINE_SETTINGS:
        if getattr(spec, name) is not None:
            raise SpecError("needs_axis", name, getattr(spec, name), axis="pp")
    return spec


def check_pipeline(spec: Spec, layers: tuple[Layer, ...]) -> Spec:
    ranks, setting = degrees(spec)["pp"], name_of("pp", spec)
    if spec.schedule_file is not None:
        spec = _check_schedule_file(spec, layers)
        stages, enough = len(pipelines(spec)[0]), []
    elif spec.schedule is not None:
        spec = _check_schedule(spec, layers)
        stages, enough = len(pipelines(spec)[0]), _enough_devices(spec, layers)
    else:
        stages, enough = ranks, [*range(1, len(layers) + 1)]
    if stages > len(layers):
        good = enough[-1:]
        if not good:
            setting, good = "stages_per_rank", [v for v in [len(layers) // ranks] if v]
        value = getattr(spec, setting)
        names = {"model": spec.model, "layers": len(layers), "stages": stages}
        raise SpecError("too_many_stages", setting, value, suggest=good, **names)
    _check_recompute(spec)
    if spec.compile_stage == "torch_compile" and _has_halves(spec):
        values = {"suggest": ("torchscript", "none"), "order": spec.schedule or "schedule-file"}
        raise SpecError("compile_halves", "compile_stage", spec.compile_stage, **values)
    balanced = balance([float(layer.flops) for layer in layers], stages)
    if spec.split is None:
        spec = spec.with_(split=balanced)
    elif len(spec.split) != stages or sum(spec.split) != len(layers) or min(spec.split) < 1:
        text = ",".join(map(str, balanced))
        raise SpecError("split_sum", "split", spec.split, suggest=[text], stages=stages, layers=len(layers))
    return _check_microbatches(spec) if spec.schedule is not None else spec


def stages_per_rank(schedule: str) -> int:
    """How many stages a device has, unless it is asked for."""
    return schedules.TABLE[schedule].stages_per_rank or SEVERAL_STAGES


def pipelines(spec: Spec) -> list[range]:
    if spec.schedule_file is not None:
        return given.read(spec.schedule_file).pipelines
    return schedules.pipelines(spec.schedule, degrees(spec)["pp"], spec.stages_per_rank)


def _check_schedule_file(spec: Spec, layers: tuple[Layer, ...]) -> Spec:
    """The order says how many devices, stages a device and microbatches there are; what is set must agree with it."""
    if spec.schedule is not None:
        raise SpecError("exclusive", "schedule", spec.schedule, other="schedule-file")
    try:
        found = given.read(spec.schedule_file)
    except (ScheduleFileError, OrderError) as error:
        reason, _, picture = str(error).partition("\n")
        raise SpecError("bad_schedule_file", "schedule_file", reason.rstrip(":"), picture=picture) from None
    wanted = {name_of("pp", spec): len(found.order), "stages_per_rank": found.stages_per_rank}
    wanted["microbatches"] = found.num_microbatches
    for name, number in wanted.items():
        value = getattr(spec, name)
        if value not in (None, number):
            suggest = [] if number is None else [number]
            raise SpecError("of_schedule_file", name, value, suggest=suggest, wanted=number or "1, 2, ...")
    stages, count = len(found.pipelines[0]), found.num_microbatches
    if stages > len(layers):
        names = {"model": spec.model, "layers": len(layers)}
        raise SpecError("stages_of_schedule_file", "schedule_file", stages, **names)
    if spec.global_batch % (pieces := count * replicas(spec) * (spec.accumulate or 1)):
        below = spec.global_batch // pieces * pieces
        good = [batch for batch in (below, below + pieces) if batch]
        raise SpecError("batch_of_schedule_file", "global_batch", spec.global_batch, suggest=good, microbatches=count)
    return spec.with_(**wanted)


def _has_halves(spec: Spec) -> bool:
    """Whether backwards run in halves, for the input and for the weights."""
    if spec.schedule_file is None:
        return spec.schedule in SPLIT_BACKWARD
    return any(action.kind == "backward_input" for row in given.read(spec.schedule_file).order for action in row)


def _check_recompute(spec: Spec) -> None:
    """Of a stage: it must be PyTorch's modules as they are."""
    if spec.recompute not in (None, "none") and spec.compile_stage not in (None, "none"):
        values = {"reason": COMPILE_REASONS[spec.compile_stage], "suggest": ["none"]}
        raise SpecError("compile_recomputes", "compile_stage", spec.compile_stage, **values)


def check_rendezvous(spec: Spec) -> None:
    """On GPUs a send waits for its receive, which an order that a person gave may not allow for."""
    if stuck := given.blocked(spec.schedule_file):
        reason, _, picture = stuck.partition("\n")
        raise SpecError("blocked_on_gpus", "schedule_file", reason, picture=picture)


def _check_schedule(spec: Spec, layers: tuple[Layer, ...]) -> Spec:
    """Rules of the schedule about stages and devices; those about microbatches come after the layers are split."""
    if spec.stages_per_rank is None:
        spec = spec.with_(stages_per_rank=stages_per_rank(spec.schedule))
    ranks = degrees(spec)["pp"]
    broken = schedules.check(spec.schedule, ranks, spec.stages_per_rank, spec.microbatches or 1)
    if broken and broken.setting != "microbatches":
        setting, good = broken.setting, broken.suggest
        if setting == "devices":
            setting, good = name_of("pp", spec), nearest(_enough_devices(spec, layers), ranks)
        raise SpecError(broken.code, setting, broken.value, suggest=good, **broken.values)
    return spec


def _enough_devices(spec: Spec, layers: tuple[Layer, ...]) -> list[int]:
    """The numbers of devices for whose stages there are layers, and that the schedule can have."""
    a_device = len(schedules.pipelines(spec.schedule, 1, spec.stages_per_rank)[0])
    numbers = range(1, len(layers) // a_device + 1)
    broken = [schedules.check(spec.schedule, number, spec.stages_per_rank, 1) for number in numbers]
    return [n for n, b in zip(numbers, broken, strict=True) if b is None or b.setting != "devices"]


def _check_microbatches(spec: Spec) -> Spec:
    pieces = replicas(spec) * (spec.accumulate or 1)
    batch = spec.global_batch // pieces
    enough = _possible_microbatches(spec, batch)
    if not enough:  # whatever microbatches is: the batch cannot be cut as the schedule asks
        good = schedules.rules.nearest(lambda size: bool(_possible_microbatches(spec, size)), batch)
        names = {"schedule": spec.schedule, "devices": degrees(spec)["pp"]}
        good = [size * pieces for size in good]
        raise SpecError("batch_of_schedule", "global_batch", spec.global_batch, suggest=good, **names)
    if spec.microbatches is None:
        roomy = [d for d in enough if d >= 2 * degrees(spec)["pp"]]
        spec = spec.with_(microbatches=roomy[0] if roomy else enough[-1])
    count = spec.microbatches
    if batch % count:
        raise SpecError("batch_by_microbatches", "microbatches", count, suggest=nearest(enough, count), batch=batch)
    if broken := schedules.check(spec.schedule, degrees(spec)["pp"], spec.stages_per_rank, count):
        raise SpecError(broken.code, "microbatches", count, suggest=nearest(enough, count), **broken.values)
    return spec


def _possible_microbatches(spec: Spec, batch: int) -> list[int]:
    """The numbers of equal parts of a batch that the schedule can run."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    ranks = degrees(spec)["pp"]
    return [d for d in divisors if schedules.check(spec.schedule, ranks, spec.stages_per_rank, d) is None]
