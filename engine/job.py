"""A Spec -> a Job: every default filled in, every rule that joins settings checked, the model's layers known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path

from engine import datasets, schedules
from engine.shapes import Layer, balance, model_layers
from engine.spec import FAULTS, MAX_HEADS, MAX_REAL_DEVICES, Spec, SpecError, parse_fault

# Settings that a model has, with their defaults; all others do not apply to it.
MODEL_DEFAULTS = {
    "cnn": {},
    "mlp": {"layers": 2, "hidden": 256},
    "gpt": {"layers": 4, "hidden": 128, "heads": 4, "context": 64},
}
MODEL_DATASETS = {"cnn": ("digits", "synthetic"), "mlp": ("digits", "synthetic"), "gpt": ("text", "synthetic")}
MODE_SETTINGS = {
    "single": {},
    "data_parallel": {},
    "ddp": {"bucket_mb": 25.0},
    "zero1": {"bucket_mb": 25.0},
    "zero2": {},
    "fsdp": {},
    "hsdp": {"dp": None, "fsdp": None},
    "layer_split": {"split": None},
    "pipeline": {"microbatches": None, "schedule": "1f1b", "split": None, "stages_per_rank": None},
    "tensor": {},
    "sequence": {},
}
MODE_MODELS = {"sequence": ("gpt",)}  # a mode that is not named takes every model
DATA_MODES = ("data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp")  # split the batch over devices
ONE_PROCESS_MODES = ("single", "data_parallel")
STAGE_MODES = ("layer_split", "pipeline")  # split the layers over devices
TENSOR_MODES = ("tensor", "sequence")  # split each layer over devices
PLANNED_ONLY = ("zb_h2", "dualpipe")  # schedules that PyTorch does not have
SEVERAL_STAGES = 2  # on a device, where the schedule leaves it open
LEARNING_RATES = {"sgd": 0.05, "adamw": 0.002}
DEFAULT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Job:
    """A spec that can be planned: `spec` has every setting that applies filled in."""

    spec: Spec
    layers: tuple[Layer, ...]
    sample_bytes: int  # of one sample's input and target
    num_train: int
    num_validation: int
    steps: int
    batches_per_epoch: int

    @property
    def local_batch(self) -> int:
        """Samples that one device sees in a step."""
        return self.spec.global_batch // (self.spec.devices if self.spec.mode in DATA_MODES else 1)

    @property
    def processes(self) -> int:
        """Worker processes of a real run: nn.DataParallel drives all its devices from one."""
        return 1 if self.spec.mode in ONE_PROCESS_MODES else self.spec.devices

    @property
    def stages(self) -> list[tuple[Layer, ...]]:
        """The layers of each stage; one stage with everything where layers are not split. In DualPipe the second half
        of the stages is a copy of the first."""
        return [tuple(self.layers[i] for i in held) for held in self.stage_layers]

    @property
    def stage_layers(self) -> list[range]:
        """The layers of each stage, as places in `layers`."""
        if self.spec.mode not in STAGE_MODES:
            return [range(len(self.layers))]
        bounds = itertools.accumulate(self.spec.split, initial=0)
        copies = len(_pipelines(self.spec)) if self.spec.mode == "pipeline" else 1
        return [range(a, b) for a, b in itertools.pairwise(bounds)] * copies


def applies(setting: str, mode: str, model: str) -> bool:
    """Whether a setting means anything for this mode and model."""
    if any(setting in settings for settings in MODEL_DEFAULTS.values()):
        return setting in MODEL_DEFAULTS[model]
    if any(setting in settings for settings in MODE_SETTINGS.values()):
        return setting in MODE_SETTINGS[mode]
    return True


def prepare(spec: Spec) -> Job:
    """Fill in and check. Raises SpecError with the rule that does not hold."""
    _check_applies(spec)
    defaults = {k: v for k, v in MODEL_DEFAULTS[spec.model].items() if getattr(spec, k) is None}
    defaults |= {k: v for k, v in MODE_SETTINGS[spec.mode].items() if getattr(spec, k) is None and v is not None}
    if spec.lr is None:
        defaults["lr"] = LEARNING_RATES[spec.optimizer]
    if spec.dataset is None:
        defaults["dataset"] = MODEL_DATASETS[spec.model][0]
    spec = spec.with_(**defaults)
    if spec.dataset not in MODEL_DATASETS[spec.model]:
        raise SpecError(
            "dataset_of_model", "dataset", spec.dataset, suggest=MODEL_DATASETS[spec.model], model=spec.model
        )
    if spec.data_dir is not None and spec.dataset != "digits":
        raise SpecError("does_not_apply", "data_dir", spec.data_dir, to=f"the dataset {spec.dataset}")
    if spec.heads is not None and spec.hidden % spec.heads:
        good = nearest([d for d in range(1, min(spec.hidden, MAX_HEADS) + 1) if spec.hidden % d == 0], spec.heads)
        raise SpecError("heads_divide", "heads", spec.heads, suggest=good, hidden=spec.hidden)
    num_train, num_validation, vocabulary = _data_sizes(spec)
    layers = model_layers(spec, vocabulary)
    _check_batch(spec, num_train)
    spec = _check_mode(spec, layers)
    if spec.steps is not None and spec.epochs is not None:
        raise SpecError("exclusive", "steps", spec.steps, other="epochs")
    batches = num_train // spec.global_batch
    steps = spec.epochs * batches if spec.epochs is not None else spec.steps or DEFAULT_STEPS
    fault = parse_fault(spec.fault)
    if fault and fault.rank >= spec.devices:
        there = spec.fault.replace(f"@{fault.rank}:", f"@{spec.devices - 1}:")
        raise SpecError("bad_fault", "fault", spec.fault, suggest=[there], kinds=", ".join(FAULTS))
    sample_bytes = 2 * 8 * spec.context if spec.model == "gpt" else 4 * 28 * 28 + 8
    return Job(spec, layers, sample_bytes, num_train, num_validation, steps, batches)


def prepare_real(spec: Spec) -> Job:
    """`prepare`, and beyond it: can this machine run it at all? `device` becomes cpu or cuda."""
    job = prepare(spec)
    if job.spec.schedule in PLANNED_ONLY:
        raise SpecError("planned_only", "schedule", spec.schedule, suggest=_schedules_instead(spec))
    devices, found = job.spec.devices, count_gpus()
    if devices > MAX_REAL_DEVICES:
        fewer = _at_most(MAX_REAL_DEVICES, job.spec)
        raise SpecError("cannot_run_here", "devices", devices, suggest=[fewer], high=MAX_REAL_DEVICES)
    if spec.device == "cuda" and not found:
        raise SpecError("no_gpu", "device", "cuda", suggest=["cpu"], found=0)
    if spec.device != "cpu" and 0 < found < devices:
        raise SpecError("more_ranks_than_gpus", "devices", devices, suggest=[_at_most(found, job.spec)], gpus=found)
    return dataclasses.replace(job, spec=job.spec.with_(device="cuda" if found and spec.device != "cpu" else "cpu"))


def count_gpus() -> int:
    """NVIDIA GPUs that a process started here may use, without loading torch or a driver."""
    present = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    return min(len(present), len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))


def _at_most(devices: int, spec: Spec) -> int:
    """The largest number of devices up to `devices` that the batch, or what is cut of the model, can be shared over."""
    if spec.mode not in (*DATA_MODES, *TENSOR_MODES):
        return devices
    shared = spec.global_batch if spec.mode in DATA_MODES else spec.devices  # what these can share, a divisor can
    return max(d for d in range(1, devices + 1) if shared % d == 0)


def nearest(good: list[int], value: int, count: int = 3) -> list[int]:
    """The values of `good` nearest to `value`, in rising order."""
    return sorted(sorted(good, key=lambda g: (abs(g - value), g))[:count])


def _check_applies(spec: Spec) -> None:
    for settings, of in ((MODEL_DEFAULTS, spec.model), (MODE_SETTINGS, spec.mode)):
        for name in dict.fromkeys(n for s in settings.values() for n in s):
            if name not in settings[of] and getattr(spec, name) is not None:
                word = "model" if settings is MODEL_DEFAULTS else "mode"
                raise SpecError("does_not_apply", name, getattr(spec, name), to=f"the {word} {of}")


def _data_sizes(spec: Spec) -> tuple[int, int, int]:
    """(training samples, validation samples, classes or distinct tokens)"""
    try:
        train, validation = datasets.sizes(spec.dataset, data_dir=spec.data_dir, context=spec.context)
    except datasets.DatasetError as error:
        setting = "context" if spec.dataset == "text" else "data_dir"
        raise SpecError("no_data", setting, str(error)) from None
    return train, validation, datasets.vocabulary_size(spec.dataset) if spec.model == "gpt" else 10


def _check_mode(spec: Spec, layers: tuple[Layer, ...]) -> Spec:
    if spec.mode == "single" and spec.devices != 1:
        raise SpecError(
            "devices_of_mode", "devices", spec.devices, suggest=[1], mode="single", wanted="exactly 1 device"
        )
    models = MODE_MODELS.get(spec.mode, (spec.model,))
    if spec.model not in models:
        raise SpecError("model_of_mode", "model", spec.model, suggest=models, mode=spec.mode)
    if spec.mode in TENSOR_MODES:
        _check_shards(spec, layers)
    if spec.mode == "hsdp":
        return _check_degrees(spec)
    if spec.mode not in STAGE_MODES:
        return spec
    if spec.mode == "pipeline":
        spec = _check_schedule(spec, layers)
        stages, enough = len(_pipelines(spec)[0]), _enough_devices(spec, layers)
    else:
        stages, enough = spec.devices, [*range(1, len(layers) + 1)]
    if stages > len(layers):
        setting, good = "devices", enough[-1:]
        if not good:
            setting, good = "stages_per_rank", [v for v in [len(layers) // spec.devices] if v]
        value = getattr(spec, setting)
        names = {"model": spec.model, "layers": len(layers), "stages": stages}
        raise SpecError("too_many_stages", setting, value, suggest=good, **names)
    balanced = balance([float(layer.flops) for layer in layers], stages)
    if spec.split is None:
        spec = spec.with_(split=balanced)
    elif len(spec.split) != stages or sum(spec.split) != len(layers) or min(spec.split) < 1:
        text = ",".join(map(str, balanced))
        raise SpecError("split_sum", "split", spec.split, suggest=[text], stages=stages, layers=len(layers))
    return _check_microbatches(spec) if spec.mode == "pipeline" else spec


def stages_per_rank(schedule: str) -> int:
    """How many stages a device has, unless it is asked for."""
    return schedules.TABLE[schedule].stages_per_rank or SEVERAL_STAGES


def _pipelines(spec: Spec) -> list[range]:
    return schedules.pipelines(spec.schedule, spec.devices, spec.stages_per_rank)


def _check_schedule(spec: Spec, layers: tuple[Layer, ...]) -> Spec:
    """Rules of the schedule about stages and devices; those about microbatches come after the layers are split."""
    if spec.stages_per_rank is None:
        spec = spec.with_(stages_per_rank=stages_per_rank(spec.schedule))
    broken = schedules.check(spec.schedule, spec.devices, spec.stages_per_rank, spec.microbatches or 1)
    if broken and broken.setting != "microbatches":
        good = broken.suggest if broken.setting != "devices" else nearest(_enough_devices(spec, layers), spec.devices)
        raise SpecError(broken.code, broken.setting, broken.value, suggest=good, **broken.values)
    return spec


def _check_shards(spec: Spec, layers: tuple[Layer, ...]) -> None:
    """What is cut must be cut into equal parts: attention by heads, other layers by the features between a pair."""
    features = next(layer.output[-1] for layer in layers if len(layer.output) == 1) if spec.model != "gpt" else 0
    sizes = {"heads": spec.heads, "context": spec.context} if spec.model == "gpt" else {"features": features}
    if spec.mode == "tensor":
        sizes.pop("context", None)
    shared = math.gcd(*sizes.values())
    if shared % spec.devices:
        good = nearest([d for d in range(1, shared + 1) if shared % d == 0], spec.devices, 8)
        what = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise SpecError("devices_divide", "devices", spec.devices, suggest=good, model=spec.model, sizes=what)


def _check_degrees(spec: Spec) -> Spec:
    """Replicas times shards are the devices. Where neither is given, two replicas if they can be cut further."""
    devices = spec.devices
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for name in ("fsdp", "dp"):
        degree = getattr(spec, name)
        if degree is not None and devices % degree:
            raise SpecError("degree_divides", name, degree, suggest=nearest(divisors, degree), devices=devices)
    if spec.dp is None and spec.fsdp is None:
        spec = spec.with_(dp=2 if devices % 2 == 0 and devices > 2 else 1)
    if spec.fsdp is None:
        return spec.with_(fsdp=devices // spec.dp)
    if spec.dp is None:
        return spec.with_(dp=devices // spec.fsdp)
    if spec.dp * spec.fsdp != devices:
        good, given = [devices // spec.fsdp], {"other": "fsdp", "degree": spec.fsdp, "devices": devices}
        raise SpecError("degrees_of_devices", "dp", spec.dp, suggest=good, **given)
    return spec


def _enough_devices(spec: Spec, layers: tuple[Layer, ...]) -> list[int]:
    """The numbers of devices for whose stages there are layers, and that the schedule can have."""
    a_device = len(_pipelines(spec.with_(devices=1))[0])
    numbers = range(1, len(layers) // a_device + 1)
    broken = [schedules.check(spec.schedule, number, spec.stages_per_rank, 1) for number in numbers]
    return [n for n, b in zip(numbers, broken, strict=True) if b is None or b.setting != "devices"]


def _check_microbatches(spec: Spec) -> Spec:
    batch = spec.global_batch
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    enough = [d for d in divisors if schedules.check(spec.schedule, spec.devices, spec.stages_per_rank, d) is None]
    if spec.microbatches is None:
        roomy = [d for d in enough if d >= 2 * spec.devices]
        spec = spec.with_(microbatches=(roomy or enough or [batch])[0 if roomy else -1])
    count = spec.microbatches
    if batch % count:
        raise SpecError("batch_by_microbatches", "microbatches", count, suggest=nearest(enough, count), batch=batch)
    if broken := schedules.check(spec.schedule, spec.devices, spec.stages_per_rank, count):
        raise SpecError(broken.code, "microbatches", count, suggest=nearest(enough, count), **broken.values)
    return spec


def _schedules_instead(spec: Spec) -> list[str]:
    """The schedules that can run with these settings, or at all if none can with just these."""
    real = [name for name in schedules.TABLE if name not in PLANNED_ONLY]
    return [name for name in real if _can_prepare(spec.with_(schedule=name))] or real


def _can_prepare(spec: Spec) -> bool:
    try:
        prepare(spec)
    except SpecError:
        return False
    return True


def _check_batch(spec: Spec, num_train: int) -> None:
    if spec.global_batch > num_train:
        step = math.lcm(spec.devices if spec.mode in DATA_MODES else 1, spec.microbatches or 1)
        good = [num_train // step * step] if num_train >= step else []
        raise SpecError(
            "batch_too_large", "global_batch", spec.global_batch, suggest=good, samples=num_train, dataset=spec.dataset
        )
    if spec.mode in DATA_MODES and spec.global_batch % spec.devices:
        below = spec.global_batch // spec.devices * spec.devices
        good = [b for b in (below, below + spec.devices) if 0 < b <= num_train]
        raise SpecError("batch_by_devices", "global_batch", spec.global_batch, suggest=good, devices=spec.devices)
