"""Experts that tensor ranks share, beside every other axis: what travels by closed forms, what PyTorch would call on a
rank of many, what real runs did."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from engine import modes
from engine.graph.matching import match
from engine.graph.notation import format_plan, parse_plan
from engine.job import prepare
from engine.outcome.conform import conform
from engine.plan import Plan
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import BRIEF, finished, holds
from tests.engine.test_hybrid import CONTEXT, FOUR, HIDDEN, MOE, SEQUENCES, SHORT, SMALL, job_of, spec_of

EXPERTS, TOP_K, BLOCKS = 8, 2, 2
TOKENS = 16 * CONTEXT  # of a step, on all ranks together
ROUTER = 4 * EXPERTS * HIDDEN
EXPERT = 4 * 8 * HIDDEN**2  # bytes of one: up and down, 4 x hidden wide


def on(ops, axis: str, **wanted) -> list:
    return [op for op in ops if op.axis == axis and all(getattr(op, key) == value for key, value in wanted.items())]


@pytest.mark.parametrize("ep", [1, 2])
def test_tensor_ranks_sum_a_token_once_there_and_once_back_however_many_experts_it_goes_to(ep):
    """And the router's gradient once a step, of which each rank has a part."""
    plan = modes.plan(job_of({"tp": 2, "ep": ep}, **MOE), 2)
    ops = plan.program(0).ops
    sums = [(op.part, op.bytes) for op in on(ops, "tp", kind="all_reduce") if op.part.startswith("block1")]
    whole = 4 * TOKENS // ep * HIDDEN
    last, first = ("combine", "router") if ep > 1 else ("mixture", "mixture")
    parts = ["attention", last, first, "attention"]
    assert sums == [*((f"block1.{part}", whole) for part in parts), ("block1.router", ROUTER)]
    dense = modes.plan(job_of({"tp": 2}), 2).program(0).ops
    assert len(on(ops, "tp")) == len(on(dense, "tp")) + BLOCKS
    match(plan)
    assert parse_plan(format_plan(plan)) == plan


