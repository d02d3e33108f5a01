"""A Spec -> a Job: every default filled in, every rule that joins settings checked, the model's layers known."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from engine import checkpoints, schedules
from engine.asking import branches, frozen, slow
from engine.asking.checks import check_batch, check_compression, check_fault, check_mode, check_size
from engine.asking.faults import parse_fault
from engine.asking.here import check_torch, count_gpus, lacks_compiler
from engine.asking.meshes import fill_degrees, splits, told
from engine.asking.pipeline_checks import check_rendezvous, pipelines
from engine.asking.rules import SpecError, nearest
from engine.asking.settings import (
    DATA_MODES,
    DEFAULT_STEPS,
    LEARNING_RATES,
    MODE_SETTINGS,
    MODEL_DATASETS,
    MODEL_DEFAULTS,
    ONE_BUCKET_MB,
    ONE_PROCESS_MODES,
    PLANNED_ONLY,
    POWERSGD_RANK,
    REASONS,
    TENSOR_MODES,
    TOKEN_MODELS,
    default_model,
    degree,
    expert_axis,
    planned_only,
    replicas,
)
from engine.cost.machine import machine
from engine.data import datasets
from engine.model.presets import PRESETS, family
from engine.model.shapes import Layer, model_layers
from engine.plan import AXES
from engine.scale_model.paced import check_paced
from engine.spec import MAX_HEADS, MAX_REAL_DEVICES, Spec

POWERSGD_STEPS = 5  # two that it leaves alone, one to begin with, and two that build on what was left out before
MAX_BATCH = Spec.__dataclass_fields__["global_batch"].metadata["high"]
MAX_TRIED = 100  # degrees that are looked at to find some that work
MAX_PARITY_STEPS = 64  # unless more are asked for: every rank keeps its gradients of each


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
    # Of each rank, the tokens that its routers gave to each expert in each pass, by block; None: as many to each.
    routed: tuple[dict[str, list[list[int]]], ...] | None = None
    first_step: int = 0  # where a run that resumes goes on; `steps` are those that it has left

    def degree(self, axis: str) -> int:
        """How many coordinates the mesh has on `axis`; 1 where it does not have it."""
        return degree(self.spec, axis)

    @property
    def expert_axis(self) -> str:
        """Along which each rank has experts of its own; none where every rank has some of all."""
        return expert_axis(self.spec)

    @property
    def whole_experts(self) -> bool:
        """Whether tensor ranks have experts whole, each others; then each sends its part of the tokens there."""
        return "tp" in self.expert_axis

    @property
    def routed_tokens(self) -> int:
        """Of a sequence, those that a rank sends to experts."""
        return self.tokens // (self.degree("tp") if self.whole_experts else 1)

    @property
    def routing_alike(self) -> int:
        """How many ranks, next to each other, send the same tokens to experts."""
        return 1 if self.whole_experts else self.degree("tp")

    @property
    def num_params(self) -> int:
        """Of the model, once: a tied head that is held as a copy is not counted again, nor is an embedding."""
        total = sum(layer.num_params for layer in self.layers)
        again = ("token.weight", "linear.weight") if self.spec.tied else ("token.weight",)
        return total - sum(math.prod(shape) for layer in self.layers[1:] for n, shape in layer.params if n in again)

    @property
    def replicas(self) -> int:
        """Parts that a batch is cut into: one a device, or one a group of devices that work on the same samples."""
        return replicas(self.spec)

    @property
    def local_batch(self) -> int:
        """Samples that one device sees in a step."""
        return self.spec.global_batch // self.replicas

    @property
    def batches(self) -> dict[str, int]:
        """How samples come to a batch and to an epoch, in numbers; what fills no whole batch is left out."""
        left_out = self.num_train - self.batches_per_epoch * self.spec.global_batch
        batch = {"global_batch": self.spec.global_batch, "replicas": self.replicas, "local_batch": self.local_batch}
        return batch | {
            "samples": self.num_train, "batches_per_epoch": self.batches_per_epoch, "samples_left_out": left_out,
        }  # fmt: skip

    @property
    def microsteps(self) -> int:
        """Passes through the model, each with its own part of the local batch, before one optimizer step."""
        return self.spec.accumulate or 1

    @property
    def micro_batch(self) -> int:
        """Samples that one device sees in a micro-step."""
        return self.local_batch // self.microsteps

    @property
    def item(self) -> int:
        """Bytes of a number: of weights, gradients and activations."""
        return self.layers[0].item

    @property
    def parity_steps(self) -> int:
        """First steps that are compared. What a mode does only now and then is among them."""
        asked = self.spec.parity_steps
        if asked and self.spec.sync_every and self.spec.sync_every < MAX_PARITY_STEPS:
            asked = max(asked, self.spec.sync_every + 1)
        if asked and self.spec.compress == "powersgd":
            asked = max(asked, POWERSGD_STEPS)
        return min(asked, self.steps)

    @property
    def tokens(self) -> int | None:
        """Of a sequence, as many as a rank sees: all, or its part where sequences are dealt out over cp."""
        return self.spec.context and self.spec.context // self.degree("cp")

    @property
    def target_bytes(self) -> int:
        """Of a rank's bytes of a sample, those of its target: a class, or one for each token."""
        return 8 * (self.tokens or 1)

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
        if self.spec.split is None:
            return [range(len(self.layers))]
        bounds = itertools.accumulate(self.spec.split, initial=0)
        copies = len(pipelines(self.spec)) if self.spec.schedule is not None else 1
        return [range(a, b) for a, b in itertools.pairwise(bounds)] * copies


