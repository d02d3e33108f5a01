"""What a person asks for (words, JSON, URL parameters) -> a checked, frozen Spec, or a SpecError.

Every setting is one field of `Spec`, and its name is the same on the command line, in a spec file, in a URL and in
the code. What is not set stays `None` and is filled by `engine.job.prepare`, from the mode and the model, before
anything runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from engine import schedules
from engine.asking import slow, spec_file
from engine.asking.faults import KINDS, parse_fault
from engine.asking.rules import SpecError, closest
from engine.asking.values import as_text, checked, parse_text, setting
from engine.model.presets import PRESETS

MAX_DEVICES = 16_384
MAX_REAL_DEVICES = 64
MAX_HEADS = 1024
MAX_EXPERTS = 1024

MODES = (
    "single",
    "data_parallel",
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "hsdp",
    "local_sgd",
    "layer_split",
    "pipeline",
    "tensor",
    "sequence",
    "context",
    "expert",
    "hybrid",
)
MODELS = ("cnn", "mlp", "gpt", "moe", *PRESETS)
DATASETS = ("digits", "text", "synthetic")
SCHEDULES = tuple(schedules.TABLE)
RECEIVES = ("late", "early")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
ACTIVATIONS = ("gelu", "swiglu")
POSITIONS = ("learned", "rotary", "alibi")
TORCH_LOSSES = ("eager", "compiled")
RECOMPUTE = ("none", "selective", "full")
COMPRESS = ("none", "fp16", "powersgd")
ATTENTIONS = ("ring", "all_gather", "ulysses")
BALANCES = ("head_tail", "none")
STAGE_COMPILERS = ("none", "torchscript", "torch_compile")
OPTIMIZERS = ("sgd", "adamw")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One training, as asked for. `None` means: the default of the mode or the model (see `engine.job.prepare`)."""

    mode: str = setting("ddp", "the parallelism", choices=MODES)
    devices: int = setting(2, "how many devices (ranks)", low=1, high=MAX_DEVICES)
    model: str | None = setting(
        None, "the model to train; by default cnn, in sequence and context gpt, in expert moe", choices=MODELS
    )
    layers: int | None = setting(None, "hidden layers (mlp) or blocks (gpt, moe)", low=1, high=1024)
    hidden: int | None = setting(None, "width of the model (mlp, gpt, moe)", low=1, high=65_536)
    heads: int | None = setting(None, "attention heads (gpt, moe)", low=1, high=MAX_HEADS)
    context: int | None = setting(None, "tokens in a sequence (gpt, moe)", low=2, high=1_048_576)
    experts: int | None = setting(None, "experts in each block (moe)", low=1, high=MAX_EXPERTS)
    top_k: int | None = setting(None, "experts that each token goes to (moe)", low=1, high=MAX_EXPERTS)
    kv_heads: int | None = setting(
        None, "heads of keys and values, which several heads of queries share (planned models)", low=1, high=MAX_HEADS
    )
    head_dim: int | None = setting(None, "width of a head, if not hidden / heads (planned models)", low=1, high=65_536)
    ffn: int | None = setting(
        None,
        "width inside of an MLP or an expert, if not 4 times hidden (planned models)",
        low=1,
        high=1 << 22,
    )
    vocabulary: int | None = setting(
        None, "tokens that the model knows, if not those of its dataset (planned models)", low=2, high=1 << 24
    )
    activation: str | None = setting(
        None, "what is between the matrices of an MLP; swiglu has one matrix more (planned models)", choices=ACTIVATIONS
    )
    positions: str | None = setting(
        None, "how a model knows places: of the three only the learned are weights (planned models)", choices=POSITIONS
    )
    tied: bool | None = setting(None, "the head's matrix is that of the embedding (planned models)")
    flash: bool | None = setting(None, "attention in one kernel, which never writes its scores (planned models)")
    early_stop: bool | None = setting(None, "recomputing ends where backward needs no more (planned models)")
    every_other: bool | None = setting(None, "selectively, every other product is computed again (planned models)")
    keep_qkv: bool | None = setting(None, "recomputing all, but not queries, keys and values (planned models)")
    overlap: bool | None = setting(
        None,
        "gradients are reduced while others are computed, and messages between stages leave meanwhile; not after "
        "(planned models)",
    )
    backward_prefetch: bool | None = setting(
        None, "on the way back a layer is gathered while the one before it computes; not after (planned models)"
    )
    reduce_fp32: bool | None = setting(None, "gradients of two bytes are reduced as fp32 (planned models)")
    master_weights: bool | None = setting(
        None, "beside weights of two bytes, others in fp32, with their gradients and moments (planned models)"
    )
    tp_overlap: bool | None = setting(
        None,
        "beside sequence_parallel, tokens are gathered and scattered in parts while products work on others; the plan "
        "has the part that is waited for (planned models)",
    )
    share_optimizer: bool | None = setting(None, "replicas share the optimizer's state, as in ZeRO-1 (planned models)")
    share_gradients: bool | None = setting(
        None,
        "beside a pipeline, ranks of fsdp share gradients too, as in ZeRO-2: those of a stage are whole from its first "
        "backward until its last, and then reduced to shards; not the whole step long (planned models)",
    )
    dropout: bool | None = setting(None, "dropout, of which a mask is kept for backward (planned models)")
    fused_loss: bool | None = setting(None, "the loss is one kernel, and keeps no copy of the logits (planned models)")
    torch_loss: str | None = setting(
        None,
        "the loss as PyTorch takes it: eager, with gradients in fp32 twice over beside its logarithms; compiled, with "
        "the logits as they are, and their gradients (planned models)",
        choices=TORCH_LOSSES,
    )
    mtp: int | None = setting(
        None,
        "modules that predict further tokens, each a block more, behind the last one (planned models)",
        low=1,
        high=8,
    )
    scatter_gather: bool | None = setting(
        None,
        "beside tp, each rank sends its part of a message between stages, which is gathered there, as in Megatron-LM "
        "(planned models)",
    )
    shared_experts: int | None = setting(None, "experts that every token goes to (planned models)", low=1, high=64)
    dense_layers: int | None = setting(None, "first blocks without experts (planned models)", low=1, high=1024)
    dense_ffn: int | None = setting(
        None, "width inside of the MLP of blocks without experts (planned models)", low=1, high=1 << 22
    )
    dataset: str | None = setting(None, "what to learn from", choices=DATASETS)
    masked: float | None = setting(
        None, "part of a text that is no target, as prompts are not; of each another (gpt, moe)", low=0.01, high=0.95
    )
    data_dir: str | None = setting(None, "a folder with the real MNIST idx files, for the dataset digits")
    steps: int | None = setting(None, "optimizer steps", low=1, high=1_000_000)
    epochs: int | None = setting(None, "passes over the training data, instead of steps", low=1, high=10_000)
    global_batch: int = setting(64, "samples in one optimizer step, over all devices", low=1, high=1_048_576)
    microbatches: int | None = setting(None, "pieces a batch is cut into (pipeline)", low=1, high=65_536)
    schedule: str | None = setting(None, "order of a pipeline's microbatches", choices=SCHEDULES)
    schedule_file: str | None = setting(
        None,
        "an order as CSV in PyTorch's form, instead of a schedule: on the command line a file, else its text",
    )
    stages_per_rank: int | None = setting(
        None, "stages on each device, in the schedules that can have several (pipeline)", low=1, high=64
    )
    receives: str | None = setting(
        None,
        "when a pipeline's ranks receive, in its plan: just before what needs it, as in PyTorch, where receives run in "
        "the background; or as soon as it is sent, as if they blocked",
        choices=RECEIVES,
    )
    compile_stage: str | None = setting(
        None,
        "compile what a stage computes; it makes no pipeline of it (layer_split, pipeline)",
        choices=STAGE_COMPILERS,
    )
    split: tuple[int, ...] | None = setting(None, "layers of each stage, by hand: 2,1,1 (layer_split, pipeline)")
    dp: int | None = setting(None, "replicas of the model", low=1, high=MAX_DEVICES)
    fsdp: int | None = setting(None, "devices that share one replica", low=1, high=MAX_DEVICES)
    tp: int | None = setting(None, "devices that each layer is cut over", low=1, high=MAX_DEVICES)
    cp: int | None = setting(None, "devices that each sequence is cut over", low=1, high=MAX_DEVICES)
    pp: int | None = setting(None, "devices that the layers are dealt out to, as stages", low=1, high=MAX_DEVICES)
    ep: int | None = setting(None, "devices that the experts are dealt out to", low=1, high=MAX_DEVICES)
    expert_tp: int | None = setting(
        None, "tensor ranks that cut each expert: all, or 1, and it is whole (moe)", low=1, high=MAX_DEVICES
    )
    sequence_parallel: bool | None = setting(
        None, "between the matrices that tensor ranks share, each of them has part of the tokens (a mesh with tp)"
    )
    attention: str | None = setting(
        None, "how attention gets the keys and values of other devices (context)", choices=ATTENTIONS
    )
    balance: str | None = setting(
        None,
        "how a sequence is dealt out: an early and a late chunk each, or one run of tokens (context)",
        choices=BALANCES,
    )
    accumulate: int | None = setting(None, "micro-steps whose gradients make one optimizer step", low=1, high=1024)
    sync_every_microstep: bool | None = setting(
        None, "reduce gradients after every micro-step, instead of once in a step (no_sync)"
    )
    bucket_mb: float | None = setting(None, "size of DDP's gradient buckets, in MiB", low=1e-6, high=65_536)
    sync_every: int | None = setting(
        None, "steps that each rank takes alone before parameters are averaged (local_sgd)", low=1, high=1_000_000
    )
    leave_out: str | None = setting(
        None,
        "layers that ranks leave out, as in a model of branches: RANK:LAYER, as 0:block1,1:block2 (ddp)",
    )
    freeze: str | None = setting(None, "layers that are not trained, as in fine-tuning: embed,block1")
    find_unused: bool | None = setting(
        None, "look in each pass for parameters outside of the loss, whose gradients count as 0 (ddp)"
    )
    compress: str | None = setting(None, "how gradients are made smaller before they are sent (ddp)", choices=COMPRESS)
    compress_rank: int | None = setting(None, "columns of a matrix's factors (powersgd)", low=1, high=1024)
    precision: str | None = setting(
        None, "numbers of weights, gradients, activations and optimizer state", choices=PRECISIONS
    )
    recompute: str | None = setting(
        None, "activations computed again in backward instead of kept: none, what is cheap, all", choices=RECOMPUTE
    )
    clip: float | None = setting(
        None, "largest norm of all gradients together; larger ones are scaled", low=1e-6, high=1e6
    )
    optimizer: str | None = setting(None, "sgd with momentum 0.9; adamw, as published models have", choices=OPTIMIZERS)
    lr: float | None = setting(None, "learning rate", low=0.0, high=1e3)
    seed: int = setting(0, "seed of weights, data order and synthetic data", low=0, high=2**31 - 1)
    machine: str = setting("local", "the machine to simulate on")
    slow_rank: str | None = setting(
        None, "ranks that take so many times as long to compute, to simulate: RANK:FACTOR, as 5:2 or 5:2,9:1.5"
    )
    slow_link: str | None = setting(
        None,
        "links between two ranks with so many times less bandwidth, and as many times the latency, to simulate: "
        "RANK-RANK:FACTOR, as 3-4:10",
    )
    paced: str | None = setting(
        None,
        "run a scale model of this machine: small tensors, and every op as long as there, times the dilation",
    )
    dilation: float | None = setting(
        None,
        "how many times slower a scale model is than what it shows; by default a step takes a second or two",
        low=1e-9,
        high=1e12,
    )
    device: str = setting("auto", "where a real run computes", choices=DEVICES)
    parity_steps: int = setting(
        3,
        "first steps compared with one device that starts from the same weights (no model has "
        "dropout or batch normalisation, whose numbers depend on how samples are shared out)",
        low=0,
        high=1000,
    )
    record: bool = setting(True, "record every op of a real run")
    timeout: float = setting(
        60.0, "seconds that a rank waits for another before it takes it for lost", low=1.0, high=3600.0
    )
    evaluate_every: int | None = setting(
        None, "optimizer steps from one look at the validation samples to the next", low=1, high=1_000_000
    )
    save_every: int | None = setting(
        None, "optimizer steps from one checkpoint to the next; none are made without it", low=1, high=1_000_000
    )
    resume: str | None = setting(
        None, "go on from a run's last checkpoint: RUN_ID, or from the one after a step: RUN_ID:STEP"
    )
    measure_memory: bool = setting(True, "measure memory in a few more steps, when the training is done")
    fault: str | None = setting(
        None,
        "break a run on purpose, as kind@rank:step, slow@rank:step:seconds; a rank "
        + "; ".join(f"{kind}: {text}" for kind, text in KINDS.items()),
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name)))
        parse_fault(self.fault)
        for name in ("slow_rank", "slow_link"):
            slow.check(name, getattr(self, name))

    # --- to and from other forms -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, every field."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["split"] = list(self.split) if self.split is not None else None
        return out

    def to_params(self) -> dict[str, str]:
        """URL parameters: only what differs from the default, as short text."""
        return {
            f.name.replace("_", "-"): as_text(getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """A JSON object with any of the fields; dashes and underscores are the same."""
        if not isinstance(values, dict):
            raise SpecError("not_json", "spec", values)
        known = {f.name for f in fields(cls)}
        named = {str(k).replace("-", "_"): v for k, v in values.items()}
        for name in named:
            if name not in known:
                raise SpecError("unknown_setting", name, named[name], suggest=closest(name, known))
        _check_once(values)
        return cls(**named)

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> Self:
        """Text values, as a URL or a command line gives them; names that are not settings are an error."""
        by_name = {f.name: f for f in fields(cls)}
        values = {}
        for key, text in params.items():
            name = key.replace("-", "_")
            if name not in by_name:
                raise SpecError("unknown_setting", key, text, suggest=closest(name, by_name))
            values[name] = parse_text(by_name[name], text)
        _check_once(params)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        return cls.from_dict(spec_file.read(path))

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)


def _check_once(given: Mapping[str, Any]) -> None:
    """A setting written once with dashes and once with underscores has two values, and neither is meant more."""
    for name in given:
        other = name.replace("_", "-")
        if other != name and other in given:
            raise SpecError("given_twice", name, given[name])
