"""A mode and a model -> the settings that they have, with their defaults, and what they have in common with others."""

from __future__ import annotations

import math

from engine.model.presets import LATENT, PRESETS, family
from engine.plan import AXES, FLAT
from engine.spec import MODELS, Spec

# Sizes with which a model can be planned and simulated, and not run.
PLANNED_SIZES = ("kv_heads", "head_dim", "ffn", "vocabulary", "activation", "positions", "tied")
# And how it is trained.
PLANNED_SIZES += ("flash", "early_stop", "every_other", "overlap", "master_weights", "scatter_gather", "tp_overlap")
PLANNED_SIZES += ("share_optimizer", "share_gradients", "dropout", "fused_loss", "keep_qkv", "backward_prefetch")
PLANNED_SIZES += ("reduce_fp32", "torch_loss", "mtp")
PLANNED_EXPERTS = ("shared_experts", "dense_layers", "dense_ffn")
# Settings that a model has, with their defaults; all others do not apply to it.
MODEL_DEFAULTS = {
    "cnn": {},
    "mlp": {"layers": 2, "hidden": 256},
    "gpt": {
        "layers": 4, "hidden": 128, "heads": 4, "context": 64, "masked": None, **dict.fromkeys(PLANNED_SIZES),
    },
    "moe": {
        "layers": 2, "hidden": 64, "heads": 4, "context": 64, "experts": 8, "top_k": 2,
        "masked": None, **dict.fromkeys((*PLANNED_SIZES, *PLANNED_EXPERTS)),
    },
}  # fmt: skip
MODEL_DEFAULTS |= {name: MODEL_DEFAULTS[preset.family] | preset.sizes for name, preset in PRESETS.items()}
MODEL_DATASETS = {
    "cnn": ("digits", "synthetic"),
    "mlp": ("digits", "synthetic"),
    "gpt": ("text", "synthetic"),
    "moe": ("text", "synthetic"),
} | dict.fromkeys(PRESETS, ("synthetic",))
TOKEN_MODELS = ("gpt", "moe", *PRESETS)  # they read sequences of tokens; the others, images
MODE_SETTINGS = {
    "single": {},
    "data_parallel": {},
    "ddp": {"bucket_mb": 25.0},
    "zero1": {"bucket_mb": 25.0},
    "zero2": {},
    "fsdp": {},
    "hsdp": {"dp": None, "fsdp": None},
    "local_sgd": {"sync_every": 4},
    "layer_split": {"split": None, "compile_stage": "none"},
    "pipeline": {
        "microbatches": None,
        "schedule": "1f1b",
        "receives": "late",
        "split": None,
        "stages_per_rank": None,
        "schedule_file": None,
        "compile_stage": "none",
    },
    "tensor": {},
    "sequence": {},
    "context": {"attention": "ring", "balance": None, "bucket_mb": 25.0},
    "expert": {"bucket_mb": 25.0},
    "hybrid": {
        "pp": None,
        "dp": None,
        "fsdp": None,
        "cp": None,
        "ep": None,
        "tp": None,
        "expert_tp": None,
        "sequence_parallel": None,
        "attention": None,
        "balance": None,
        "microbatches": None,
        "schedule": None,
        "split": None,
        "stages_per_rank": None,
        "schedule_file": None,
    },
}
# Options of the training itself: the default, and the modes that have them.
REPLICA_MODES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")  # each rank runs whole passes, and gradients are reduced
OPTIONS = {
    "accumulate": (1, tuple(MODE_SETTINGS)),
    "sync_every_microstep": (False, REPLICA_MODES),
    "leave_out": (None, ("ddp",)),
    "freeze": (None, ("single", "ddp", "zero1", "fsdp", "hsdp", "layer_split", "pipeline")),
    "find_unused": (False, ("ddp",)),
    "compress": ("none", ("ddp",)),
    "compress_rank": (None, ("ddp",)),  # of powersgd alone
    "recompute": ("none", tuple(MODE_SETTINGS)),
    "precision": ("fp32", tuple(MODE_SETTINGS)),
    "clip": (None, tuple(MODE_SETTINGS)),
}
for _option, (_default, _modes) in OPTIONS.items():
    for _mode in _modes:
        MODE_SETTINGS[_mode][_option] = _default