def prepare(spec: Spec, *, suggest: bool = True) -> Job:
    """Fill in and check. Raises SpecError with the rule that does not hold.

    In a mesh of several degrees a value that keeps one rule may break another, and not each mode has every model: those
    that work are suggested, unless nobody wants to `suggest` any, which takes longer than the rest.
    """
    try:
        return _prepare(spec)
    except SpecError as error:
        if error.code == "degrees_product":
            raise _with_splits(error, spec) from None
        of_mesh = spec.mode == "hybrid" and error.setting in (*AXES, "devices")
        if not suggest or (not of_mesh and error.code != "paced_mode"):
            raise
        raise error.suggesting(v for v in error.suggest if _can_prepare(spec, **{error.setting: v})) from None


def _with_splits(error: SpecError, spec: Spec) -> SpecError:
    """The numbers of devices that work, and degrees that work with as many devices as there are."""
    error = error.suggesting(v for v in error.suggest if _can_prepare(spec, devices=v))
    given = {axis: degree for axis in AXES if (degree := getattr(spec, axis)) is not None}
    near = itertools.islice(splits(spec.devices, given), MAX_TRIED)
    good = [*itertools.islice((each for each in near if _can_prepare(spec, **each)), 3)]
    if not good:
        return error
    names = {"degrees": told(given), "splits": "; ".join(map(told, good))}
    return SpecError("degrees_splits", "devices", spec.devices, suggest=error.suggest, **names)


def _prepare(spec: Spec) -> Job:
    spec = spec.with_(model=spec.model or default_model(spec.mode))
    _check_applies(spec)
    spec = check_paced(_filled(check_compression(spec)))
    _check_model(spec)
    num_train, num_validation, vocabulary = _data_sizes(spec)
    layers = frozen.mark(spec, model_layers(spec, vocabulary))
    if spec.mode == "hybrid":
        spec = fill_degrees(spec)
    check_batch(spec, num_train)
    spec = check_mode(spec, layers)
    check_size(spec, layers)
    branches.check(spec, layers)
    frozen.check(spec)
    _check_saved(spec)
    first_step, batches = _first_step(spec), num_train // spec.global_batch
    steps = _last_step(spec, first_step, batches) - first_step
    slow.of_spec(spec)  # it names ranks that there are
    if fault := parse_fault(spec.fault):
        check_fault(spec, fault, steps)
    sample_bytes = 2 * 8 * spec.context if spec.model in TOKEN_MODELS else layers[0].item * 28 * 28 + 8
    return Job(spec, layers, sample_bytes, num_train, num_validation, steps, batches, first_step=first_step)


