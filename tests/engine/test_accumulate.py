"""Gradient accumulation: what is reduced when, what is kept meanwhile, and gradients equal to the large batch's."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.machine import machine
from engine.job import prepare
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Span
from tests.engine.proof import BRIEF, finished, holds

SMALL = {"model": "mlp", "layers": 2, "hidden": 32, "global_batch": 32}
ACCUMULATE = {"accumulate": 4}
SYNCED = {"accumulate": 4, "sync_every_microstep": True}
REPLICAS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")


def plan_of(mode: str, step: int = 2, devices: int = 2, **settings):
    return modes.plan(prepare(Spec(mode=mode, devices=devices, **SMALL | settings)), step)


def reduced(plan) -> list[int | None]:
    """The microbatch of every collective that reduces gradients."""
    return [
        op.microbatch
        for op in plan.program(0).ops
        if op.payload == "gradient" and op.kind in ("all_reduce", "reduce_scatter")
    ]


@pytest.mark.parametrize("mode", REPLICAS)
def test_four_micro_steps_are_one_round_of_reductions_with_no_sync_and_four_without(mode):
    once, each, large = (reduced(plan_of(mode, **s)) for s in (ACCUMULATE, SYNCED, {}))
    assert set(once) == {3} and len(once) == len(large)
    assert each == [k for k in range(4) for _ in large]
    assert set(large) == {None}


@pytest.mark.parametrize("mode", ["single", *REPLICAS])
def test_every_op_of_a_micro_step_carries_its_index_and_a_quarter_of_the_work(mode):
    devices = 1 if mode == "single" else 2
    whole, cut = plan_of(mode, devices=devices), plan_of(mode, devices=devices, accumulate=4)
    kinds = ("load", "forward", "backward")
    ops, pieces = ([op for op in plan.program(0).ops if op.kind in kinds] for plan in (whole, cut))
    assert Counter(op.microbatch for op in pieces) == dict.fromkeys(range(4), len(ops))
    assert sum(op.flops for op in pieces) == sum(op.flops for op in ops)
    assert [op.bytes for op in pieces if op.kind == "load"] == [ops[0].bytes // 4] * 4
    last = cut.program(0).ops[-1 if mode != "zero1" else -3]
    assert (last.kind, last.microbatch) == ("optimizer", None)


def test_ddp_rebuilds_its_buckets_after_the_first_reduction_and_not_after_the_first_step():
    settings = {"bucket_mb": 0.001}

    def rebuilt(**more) -> list[tuple[int, int | None]]:
        ops = [(step, op) for step in range(3) for op in plan_of("ddp", step, **settings, **more).program(0).ops]
        return [(step, op.microbatch) for step, op in ops if op.part == "bucket order"]

    assert rebuilt() == [(1, None)]
    assert rebuilt(**ACCUMULATE) == [(1, 0)]
    assert rebuilt(**SYNCED) == [(0, 1)]


def test_gradients_that_wait_for_the_last_micro_step_wait_whole():
    """fully_shard keeps full-size gradients with no_sync; reduced after every micro-step they are shards (B20)."""
    job = prepare(Spec(mode="fsdp", devices=4, **SMALL))
    whole = sum(layer.param_bytes for layer in job.layers)
    held = {
        name: plan_of("fsdp", devices=4, **settings).program(0).memory["gradients"]
        for name, settings in {"at once": {}, "no_sync": ACCUMULATE, "synced": SYNCED}.items()
    }
    # 32 rows are 8 a rank; the output's 10 rows are 3, with padding.
    assert held["at once"] == held["synced"] == 4 * (8 * 785 + 8 * 33 + 3 * 33)
    assert held["no_sync"] == whole


def test_a_quarter_of_the_activations_is_alive_at_a_time():
    peaks = [simulate(plan_of("single", devices=1, **s), machine("h100")) for s in ({}, ACCUMULATE)]
    standing = sum(peaks[0].plan.program(0).memory.values())
    whole, cut = (simulation.peak_memory[0] - standing for simulation in peaks)
    assert whole == 4 * cut > 0


def test_a_micro_step_begins_when_the_gradients_of_the_last_one_have_arrived():
    simulation = simulate(plan_of("ddp", **SYNCED), machine("unit"))
    spans = list(simulation.timeline.spans())
    for k in range(3):
        arrived = max(s.end for s in spans if s.kind == "all_reduce" and s.microbatch == k)
        assert min(s.start for s in spans if s.kind == "load" and s.microbatch == k + 1) >= arrived


def test_micro_steps_must_divide_a_device_s_samples():
    with pytest.raises(SpecError) as error:
        prepare(Spec(mode="ddp", devices=2, global_batch=24, accumulate=5))
    told = "accumulate must divide the 12 samples of a device in a step; it is 5. Try: 3, 4, 6."
    assert str(error.value) == told


@pytest.mark.parametrize(("mode", "devices"), [("single", 1), ("local_sgd", 2)])
def test_where_nothing_is_reduced_it_is_not_reduced_after_every_micro_step(mode, devices):
    with pytest.raises(SpecError) as error:
        prepare(Spec(mode=mode, devices=devices, **SYNCED))
    assert error.value.code == "option_of_mode"
    assert error.value.values["reason"] in str(error.value)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("layer_split", {}),
        ("pipeline", {"microbatches": 4}),
        ("pipeline", {"microbatches": 4, "schedule": "zbv", "layers": 4}),
        ("hybrid", {"microbatches": 4, "pp": 2, "fsdp": 2, "devices": 4}),
    ],
)
def test_stages_go_through_the_whole_schedule_once_for_each_micro_step(mode, settings):
    """All that a schedule does for half of the batch, twice, with microbatches that count on; one update. Beside the
    second's whole gradients of sharded stages are the shards of the first's."""
    each = settings.get("microbatches", 1)
    halves = plan_of(mode, **settings, accumulate=2)
    half = plan_of(mode, **settings | {"global_batch": SMALL["global_batch"] // 2})
    for rank in range(halves.world_size):
        once = [op for op in half.program(rank).ops if op.kind != "optimizer"]
        first = [replace(op, microbatch=0) if op.kind == "load" else op for op in once]
        second = [op if op.microbatch is None else replace(op, microbatch=op.microbatch + each) for op in first]
        *twice, update = halves.program(rank).ops
        assert twice == [*first, *second] and update.kind == "optimizer"
        memory = half.program(rank).memory
        shards = memory["parameters"] if "fsdp" in settings else 0
        assert halves.program(rank).memory == memory | {"gradients": memory["gradients"] + shards}


def test_microbatches_must_divide_the_samples_of_a_micro_step():
    with pytest.raises(SpecError) as error:
        prepare(Spec(mode="pipeline", devices=2, global_batch=24, accumulate=2, microbatches=8))
    assert (error.value.code, error.value.suggest) == ("batch_by_microbatches", (4, 6, 12))


@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_tensor_ranks_take_a_quarter_of_their_samples_at_a_time_and_sum_in_each_micro_step(mode):
    """Gradients of norms, which have seen a part of the tokens, are summed once."""
    plans = [modes.plan(prepare(Spec(mode=mode, devices=2, model="gpt", accumulate=k))).program(0).ops for k in (1, 4)]
    sent = [[op for op in ops if op.axis and not (op.kind == "all_reduce" and "norm" in op.part)] for ops in plans]
    sent = [[op for op in ops if op.part != "embed.position"] for ops in sent]  # as large for any number of samples
    assert len(sent[1]) == 4 * len(sent[0])
    for i, op in enumerate(sent[1]):
        whole = sent[0][i % len(sent[0])]
        assert (op.kind, op.part, 4 * op.bytes, op.microbatch) == (
            whole.kind,
            whole.part,
            whole.bytes,
            i // len(sent[0]),
        )
    norms = [[op for op in ops if op.kind == "all_reduce" and "norm" in op.part] for ops in plans]
    assert norms[0] == norms[1] and bool(norms[0]) == (mode == "sequence")


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("tensor", {"devices": 2}),
        ("sequence", {"devices": 2}),
        ("context", {"devices": 2}),
        ("hybrid", {"devices": 4, "fsdp": 2, "tp": 2}),
        ("hybrid", {"devices": 4, "dp": 2, "tp": 2}),
        ("hybrid", {"devices": 2, "tp": 2, "sequence_parallel": True}),
        ("hybrid", {"devices": 4, "fsdp": 2, "cp": 2}),
    ],
)
def test_ranks_that_share_samples_accumulate_too(mode, settings, launcher, runs_dir):
    model = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}
    spec = Spec(mode=mode, **settings, **model, accumulate=2, **BRIEF)
    holds(finished(spec, launcher, runs_dir))


GPT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}
MOE = GPT | {"model": "moe", "experts": 4}
STAGES = {"microbatches": 2, "pp": 2, "devices": 4}


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("pipeline", SMALL | {"microbatches": 4}),
        ("pipeline", SMALL | {"microbatches": 4, "schedule": "zbv", "layers": 4}),
        ("pipeline", GPT | {"microbatches": 2, "recompute": "full"}),
        ("layer_split", SMALL | {"clip": 0.5}),
        ("data_parallel", SMALL),
        ("expert", MOE),
        ("hybrid", GPT | STAGES | {"fsdp": 2}),
        ("hybrid", GPT | STAGES | {"tp": 2, "sequence_parallel": True}),
        ("hybrid", GPT | STAGES | {"dp": 2, "schedule": "interleaved_zero_bubble"}),
        ("hybrid", MOE | STAGES | {"ep": 2}),
        ("hybrid", MOE | {"devices": 4, "dp": 2, "ep": 2}),
        ("hybrid", MOE | {"devices": 4, "fsdp": 2, "ep": 2}),
    ],
    ids="1f1b zbv recomputed layers scattered experts pp-fsdp pp-tp pp-dp pp-ep dp-ep fsdp-ep".split(),
)
def test_stages_and_experts_accumulate_too(mode, settings, launcher, runs_dir):
    """torchtitan#1733: torch divides all gradients that are there by the number of microbatches after a schedule, also
    those of the micro-steps before (ratio 0.5 to 0.6)."""
    spec = Spec(**{"mode": mode, "devices": 2, "accumulate": 2} | BRIEF | settings)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["parity"]["grad_max_rel_diff"] < 1e-5


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "settings"),
    [("single", ACCUMULATE), ("ddp", ACCUMULATE), ("zero1", SYNCED), ("fsdp", ACCUMULATE), ("hsdp", SYNCED)],
)
def test_real_micro_steps_are_those_planned_and_add_up_to_the_large_batch(mode, settings, launcher, runs_dir):
    """Parity is with one device that takes the whole batch at once: a micro-step's loss has to be divided by four."""
    devices = 1 if mode == "single" else 2
    spec = Spec(mode=mode, devices=devices, **SMALL, **settings, steps=4, device="cpu")
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["parity"]["grad_max_rel_diff"] < 1e-5


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_a_collective_belongs_to_the_micro_step_that_called_it(late, tmp_path, monkeypatch):
    """A backend's thread may take up what was called in the background in one micro-step when that one is over, in the
    next one or after the last."""
    from engine.real import recorder as module

    recorder = module.Recorder(tmp_path / "spans", 0, 0)
    called: list[int] = []
    monkeypatch.setattr(
        module, "communications", lambda *_, **__: [module.Event("all_reduce", at, at + 1, 64) for at in called]
    )
    recorder.begin_step(0)
    for k in range(2):
        with recorder.microstep(k):
            recorder.background("all_reduce", "block1.experts", "gradient", 64, axis="dp")
            if not late:
                called.append(recorder.now())
    if late:
        called += [recorder.now()] * 2
    recorder.end_step()
    recorder.flush()
    spans = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    assert [dict(zip(Span._fields, span, strict=True))["microbatch"] for span in spans] == [0, 1]
