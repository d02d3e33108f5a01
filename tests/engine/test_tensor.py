"""Tensor and sequence parallelism: what a rank holds, computes and sends by closed forms, and what real runs did."""

from __future__ import annotations

import functools

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.collectives import rounds_and_bytes
from engine.job import Job, prepare
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished, holds

HIDDEN, HEADS, CONTEXT, BATCH, LAYERS = 48, 12, 24, 16, 2
SMALL = {
    "model": "gpt", "hidden": HIDDEN, "heads": HEADS, "context": CONTEXT, "global_batch": BATCH, "layers": LAYERS,
    "dataset": "synthetic",
}  # fmt: skip
VOCABULARY = 96  # of the dataset synthetic, 64, rounded up to a multiple of 48
WHOLE = 4 * BATCH * CONTEXT * HIDDEN  # bytes of a block's output
LOSS = [("all_reduce", "activation", 4 * BATCH * CONTEXT)] * 3  # largest logit, sum of exponentials, the target's
SHORT = {"steps": 4, "device": "cpu"}


def job_of(mode: str, devices: int, **settings) -> Job:
    return prepare(Spec(mode=mode, devices=devices, **(SMALL | settings)))


def ops_of(mode: str, devices: int, **settings) -> tuple[Op, ...]:
    plan = modes.plan(job_of(mode, devices, **settings))
    assert plan.roles == (0,) * devices
    return plan.programs[0].ops