def _filled(spec: Spec) -> Spec:
    """With the defaults of its mode and its model."""
    defaults = {k: v for k, v in MODEL_DEFAULTS[spec.model].items() if getattr(spec, k) is None}
    defaults |= {k: v for k, v in MODE_SETTINGS[spec.mode].items() if getattr(spec, k) is None and v is not None}
    if spec.compress == "powersgd":
        defaults |= {"bucket_mb": ONE_BUCKET_MB, "compress_rank": spec.compress_rank or POWERSGD_RANK}
    if spec.schedule_file is not None:
        defaults.pop("schedule", None)  # the order is in the file
    if spec.model in PRESETS and "precision" in MODE_SETTINGS[spec.mode] and spec.precision is None:
        defaults["precision"] = PRESETS[spec.model].precision
    defaults["optimizer"] = spec.optimizer or ("adamw" if spec.model in PRESETS else "sgd")
    if spec.model in PRESETS and spec.master_weights is None:  # as they are trained: two bytes beside four
        precision = spec.precision or defaults.get("precision")
        defaults["master_weights"] = True if precision != "fp32" else None
    if spec.lr is None:
        defaults["lr"] = LEARNING_RATES[defaults["optimizer"]]
    if spec.dataset is None:
        defaults["dataset"] = MODEL_DATASETS[spec.model][0]
    return spec.with_(**defaults)


def _check_model(spec: Spec) -> None:
    """Sizes of a model that join each other, and what it learns from."""
    if spec.dataset not in MODEL_DATASETS[spec.model]:
        raise SpecError(
            "dataset_of_model", "dataset", spec.dataset, suggest=MODEL_DATASETS[spec.model], model=spec.model
        )
    if spec.data_dir is not None and spec.dataset != "digits":
        raise SpecError("does_not_apply", "data_dir", spec.data_dir, to=f"the dataset {spec.dataset}")
    if spec.model in TOKEN_MODELS and spec.hidden == 1:
        raise SpecError("norm_of_one", "hidden", 1, suggest=[max(2, spec.heads)], model=spec.model)
    if spec.heads is not None and spec.head_dim is None and spec.hidden % spec.heads:
        good = nearest([d for d in range(1, min(spec.hidden, MAX_HEADS) + 1) if spec.hidden % d == 0], spec.heads)
        raise SpecError("heads_divide", "heads", spec.heads, suggest=good, hidden=spec.hidden)
    if spec.kv_heads is not None and spec.heads % spec.kv_heads:
        good = nearest([d for d in range(1, spec.heads + 1) if spec.heads % d == 0], spec.kv_heads)
        raise SpecError("kv_heads_divide", "kv_heads", spec.kv_heads, suggest=good, heads=spec.heads)
    if spec.top_k is not None and spec.top_k > spec.experts:
        raise SpecError("top_k_of_experts", "top_k", spec.top_k, suggest=[spec.experts], experts=spec.experts)
    if spec.mtp is not None and (spec.mode in TENSOR_MODES or (spec.tp or 1) > 1):
        raise SpecError("does_not_apply", "mtp", spec.mtp, to="tensor ranks")


def _last_step(spec: Spec, first_step: int, batches: int) -> int:
    """Of the whole training, of which `first_step` steps are done: an epoch has so many `batches`."""
    if spec.steps is not None and spec.epochs is not None:
        raise SpecError("exclusive", "steps", spec.steps, other="epochs")
    steps = spec.epochs * batches if spec.epochs is not None else spec.steps or first_step + DEFAULT_STEPS
    if steps <= first_step:
        setting, value = ("epochs", spec.epochs) if spec.epochs is not None else ("steps", spec.steps)
        good = first_step // batches + 1 if spec.epochs is not None else first_step + DEFAULT_STEPS
        raise SpecError("resume_ends", setting, value, suggest=[good], run=spec.resume, done=first_step)
    return steps


def _check_saved(spec: Spec) -> None:
    """A checkpoint has one copy of each parameter and its moments: not what replicas keep each for itself."""
    apart = "the mode local_sgd" if spec.mode == "local_sgd" else "compress powersgd"
    if spec.mode == "local_sgd" or spec.compress == "powersgd":
        for name in ("save_every", "resume"):
            if getattr(spec, name) is not None:
                raise SpecError("does_not_apply", name, getattr(spec, name), to=apart)


def _first_step(spec: Spec) -> int:
    """Steps done when a run begins, as far as the spec names the one checkpoint that is meant."""
    return 0 if spec.resume is None else checkpoints.parse(spec.resume)[1] or 0