# Why a mode has not got an option that one might look for there.
REASONS = {
    "masked": {"local_sgd": "no gradients are reduced"},
    "sync_every_microstep": {
        "single": "one device has nobody to reduce gradients with",
        "local_sgd": "no gradients are reduced",
    },
}
# Values that a model that runs does not take, and why.
MODEL_REASONS = {
    ("moe", "compile_stage", "torchscript"): "a trace keeps the numbers of tokens that experts got in its example",
}
# Why a stage that is compiled is not computed again.
COMPILE_REASONS = {
    "torchscript": "a trace has no checkpoint in it, and what ends a recomputation early does not pass one",
    "torch_compile": "torch.compile decides itself what it keeps and what it computes again, inside of its kernels",
}
DENSE = ("gpt", *(name for name in PRESETS if family(name) == "gpt"))
ROUTED = ("moe", *(name for name in PRESETS if family(name) == "moe"))
# A mode that is not named takes every model.
MODE_MODELS = {"sequence": (*DENSE, *ROUTED), "expert": ROUTED}
MODE_MODELS["context"] = tuple(model for model in MODE_MODELS["sequence"] if model not in LATENT)
MODE_MODELS["tensor"] = MODE_MODELS["hybrid"] = ("cnn", "mlp", *MODE_MODELS["sequence"])
# These split the batch over devices.
DATA_MODES = ("data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "local_sgd", "expert")
# A mode is a name for a mesh: of one axis, or of those whose degrees are settings.
MODE_AXIS = {
    "single": "dp",
    "data_parallel": "dp",
    "ddp": "dp",
    "zero1": "dp",
    "zero2": "fsdp",
    "fsdp": "fsdp",
    "local_sgd": "dp",
    "layer_split": "pp",
    "pipeline": "pp",
    "tensor": "tp",
    "sequence": "tp",
    "context": "cp",
    "expert": "ep",
}
# Axes that a hybrid of a model can have; those of models that are not named are the first.
MODEL_AXES = {"": ("pp", "dp", "fsdp", "tp")}
MODEL_AXES |= dict.fromkeys(DENSE, ("pp", "dp", "fsdp", "cp", "tp"))
MODEL_AXES |= dict.fromkeys(ROUTED, ("pp", "dp", "fsdp", "cp", "ep", "tp"))
MODEL_AXES |= dict.fromkeys(LATENT, ("pp", "dp", "fsdp", "ep", "tp"))
DATA_AXES = ("dp", "fsdp", "ep")  # those over which the batch is cut
ONE_PROCESS_MODES = ("single", "data_parallel")
STAGE_MODES = ("layer_split", "pipeline")  # split the layers over devices
TENSOR_MODES = ("tensor", "sequence")  # split each layer over devices
PIPELINE_SETTINGS = ("microbatches", "schedule", "schedule_file", "split", "stages_per_rank")  # of a mesh with pp
CONTEXT_SETTINGS = ("attention", "balance")  # of a mesh with cp
TORCH_FLOOR = (2, 11)  # the oldest that runs are tested with
# What gloo could not do before torch 2.8 (pytorch#149869).
REDUCE_SCATTER_MODES = ("zero2", "fsdp", "hsdp", "sequence", "hybrid")
PLANNED_PRECISIONS = ("fp16", "fp8")
PLANNED_ONLY = ("zb_h2", "zb_2p", "dualpipe")  # schedules that PyTorch does not have
MAX_RING = 64  # ranks: every one takes as many turns, in every layer
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zb_h2", "zb_2p", "zbv", "dualpipev", "dualpipe")  # a backward is two ops
SEVERAL_STAGES = 2  # on a device, where the schedule leaves it open
LEARNING_RATES = {"sgd": 0.05, "adamw": 0.002}
DEFAULT_STEPS = 20
POWERSGD_RANK = 2
ONE_BUCKET_MB = 65_536.0  # no model's gradients fill it


def default_model(mode: str) -> str:
    """The first model that a mode can train."""
    return MODE_MODELS.get(mode, MODELS)[0]


def planned_only(spec: Spec) -> str | None:
    """The setting for which a model can be planned and simulated, but not run; None where it can run."""
    if spec.model in PRESETS:
        return "model"
    of_sizes = next((name for name in (*PLANNED_SIZES, *PLANNED_EXPERTS) if getattr(spec, name) is not None), None)
    return of_sizes or ("precision" if spec.precision in PLANNED_PRECISIONS else None)


def applies(setting: str, mode: str, model: str) -> bool:
    """Whether a setting means anything for this mode and model."""
    if mode in REASONS.get(setting, ()):
        return False
    if any(setting in settings for settings in MODEL_DEFAULTS.values()):
        return setting in MODEL_DEFAULTS[model]
    if setting in AXES or any(setting in settings for settings in MODE_SETTINGS.values()):
        return setting in MODE_SETTINGS[mode]
    return True


def degree(spec: Spec, axis: str) -> int:
    """Of one of the axes in `degrees`, or of some of them as one; 1 where the mesh does not have it."""
    if axis in FLAT:
        return math.prod(degree(spec, each) for each in FLAT[axis])
    if spec.mode in MODE_AXIS:
        return spec.devices if MODE_AXIS[spec.mode] == axis else 1
    return getattr(spec, axis) if axis in MODE_SETTINGS[spec.mode] else 1


def degrees(spec: Spec) -> dict[str, int]:
    """Mesh axis -> degree, of a spec whose mode's settings are filled in."""
    if spec.mode in MODE_AXIS:
        return {MODE_AXIS[spec.mode]: spec.devices}
    return {axis: getattr(spec, axis) for axis in MODE_SETTINGS[spec.mode] if axis in AXES}


def expert_axis(spec: Spec) -> str:
    """Along which each rank has experts of its own: ep, with tp where tensor ranks have experts whole; none where every
    rank has some of all."""
    axes = ("ep", "tp") if spec.expert_tp == 1 else ("ep",)
    return "_".join(axis for axis in axes if degree(spec, axis) > 1)


def replicas(spec: Spec) -> int:
    """Parts that a batch is cut into: one a device, or one a group of devices that work on the same samples."""
    return math.prod(degree(spec, axis) for axis in DATA_AXES)
