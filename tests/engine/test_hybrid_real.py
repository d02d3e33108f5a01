"""Meshes of several axes on processes: what PyTorch would call on any rank of a large one, what real runs did."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest

from engine import modes, schedules
from engine.job import prepare
from engine.outcome.conform import conform
from engine.plan import MESSAGES, Plan, Program
from engine.schedules.csv_form import format_order
from engine.schedules.gathers import add_gathers
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import BRIEF, finished, holds
from tests.engine.test_hybrid import AXES, FOUR, MOE, SEQUENCES, SHORT, SMALL, spec_of

# --- PyTorch as the oracle --------------------------------------------------------------------------------------------


def test_stages_are_gathered_and_reduced_where_torch_s_runtime_does_it():
    """Over a grid of ranks, stages a rank and microbatches; from four stages a rank on, one has to be given up."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_unshard_reshard

    compared = 0
    names = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
    for name, ranks, stages, microbatches in product(names, (1, 2, 4), (1, 2, 5), (1, 4, 8)):
        if (schedules.TABLE[name].stages_per_rank or stages) != stages:
            continue
        if schedules.check(name, ranks, stages, microbatches):
            continue
        order = schedules.order(name, ranks, microbatches, stages)
        for actions in order:
            cells = [_Action.from_str(word) for word in _words([actions])]
            theirs = _add_reduce_grad(_add_unshard_reshard(cells), microbatches)
            assert _words(add_gathers([actions])) == [str(action) for action in theirs]
            compared += 1
    assert compared > 200


def _words(order: list) -> list[str]:
    return format_order(order).strip().split(",")


@pytest.mark.parametrize(
    ("mode", "degrees", "rank", "settings"),
    [
        ("fsdp", {"fsdp": 64}, 63, {}),
        ("fsdp", {"fsdp": 1024}, 40, {}),
        ("hsdp", {"dp": 8, "fsdp": 8}, 21, {}),
        ("hsdp", {"dp": 32, "fsdp": 32}, 1000, {}),
        ("hybrid", {"fsdp": 8, "tp": 8}, 33, {}),
        ("hybrid", {"dp": 4, "fsdp": 32, "tp": 8}, 517, {"clip": 1.0}),
        ("hybrid", {"pp": 4, "fsdp": 4, "tp": 4}, 22, {"microbatches": 4, "clip": 1.0}),
        ("hybrid", {"pp": 4, "dp": 2, "fsdp": 1, "tp": 8}, 41, {"microbatches": 4, "clip": 1.0, **SEQUENCES}),
        ("hybrid", {"dp": 2, "fsdp": 4, "cp": 4, "tp": 2}, 43, {"clip": 1.0, **SEQUENCES}),
        ("hybrid", {"pp": 4, "dp": 2, "fsdp": 4, "cp": 4, "tp": 8}, 1000, {"microbatches": 4, "context": 64}),
        ("hybrid", {"pp": 4, "dp": 2, "fsdp": 16, "tp": 8}, 1000, {"schedule": "zbv", "layers": 6, "microbatches": 2}),
    ],
)
def test_pytorch_would_do_the_same_on_many_ranks(mode, degrees, rank, settings, tmp_path):
    """Every collective and message of a whole step, by kind, bytes and order on its lane; and what stays in memory."""
    pytest.importorskip("torch")
    from engine.real.clip import clip
    from engine.real.recorder import Recorder
    from tests.engine.oracle import playing

    replicas = degrees.get("dp", 1) * degrees["fsdp"]
    sizes = {"heads": 8, "global_batch": settings.get("microbatches", 1) * replicas}
    given = {"fsdp": {}, "hsdp": degrees, "hybrid": dict.fromkeys(AXES, 1) | degrees}[mode]
    job = prepare(Spec(mode=mode, devices=math.prod(degrees.values()), **(SMALL | given | sizes | settings)))
    plan = modes.plan(job)
    with playing(job, rank, tmp_path) as (training, calls):
        calls.seen.clear()
        training.make_gradients(0)
        if job.spec.clip is not None:
            clip(training, Recorder(tmp_path / "norms", rank, 0, enabled=False), job.spec.clip)
        training.optimizer.step()
        seen = list(calls.seen)
        parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
        momenta = [training.optimizer.state[p]["momentum_buffer"] for p in parameters]
        kept = {"parameters": _padded(parameters), "optimizer": sum(_local(m).nbytes for m in momenta)}
    planned = [op for op in plan.program(rank).ops if op.axis]
    for lane in set(map(_lane, planned)):
        want, have = ([(op.kind, op.bytes) for op in ops if _lane(op) == lane] for ops in (planned, seen))
        assert have == want, lane
    assert len(seen) == len(planned)
    assert kept == {name: plan.program(rank).memory[name] for name in kept}