def collectives(ops: tuple[Op, ...]) -> list[tuple[str, str, int]]:
    return [(op.kind, op.payload, op.bytes) for op in ops if op.axis]


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_embedding_and_blocks_are_summed_on_the_way_down_and_head_and_blocks_on_the_way_back(devices):
    down, back = ("all_reduce", "activation", WHOLE), ("all_reduce", "gradient", WHOLE)
    planned = [down] * (1 + 2 * LAYERS) + LOSS + [back] * (1 + 2 * LAYERS)
    assert collectives(ops_of("tensor", devices)) == planned


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_with_sequence_parallelism_tokens_are_gathered_before_a_pair_and_scattered_after_it(devices):
    gather, scatter = ("all_gather", WHOLE // devices), ("reduce_scatter", WHOLE)
    blocks = [gather, scatter] * 2 * LAYERS
    forward = [scatter, *blocks, gather]  # the embedding gives each rank its part; the head takes all tokens
    position = ("all_gather", 4 * CONTEXT * HIDDEN // devices)  # the gradient of a weight, whatever the batch
    backward = [scatter, *blocks, position, gather]
    planned = [(k, "activation", b) for k, b in forward] + LOSS + [(k, "gradient", b) for k, b in backward]
    norms = [("all_reduce", "gradient", 4 * HIDDEN)] * (2 * LAYERS + 1)
    assert collectives(ops_of("sequence", devices)) == planned + norms


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_block_s_gathers_and_scatters_send_as_much_as_its_all_reduces(devices):
    """Korthikanti et al. 2022, section 4.2.2: a ring all-reduce is a reduce-scatter and an all-gather."""

    def sent(mode: str) -> float:
        inside = [
            op for op in ops_of(mode, devices) if op.part.startswith("block") and not op.part.endswith(("1", "2"))
        ]
        return sum(rounds_and_bytes(op, devices)[1] for op in inside if op.axis)

    assert sent("sequence") == pytest.approx(sent("tensor"))
    assert sent("tensor") == pytest.approx(4 * LAYERS * 2 * (devices - 1) / devices * WHOLE)


@pytest.mark.parametrize("mode", ["tensor", "sequence"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_rank_holds_its_shards_and_all_of_norms_and_positions(mode, devices):
    cut = LAYERS * 12 * HIDDEN**2 + 2 * VOCABULARY * HIDDEN  # qkv 3, proj 1, up 4, down 4; tokens in and out
    kept = LAYERS * 2 * HIDDEN + CONTEXT * HIDDEN + HIDDEN
    memory = modes.plan(job_of(mode, devices, optimizer="adamw")).programs[0].memory
    size = 4 * (cut // devices + kept)
    counters = 4 * (6 * LAYERS + 4)  # AdamW's, of steps
    rows = 4 * VOCABULARY * HIDDEN  # of which autograd gives each rank the whole gradient
    gradients = size - rows // devices + rows
    assert memory == {"parameters": size, "gradients": gradients, "optimizer": 2 * size + counters}


@pytest.mark.parametrize("mode", ["tensor", "sequence"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_rank_computes_its_share_of_the_blocks_and_of_the_head(mode, devices):
    blocks = LAYERS * BATCH * (2 * CONTEXT * 12 * HIDDEN**2 + 4 * CONTEXT**2 * HIDDEN)
    head = BATCH * 2 * CONTEXT * HIDDEN * VOCABULARY
    ops = ops_of(mode, devices)
    forward = sum(op.flops for op in ops if op.kind == "forward")
    assert forward == blocks // devices + head // devices
    assert sum(op.flops for op in ops if op.kind == "backward") == 2 * forward


def test_sequence_parallelism_keeps_less_for_the_way_back():
    saved = {mode: sum(op.saved for op in ops_of(mode, 4)) for mode in ("tensor", "sequence")}
    # Of each of two norms a block and the head's: its input, and beside its output that without weight and the scales.
    norms = 2 * LAYERS + 1
    assert saved["tensor"] - saved["sequence"] == norms * (2 * WHOLE + 4 * BATCH * CONTEXT) * 3 // 4


def test_an_mlp_is_cut_in_pairs_and_an_odd_layer_stays_whole():
    """fc1 by columns, fc2 by rows, out whole; nobody needs the gradient of the image."""
    ops = ops_of("tensor", 2, model="mlp", layers=2, hidden=32, heads=None, context=None)
    assert collectives(ops) == [("all_reduce", "activation", 4 * BATCH * 32)]
    plan = modes.plan(prepare(Spec(mode="tensor", model="mlp", layers=2, hidden=32)))
    parameters = 784 * 16 + 16 + 32 * 16 + 32 + 32 * 10 + 10
    assert plan.programs[0].memory["parameters"] == 4 * parameters


def test_a_second_pair_of_an_mlp_sums_the_gradient_of_its_input():
    ops = ops_of("tensor", 2, model="mlp", layers=3, hidden=32, heads=None, context=None)
    forward = [("all_reduce", "activation", 4 * BATCH * width) for width in (32, 10)]
    assert collectives(ops) == [*forward, ("all_reduce", "gradient", 4 * BATCH * 32)]


@pytest.mark.parametrize(
    ("settings", "works"),
    [
        ({"mode": "tensor", "model": "gpt", "hidden": 56, "heads": 28, "devices": 8}, (1, 2, 4)),
        ({"mode": "tensor", "model": "gpt", "hidden": 84, "heads": 42, "devices": 7}, (1, 2, 3, 6)),  # 144 tokens
        ({"mode": "sequence", "model": "gpt", "heads": 8, "context": 12, "devices": 8}, (1, 2, 4)),
        ({"mode": "tensor", "model": "mlp", "hidden": 7, "devices": 2}, (1, 7)),
        ({"mode": "tensor", "model": "cnn", "devices": 3}, (1, 2, 4, 5, 10, 20)),
    ],
)
def test_what_does_not_divide_is_refused_with_degrees_that_do(settings, works):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(**settings))
    assert refused.value.code == "devices_divide"
    assert refused.value.suggest[: len(works)] == works
    for devices in refused.value.suggest:
        prepare(Spec(**(settings | {"devices": devices})))


def test_the_simulator_pays_for_the_all_reduces():
    """On links that take no time the step is shorter by exactly what the collectives took."""
    spec = Spec(mode="tensor", devices=4, machine="h100", **SMALL)
    timeline = predict(spec).timeline
    communication = timeline.where((timeline["rank"] == 0) & (timeline["lane"] == "tp"))
    compute = timeline.where((timeline["rank"] == 0) & (timeline["lane"] == "compute"))
    busy = sum((t["end"] - t["start"]).sum() for t in (communication, compute))
    assert predict(spec).step_time == pytest.approx(busy)


# --- PyTorch as the oracle, in one process that plays one of many ranks ----------------------------------------------


@pytest.fixture
def one_of_many(monkeypatch):
    """devices -> the calls that this process will make as rank 1 of a group whose collectives move nothing."""
    dist = pytest.importorskip("torch.distributed")
    import torch.distributed._functional_collectives as funcol
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from engine.real.functional import CALLS
    from engine.real.recorder import Recorder

    for name in ("wait_tensor", *(name for names in CALLS.values() for name in names if hasattr(funcol, name))):
        monkeypatch.setattr(funcol, name, getattr(funcol, name))  # what is wrapped from here on is put back
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(Recorder, "collective", lambda self, kind, size, *, axis: calls.append((kind, size)))

    def join(devices: int) -> list[tuple[str, int]]:
        dist.init_process_group("fake", rank=1, world_size=devices, store=FakeStore())
        return calls

    yield join
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mode", "devices", "settings"),
    [
        ("tensor", 16, {"hidden": 64, "heads": 16}),
        ("sequence", 16, {"hidden": 64, "heads": 16, "context": 32}),
        ("tensor", 20, {"model": "cnn", "hidden": None, "heads": None, "context": None, "layers": None}),
        ("tensor", 64, {"model": "mlp", "layers": 5, "hidden": 128, "heads": None, "context": None}),
    ],
)
def test_pytorch_would_do_the_same_on_many_ranks(mode, devices, settings, one_of_many, tmp_path, monkeypatch):
    """The same collectives in the same order, of as many bytes; and as many bytes of what stays in memory, of gradients
    before they are laid out as their parameters are."""
    import torch

    from engine.modes.tensor import run
    from engine.real.recorder import Recorder
    from engine.real.training import Place

    job = job_of(mode, devices, **settings)
    planned = modes.plan(job).programs[0]
    calls = one_of_many(devices)
    recorder = Recorder(tmp_path / "spans", 1, 0, enabled=False)
    training = modes.run(mode).training(job, Place(1, devices, torch.device("cpu"), recorder, tmp_path))
    lay_out, gradients = run.lay_out_gradients, []

    def seen(parameters) -> None:
        parameters = list(parameters)
        gradients.extend(p.grad for p in parameters)
        lay_out(parameters)

    monkeypatch.setattr(run, "lay_out_gradients", seen)
    calls.clear()
    training.make_gradients(0)
    training.optimizer.step()
    assert calls == [(op.kind, op.bytes) for op in planned.ops if op.axis]
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
    momenta = [training.optimizer.state[p]["momentum_buffer"] for p in parameters]
    tensors = {"parameters": parameters, "gradients": gradients, "optimizer": momenta}
    assert planned.memory == {name: sum(map(_local_bytes, held)) for name, held in tensors.items()}


def _local_bytes(tensor) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


# --- real runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_two(launcher, tmp_path_factory):
    """Mode -> the result of its run on two ranks, and its last step: one run for all tests that look at it."""

    @functools.cache
    def on_two(mode: str) -> tuple[dict, Timeline]:
        runs_dir = tmp_path_factory.mktemp("on_two")
        result = finished(Spec(mode=mode, devices=2, **SMALL, **SHORT), launcher, runs_dir)
        return result, Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3)

    return on_two


@pytest.mark.real
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_a_transformer_equals_one_device_and_does_what_was_planned(mode, devices, on_two, launcher, runs_dir):
    if devices == 2:
        holds(on_two(mode)[0])
    else:
        holds(finished(Spec(mode=mode, devices=devices, **SMALL, **SHORT), launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_a_transformer_under_adamw(mode, launcher, runs_dir):
    holds(finished(Spec(mode=mode, devices=2, **SMALL, **SHORT, optimizer="adamw"), launcher, runs_dir))


@pytest.mark.real
def test_eight_ranks(launcher, runs_dir):
    settings = SMALL | {"hidden": 32, "heads": 8, "layers": 1}
    holds(finished(Spec(mode="sequence", devices=8, **settings, **SHORT), launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (2, {"model": "cnn"}),
        (4, {"model": "cnn"}),
        (2, {"model": "mlp", "layers": 1, "hidden": 8}),
        (3, {"model": "mlp", "layers": 3, "hidden": 24}),
        (4, {"model": "mlp", "layers": 4, "hidden": 16}),
    ],
)
def test_linear_layers_in_pairs(devices, settings, launcher, runs_dir):
    holds(finished(Spec(mode="tensor", devices=devices, **settings, **SHORT), launcher, runs_dir))


@pytest.mark.real
def test_a_collective_is_named_by_what_was_called(on_two):
    """gloo carries out a reduce-scatter as an all-reduce of the same tensor; only the call knows."""
    _, timeline = on_two("sequence")
    kinds = timeline["kind"][(timeline["rank"] == 1) & (timeline["lane"] == "tp")].tolist()
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "all_gather": 4 * LAYERS + 3, "reduce_scatter": 4 * LAYERS + 2, "all_reduce": 2 * LAYERS + 1 + 3,
    }  # fmt: skip


@pytest.mark.real
def test_compute_does_not_count_the_time_in_which_a_rank_waits(on_two):
    _, timeline = on_two("tensor")
    spans = sorted((s for s in timeline.spans() if s.rank == 0), key=lambda s: s.start)
    moves, computes = ([s for s in spans if s.lane == lane] for lane in ("tp", "compute"))
    both = sum(max(0.0, min(c.end, m.end) - max(c.start, m.start)) for c in computes for m in moves)
    assert both < 0.1 * sum(m.end - m.start for m in moves)


@pytest.mark.real
@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_a_wrong_gradient_on_one_rank_is_seen(mode, launcher, runs_dir):
    """The negative control of parity, where no rank holds all of a gradient."""
    spec = Spec(mode=mode, devices=2, fault="gradient@1:2", **SMALL, **SHORT)
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False
    assert parity["grad_max_rel_diff"] == pytest.approx(0.5, abs=1e-2)