def prepare_real(spec: Spec, *, suggest: bool = True) -> Job:
    """`prepare`, and beyond it: can this machine run it at all? `device` becomes cpu or cuda."""
    job = prepare(spec, suggest=suggest)
    machine(job.spec.machine)  # with which the run will be compared
    if spec.paced is None and (setting := planned_only(job.spec)):
        models = () if setting != "model" else (family(spec.model),)
        raise SpecError("planned_model", setting, getattr(job.spec, setting), suggest=models)
    if job.spec.schedule in PLANNED_ONLY:
        raise SpecError("planned_only", "schedule", spec.schedule, suggest=_schedules_instead(spec) if suggest else ())
    for name in ("slow_rank", "slow_link"):
        if getattr(spec, name) is not None and spec.paced is None:
            raise SpecError("slow_is_simulated", name, getattr(spec, name))
    check_torch(job.spec.mode)
    devices, found = job.spec.devices, count_gpus()
    if job.spec.schedule_file is not None and found and spec.device != "cpu":
        check_rendezvous(job.spec)
    if devices > MAX_REAL_DEVICES:
        fewer = _at_most(MAX_REAL_DEVICES, job.spec)
        raise SpecError("cannot_run_here", "devices", devices, suggest=fewer, high=MAX_REAL_DEVICES)
    if job.spec.compile_stage == "torch_compile" and (missing := lacks_compiler()):
        suggest = ("torchscript", "none")
        raise SpecError("no_compiler", "compile_stage", spec.compile_stage, suggest=suggest, missing=missing)
    if spec.device == "cuda" and not found:
        raise SpecError("no_gpu", "device", "cuda", suggest=["cpu"], found=0)
    if spec.device != "cpu" and spec.paced is None and 0 < found < devices:
        raise SpecError("more_ranks_than_gpus", "devices", devices, suggest=_at_most(found, job.spec), gpus=found)
    on_gpus = found and spec.device != "cpu" and spec.paced is None
    return dataclasses.replace(job, spec=job.spec.with_(device="cuda" if on_gpus else "cpu"))


def _at_most(devices: int, spec: Spec) -> list[int]:
    """The largest number of devices up to `devices` that the batch, or what is cut of the model, can be shared over.
    None is known where it follows from several degrees."""
    if spec.mode == "hybrid":
        return []
    if spec.mode not in (*DATA_MODES, *TENSOR_MODES):
        return [devices]
    shared = spec.global_batch if spec.mode in DATA_MODES else spec.devices  # what these can share, a divisor can
    shared = math.gcd(shared, spec.experts) if spec.mode == "expert" else shared
    return [max(d for d in range(1, devices + 1) if shared % d == 0)]


def _check_applies(spec: Spec) -> None:
    if spec.masked is not None and (reason := REASONS["masked"].get(spec.mode)):
        raise SpecError("option_of_mode", "masked", spec.masked, mode=spec.mode, reason=reason)
    for settings, of in ((MODEL_DEFAULTS, spec.model), (MODE_SETTINGS, spec.mode)):
        also = AXES if settings is MODE_SETTINGS else ()
        for name in dict.fromkeys([*also, *(n for s in settings.values() for n in s)]):
            if name not in settings[of] and getattr(spec, name) is not None:
                word = "model" if settings is MODEL_DEFAULTS else "mode"
                if name in REASONS and of in REASONS[name]:
                    raise SpecError("option_of_mode", name, getattr(spec, name), mode=of, reason=REASONS[name][of])
                raise SpecError("does_not_apply", name, getattr(spec, name), to=f"the {word} {of}")


def _data_sizes(spec: Spec) -> tuple[int, int, int]:
    """(training samples, validation samples, classes or distinct tokens); a model that only is planned, or pictured,
    has as many samples as it takes."""
    if (planned_only(spec) or spec.paced) and spec.dataset == "synthetic":
        return MAX_BATCH, 0, datasets.vocabulary_size(spec.dataset)
    try:
        train, validation = datasets.sizes(spec.dataset, data_dir=spec.data_dir, context=spec.context)
    except datasets.DatasetError as error:
        setting = "context" if spec.dataset == "text" else "data_dir"
        raise SpecError("no_data", setting, str(error)) from None
    return train, validation, datasets.vocabulary_size(spec.dataset) if spec.model in TOKEN_MODELS else 10


def _schedules_instead(spec: Spec) -> list[str]:
    """The schedules that can run with these settings, or at all if none can with just these."""
    real = [name for name in schedules.TABLE if name not in PLANNED_ONLY]
    return [name for name in real if _can_prepare(spec, schedule=name)] or real


def _can_prepare(spec: Spec, **changes) -> bool:
    try:
        _prepare(spec.with_(**changes))
    except SpecError:
        return False
    return True