def _lane(op) -> tuple:
    return op.axis, op.kind in MESSAGES and op.kind, op.peer


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _padded(parameters) -> int:
    return sum(_local(p).untyped_storage().nbytes() for p in parameters)


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"dp": 2, "tp": 2}, {}),
        ({"fsdp": 2, "tp": 2}, {"optimizer": "adamw", "lr": 1e-3}),
        ({"dp": 2, "fsdp": 2, "tp": 2}, {"clip": 0.1}),
        ({"dp": 2, "pp": 2}, {"schedule": "zbv"}),
        ({"dp": 2, "pp": 2}, {"schedule": "interleaved_zero_bubble"}),
        ({"fsdp": 2, "pp": 2}, {"schedule": "1f1b"}),
        ({"fsdp": 2, "pp": 2}, {"schedule": "zbv"}),
        ({"fsdp": 2, "pp": 2}, {"schedule": "interleaved_zero_bubble"}),
        ({"fsdp": 2, "pp": 2}, {"schedule": "looped_bfs", "stages_per_rank": 4, "layers": 6}),
        ({"tp": 2, "pp": 2}, {"schedule": "gpipe"}),
        ({"cp": 2, "fsdp": 2}, {}),
        ({"cp": 2, "fsdp": 2}, {"attention": "all_gather", "balance": "none", "clip": 0.1}),
        ({"fsdp": 2, "tp": 2, "pp": 2}, {"schedule": "interleaved_1f1b"}),
        ({"fsdp": 2, "tp": 2, "pp": 2}, {"schedule": "zbv", "model": "mlp", "layers": 5}),
        ({"tp": 2, "pp": 2}, {"schedule": "1f1b", "sequence_parallel": True}),
        ({"tp": 2, "fsdp": 2}, {"clip": 0.1, "sequence_parallel": True}),
        ({"tp": 2, "pp": 2}, {"schedule": "zbv", "sequence_parallel": True, "clip": 0.1}),
        ({"tp": 2, "pp": 2, "fsdp": 2}, {"schedule": "interleaved_1f1b", "sequence_parallel": True}),
        ({"cp": 2, "tp": 2}, {"clip": 0.1}),
        ({"cp": 2, "pp": 2}, {"schedule": "1f1b", "attention": "all_gather", "evaluate_every": 2}),
        ({"cp": 2, "dp": 2}, {"attention": "ulysses"}),
        ({"cp": 2, "pp": 2}, {"schedule": "zbv"}),
        ({"dp": 2, "fsdp": 2, "cp": 2}, {"clip": 0.1}),
        ({"cp": 2, "tp": 2, "fsdp": 2}, {"sequence_parallel": True, "clip": 0.1}),
        ({"cp": 2, "tp": 2, "pp": 2}, {"schedule": "interleaved_zero_bubble", "attention": "ulysses", "heads": 4}),
        ({"cp": 2, "fsdp": 2, "pp": 2}, {"schedule": "interleaved_1f1b", "optimizer": "adamw", "lr": 1e-3}),
    ],
)
def test_a_mesh_equals_one_device_and_does_what_was_planned(degrees, settings, launcher, runs_dir):
    if settings.get("model") == "mlp":
        settings = settings | {"heads": None, "context": None}
    holds(finished(spec_of(degrees, **settings, **BRIEF), launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "schedule"), [({"fsdp": 2, "tp": 2, "pp": 2}, "1f1b"), ({"dp": 2, "pp": 2}, "zbv")]
)
def test_the_norm_is_that_of_all_shards_and_stages_together(degrees, schedule, launcher, runs_dir):
    """The limit is far below the norms, so that what is updated is what was clipped."""
    result = finished(spec_of(degrees, schedule=schedule, clip=0.1, **SHORT), launcher, runs_dir)
    holds(result)
    assert result["parity"]["norm_max_rel_diff"] < 1e-5
    assert min(result["grad_norms"]) > 0.1


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [({"dp": 2, "ep": 2}, {"optimizer": "adamw", "lr": 1e-3}), ({"dp": 4, "ep": 2}, {"clip": 0.1})],
)
def test_experts_of_several_replicas_equal_those_of_one_device(degrees, settings, launcher, runs_dir):
    spec = spec_of(degrees, **MOE, **settings, **BRIEF)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    if "clip" in settings:
        assert result["parity"]["norm_max_rel_diff"] < 1e-5
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(2)
    averaged = [s.part for s in timeline.spans() if s.lane == "dp"]
    assert Counter(averaged) == dict.fromkeys(("block1.experts", "block2.experts"), spec.devices)


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"fsdp": 2, "ep": 2}, {"clip": 0.1}),
        ({"pp": 2, "ep": 2}, {"schedule": "1f1b"}),
        ({"pp": 2, "ep": 2}, {"schedule": "zbv", "optimizer": "adamw", "lr": 1e-3}),
        ({"dp": 2, "fsdp": 2, "ep": 2}, {"clip": 0.1}),
        ({"pp": 2, "dp": 2, "ep": 2}, {"schedule": "zbv", "clip": 0.1}),
        ({"pp": 2, "fsdp": 2, "ep": 2}, {"schedule": "interleaved_1f1b", "clip": 0.1}),
        ({"pp": 2, "fsdp": 2}, {"schedule": "interleaved_zero_bubble"}),
        ({"cp": 2, "ep": 2}, {"clip": 0.1}),
        ({"fsdp": 2, "cp": 2, "ep": 2}, {"clip": 0.1, "attention": "all_gather"}),
        ({"dp": 2, "cp": 2, "ep": 2}, {"attention": "ulysses", "accumulate": 2}),
        ({"pp": 2, "cp": 2, "ep": 2}, {"schedule": "zbv", "layers": 6, "masked": 0.5}),
    ],
)
def test_experts_in_any_mesh_equal_those_of_one_device(degrees, settings, launcher, runs_dir):
    result = finished(spec_of(degrees, **FOUR, **settings, **BRIEF), launcher, runs_dir)
    holds(result)
    if "clip" in settings:
        assert result["parity"]["norm_max_rel_diff"] < 1e-5