def test_where_sequences_are_parallel_tokens_are_gathered_for_the_router_and_scattered_behind_the_experts():
    ops = modes.plan(job_of({"tp": 2, "ep": 2}, **MOE, **SEQUENCES), 2).program(0).ops
    whole = 4 * TOKENS // 2 * HIDDEN
    of_block = [(op.kind, op.part, op.bytes) for op in on(ops, "tp") if op.part.startswith("block1")]
    gather, scatter = ("all_gather", whole // 2), ("reduce_scatter", whole)
    order = [gather, scatter, gather, scatter] * 2
    assert [(kind, size) for kind, _, size in of_block[:8]] == order
    names = ["attention", "attention", "router", "combine", "combine", "router", "attention", "attention"]
    assert [part for _, part, _ in of_block[:8]] == [f"block1.{name}" for name in names]
    # In the order of the parameters; the last two before the block is reduced.
    assert of_block[8:] == [
        ("all_reduce", f"block1.{name}", size)
        for name, size in (("norm1", 4 * HIDDEN), ("norm2", 4 * HIDDEN), ("router", ROUTER))
    ]


@pytest.mark.parametrize("sequences", [{}, SEQUENCES])
def test_every_tensor_rank_exchanges_all_tokens_of_its_group(sequences):
    """As many as the ranks of ep exchange that have no tensor ranks beside them."""
    alone, beside = (
        modes.plan(job_of(degrees, **MOE, **more), 2)
        for degrees, more in (({"ep": 2}, {}), ({"ep": 2, "tp": 2}, sequences))
    )
    exchanged = [
        [(op.part, op.payload, op.bytes) for op in on(plan.program(0).ops, "ep", kind="all_to_all")]
        for plan in (alone, beside)
    ]
    assert exchanged[0] == exchanged[1] != []
    assert [beside.mesh.group(rank, "ep") for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert beside.mesh.group(2, "tp") == (2, 3)


def test_a_rank_holds_a_part_of_its_experts_and_computes_a_part_of_each_copy():
    plans = {tp: modes.plan(job_of({"ep": 2, "tp": tp}, heads=4, **MOE), 2) for tp in (1, 2, 4)}
    flops = {}
    for tp, plan in plans.items():
        ops = plan.program(0).ops
        (flops[tp],) = (op.flops for op in ops if (op.kind, op.part) == ("forward", "block1.experts"))
        # Matrices are cut, and norms, router and positions whole.
        cut = BLOCKS * (4 * 4 * HIDDEN**2 + EXPERTS // 2 * EXPERT) + 2 * 4 * 96 * HIDDEN
        whole = BLOCKS * (ROUTER + 8 * HIDDEN) + 4 * HIDDEN + 4 * CONTEXT * HIDDEN
        assert plan.program(0).memory["parameters"] == cut // tp + whole
    assert flops[1] == 2 * flops[2] == 4 * flops[4]


def test_norms_are_summed_over_the_ranks_that_share_what_they_are_of():
    """Of four experts of eight the up and down of each; of a block's rest what is cut, and its router."""
    ops = modes.plan(job_of({"fsdp": 2, "ep": 2, "tp": 2}, **MOE, clip=1.0), 2).program(0).ops
    sums = [(op.axis, op.bytes // 4) for op in ops if op.part == "norm" and op.axis]
    experts, cut, whole = BLOCKS * 2 * 4, 2 + BLOCKS * 3, 2 + BLOCKS * 2
    assert sums == [("fsdp", experts), ("tp", experts), ("ep", 1), ("fsdp", cut), ("tp", cut), ("fsdp", whole)]


def test_tokens_come_from_the_ranks_of_one_place_among_tensor_ranks():
    job = job_of({"ep": 2, "tp": 2}, **MOE)
    routed = tuple({f"block{i}": [[rank // 2 + 1] * 4 + [0] * 4] for i in (1, 2)} for rank in range(4))
    plan = modes.plan(dataclasses.replace(job, routed=routed))
    came = [
        next(op.bytes for op in plan.program(rank).ops if (op.part, op.payload) == ("block1.combine", "tokens"))
        for rank in range(4)
    ]
    assert came == [4 * HIDDEN * 4 * (1 + 2)] * 2 + [0, 0]
    match(plan)


# --- PyTorch as the oracle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "rank", "settings"),
    [({"fsdp": 8, "tp": 8}, 33, {"clip": 1.0}), ({"dp": 4, "fsdp": 32, "tp": 8}, 517, {"clip": 1.0, **SEQUENCES})],
)
def test_pytorch_would_do_the_same_with_experts_on_many_ranks(degrees, rank, settings, tmp_path):
    from tests.engine.test_hybrid_real import test_pytorch_would_do_the_same_on_many_ranks as would_do

    would_do("hybrid", degrees, rank, MOE | settings, tmp_path)


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"tp": 2}, {"optimizer": "adamw", "lr": 1e-3}),
        ({"tp": 2, "ep": 2}, {"clip": 0.1, **SEQUENCES}),
        ({"tp": 2, "ep": 2}, {"clip": 0.1, "recompute": "selective"}),
        ({"tp": 2, "dp": 2}, {"clip": 0.1, "accumulate": 2, **SEQUENCES}),
        ({"tp": 2, "fsdp": 2}, {"clip": 0.1, "recompute": "full"}),
        ({"tp": 2, "pp": 2}, {"clip": 0.1, "schedule": "zbv"}),
        ({"tp": 2, "cp": 2}, {"clip": 0.1}),
        ({"cp": 2}, {"attention": "all_gather"}),
        ({"tp": 4, "ep": 2}, {"clip": 0.1, "heads": 4, "dataset": "text"}),
        ({"tp": 2, "ep": 2, "fsdp": 2}, {"clip": 0.1}),
        ({"tp": 2, "ep": 2, "dp": 2}, {"accumulate": 2, **SEQUENCES}),
        ({"tp": 2, "ep": 2, "cp": 2}, {"clip": 0.1, "attention": "ulysses", "heads": 4}),
        ({"tp": 2, "ep": 2, "pp": 2}, {"clip": 0.1, "schedule": "interleaved_1f1b", "masked": 0.5, **SEQUENCES}),
        ({"tp": 2, "fsdp": 2, "pp": 2}, {"clip": 0.1, "schedule": "1f1b", "evaluate_every": 2}),
    ],
)
def test_experts_that_tensor_ranks_share_equal_those_of_one_device(degrees, settings, launcher, runs_dir):
    result = finished(spec_of(degrees, **(FOUR | settings), **BRIEF), launcher, runs_dir)
    holds(result)
    if "clip" in settings:
        assert result["parity"]["norm_max_rel_diff"] < 1e-5
    for counts in result["expert_tokens"]["last"].values():
        assert sum(counts) == TOKENS * TOP_K  # each token once, on however many tensor ranks it is


@pytest.mark.real
@pytest.mark.parametrize(("mode", "settings"), [("tensor", {}), ("sequence", {"recompute": "full"}), ("context", {})])
def test_modes_of_one_axis_have_experts_too(mode, settings, launcher, runs_dir):
    holds(finished(Spec(mode=mode, devices=2, **(SMALL | MOE | settings), **BRIEF), launcher, runs_dir))


@pytest.mark.real
def test_an_expert_without_a_token_has_a_part_of_no_gradient_on_every_tensor_rank(launcher, runs_dir):
    few = {"context": 2, "global_batch": 4, "top_k": 1, "layers": 3}  # 8 tokens for 8 experts
    result = finished(spec_of({"tp": 2, "ep": 2}, **(MOE | few), **BRIEF), launcher, runs_dir)
    holds(result)
    assert all(0 in counts for counts in result["expert_tokens"]["last"].values())


@pytest.mark.real
def test_a_sum_over_tensor_ranks_that_was_forgotten_would_be_seen(launcher, runs_dir):
    """The negative control of conformance: plans without the sum behind the experts, or that of the router's gradient.
    And of parity: a wrong gradient on one of four ranks."""
    spec = spec_of({"tp": 2, "ep": 2}, **MOE, fault="gradient@3:2", **SHORT)
    result = finished(spec, launcher, runs_dir)
    assert result["parity"]["ok"] is False
    assert 0.1 < result["parity"]["grad_max_rel_diff"] <= 0.5 + 1e-3
    assert result["conformance"]["ok"]
    spans = list(Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3).spans())
    plan = modes.plan(dataclasses.replace(prepare(spec), routed=_routed(runs_dir / result["run_id"], 4)), 3)
    assert conform(spans, lambda step: plan, [3])[0]["ok"]
    kinds = Counter((s.kind, s.part) for s in spans if s.lane == "tp" and s.rank == 0)
    for part, payload in (("block1.combine", "activation"), ("block2.router", "gradient")):
        assert kinds["all_reduce", part] > 0
        programs = tuple(
            dataclasses.replace(
                p, ops=tuple(op for op in p.ops if (op.axis, op.part, op.payload) != ("tp", part, payload))
            )
            for p in plan.programs
        )
        report, _ = conform(spans, lambda step, p=programs: Plan(plan.mesh, p, plan.roles), [3])
        assert not report["ok"] and report["first_difference"]["measured"].startswith("all_reduce")


def _routed(folder, ranks: int) -> tuple:
    from engine.archive import read_steps

    return tuple(read_steps(folder, rank)[3]["routed"] for rank in range(ranks))