@pytest.mark.real
def test_messages_run_along_the_axis_of_stages_and_a_missing_reduction_is_seen(launcher, runs_dir):
    """Each stage talks to the same replica of the next one; and a plan without the reduction over dp does not conform:
    the negative control of what the runs above show."""
    spec = spec_of({"dp": 2, "pp": 2}, schedule="dualpipev", **SHORT)
    result = finished(spec, launcher, runs_dir)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3)
    spans = list(timeline.spans())
    assert {(s.rank, s.peer, s.lane) for s in spans if s.kind == "send"} == {
        (0, 2, "pp:0>1"), (1, 3, "pp:0>1"), (2, 0, "pp:1>0"), (3, 1, "pp:1>0"),
    }  # fmt: skip
    plan = modes.plan(prepare(spec))
    programs = tuple(Program(tuple(op for op in p.ops if op.axis != "dp"), p.holds, p.memory) for p in plan.programs)
    assert conform(spans, lambda step: plan, [3])[0]["ok"]
    report, _ = conform(spans, lambda step: Plan(plan.mesh, programs, plan.roles), [3])
    assert not report["ok"]
    assert report["first_difference"]["measured"].startswith("all_reduce")


@pytest.mark.real
def test_a_wrong_gradient_on_one_rank_of_a_mesh_is_seen(launcher, runs_dir):
    parity = finished(spec_of({"fsdp": 2, "pp": 2}, fault="gradient@3:2", **SHORT), launcher, runs_dir)["parity"]
    assert parity["ok"] is False
    assert 0.1 < parity["grad_max_rel_diff"] <= 0.5 + 1e-3
