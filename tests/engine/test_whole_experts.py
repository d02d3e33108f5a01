"""Experts that are whole beside tensor ranks (expert_tp 1): what travels by closed forms, groups by Megatron-LM's order
of ranks, what real runs did."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.graph.matching import match
from engine.graph.notation import format_plan, parse_plan
from engine.job import prepare
from engine.outcome.conform import conform
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import BRIEF, finished, holds
from tests.engine.test_expert_tensor import BLOCKS, EXPERTS, ROUTER, TOP_K, on
from tests.engine.test_hybrid import CONTEXT, FOUR, HIDDEN, MOE, SEQUENCES, SHORT, job_of, spec_of

WHOLE = {"expert_tp": 1}
TOKENS = 16 * CONTEXT  # of a step, on all ranks together


@pytest.mark.parametrize("sequences", [{}, SEQUENCES])
@pytest.mark.parametrize(("degrees", "axis"), [({"tp": 2}, "tp"), ({"tp": 2, "ep": 2}, "ep_tp"), ({"tp": 4}, "tp")])
def test_each_tensor_rank_exchanges_its_own_part_of_the_tokens(degrees, axis, sequences):
    """All tokens of all ranks, each `top_k` times; where experts are cut, tensor ranks exchange the same ones."""
    whole, cut = (modes.plan(job_of(degrees, heads=4, **MOE, **sequences, **more)) for more in (WHOLE, {}))
    ops = whole.program(0).ops
    ranks = whole.world_size
    exchanged = [(op.axis, op.bytes) for op in ops if op.kind == "all_to_all" and op.payload in ("tokens", "gradient")]
    assert exchanged == [(axis, 4 * HIDDEN * TOKENS * TOP_K // ranks)] * 4 * BLOCKS
    assert [op.bytes for op in ops if op.part == "block1.counts"] == [8 * EXPERTS]
    if "ep" in degrees:
        sizes = [op.bytes for op in cut.program(0).ops if op.kind == "all_to_all" and op.payload == "tokens"]
        assert set(sizes) == {degrees["tp"] * 4 * HIDDEN * TOKENS * TOP_K // ranks}
    match(whole)
    assert parse_plan(format_plan(whole)) == whole


@pytest.mark.parametrize("sequences", [{}, SEQUENCES])
def test_around_whole_experts_tokens_are_gathered_once_a_way_or_with_sequences_parallel_never(sequences):
    ops = modes.plan(job_of({"tp": 2, "ep": 2}, **MOE, **WHOLE, **sequences)).program(0).ops
    whole = 4 * TOKENS // 2 * HIDDEN
    of_block = [(op.kind, op.part.removeprefix("block1."), op.bytes) for op in on(ops, "tp") if "block1." in op.part]
    attends, gather = ("all_reduce", "attention", whole), "all_gather"
    if sequences:
        both = [(gather, "attention", whole // 2), ("reduce_scatter", "attention", whole)]
        assert of_block[:4] == both * 2
        assert {kind for kind, *_ in of_block[4:]} == {"all_reduce"}  # gradients of norms, and of the router
    else:
        assert of_block[:4] == [attends, (gather, "combine", whole // 2), (gather, "router", whole // 2), attends]
    assert of_block[-1] == ("all_reduce", "router", ROUTER)  # of which each rank has the part of its own tokens


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_holds_experts_whole_and_computes_each_copy_alone(tp):
    whole, cut = (modes.plan(job_of({"tp": tp, "ep": 2}, heads=4, **MOE, **more)).program(0) for more in (WHOLE, {}))
    of_experts = [
        sum(op.flops for op in program.ops if (op.kind, op.part) == ("forward", "block1.experts"))
        for program in (whole, cut)
    ]
    assert of_experts == [2 * (TOKENS * TOP_K // (2 * tp)) * 8 * HIDDEN**2] * 2  # fewer copies, with wider matrices
    assert whole.memory["parameters"] == cut.memory["parameters"]
    assert whole.shares[1] == pytest.approx(cut.shares[1])
    products = [
        [(kernel.n, kernel.k) for kernel in op.kernels if kernel.n]
        for program in (whole, cut)
        for op in program.ops
        if (op.kind, op.part) == ("forward", "block1.experts")
    ]
    assert products == [[(4 * HIDDEN // parts, HIDDEN), (HIDDEN, 4 * HIDDEN // parts)] for parts in (1, tp)]


@pytest.mark.parametrize(("dp", "ep", "tp"), [(2, 2, 2), (1, 4, 2), (3, 1, 4), (2, 2, 4)])
def test_groups_are_those_of_megatron_lm(dp, ep, tp):
    """Its ranks of one stage lie as (expert dp, expert ep, expert tp), the last next to each other (parallel_state.py,
    order tp-cp-ep-dp-pp): with expert tp 1 a group of ep x tp neighbours."""
    mesh = modes.plan(job_of({"dp": dp, "ep": ep, "tp": tp}, heads=4, global_batch=96, **MOE, **WHOLE)).mesh
    axis = "ep_tp" if ep > 1 else "tp"
    theirs = np.arange(dp * ep * tp).reshape(dp, ep * tp, 1)
    assert {mesh.group(rank, axis) for rank in range(mesh.size)} == {tuple(row.ravel().tolist()) for row in theirs}
    if dp > 1:
        alike = {tuple(theirs[:, e, 0].tolist()) for e in range(ep * tp)}
        assert {mesh.group(rank, "dp") for rank in range(mesh.size)} == alike


def test_norms_of_whole_experts_are_summed_over_all_that_share_them_out():
    """Of two experts of eight the up and down of each, as squares once; what is cut for tensor ranks over them."""
    ops = modes.plan(job_of({"fsdp": 2, "ep": 2, "tp": 2}, **MOE, **WHOLE, clip=1.0)).program(0).ops
    sums = [(op.axis, op.bytes // 4) for op in ops if op.part == "norm" and op.axis]
    experts, cut, whole = BLOCKS * 2 * 2, 2 + BLOCKS * 3, 2 + BLOCKS * 2
    assert sums == [("fsdp", experts), ("ep_tp", 1), ("fsdp", cut), ("tp", cut), ("fsdp", whole)]


def test_tokens_come_from_every_tensor_rank_as_its_router_chose():
    """Rank 0 has the first two of eight experts, rank 1 the next two: each gets what all four sent there."""
    job = job_of({"ep": 2, "tp": 2}, **MOE, **WHOLE)
    counts = [[rank + 1, 1, rank, 0, 2, 0, 0, 5] for rank in range(4)]
    routed = tuple({f"block{i}": [counts[rank]] for i in (1, 2)} for rank in range(4))
    plan = modes.plan(dataclasses.replace(job, routed=routed))
    came = [
        next(op.bytes for op in plan.program(rank).ops if (op.part, op.payload) == ("block1.combine", "tokens"))
        for rank in range(4)
    ]
    assert came == [4 * HIDDEN * copies for copies in (1 + 2 + 3 + 4 + 4, 0 + 1 + 2 + 3, 4 * 2, 4 * 5)]
    match(plan)


@pytest.mark.parametrize("sequences", [{}, SEQUENCES])
def test_what_experts_share_is_cut_as_any_mlp_and_has_all_tokens(sequences):
    shapes = {"model": "deepseek_v3", "layers": 4, "global_batch": 8, "tp": 2, "ep": 4, "dp": 1, "fsdp": 1, "pp": 1}
    job = prepare(Spec(mode="hybrid", devices=8, **shapes, **WHOLE, **sequences))
    ops = modes.plan(job).program(0).ops
    tokens, hidden, part = 2 * 4096, 7168, "block4.shared"
    (made,) = [op for op in ops if (op.kind, op.part) == ("forward", part)]
    assert made.flops == 3 * 2 * tokens * hidden * 2048 // 2
    travels = [(op.kind, op.bytes) for op in on(ops, "tp") if op.part == part]
    whole = 2 * tokens * hidden
    both = [("all_gather", whole // 2), ("reduce_scatter", whole)] if sequences else [("all_reduce", whole)]
    assert travels == both * 2
    match(modes.plan(job))


@pytest.mark.parametrize(
    ("settings", "code", "setting", "works"),
    [
        ({"tp": 4, "heads": 4, "expert_tp": 2}, "expert_tp_of_tp", "expert_tp", (1, 4)),
        ({"tp": 2, "ep": 4, "experts": 4, **WHOLE}, "whole_experts", "ep", (1, 2)),
        ({"tp": 2, "experts": 5, **WHOLE}, "whole_experts", "expert_tp", (2,)),
        ({"ep": 2, **WHOLE}, "needs_axis", "expert_tp", ()),
        ({"tp": 2, "model": "gpt", **WHOLE}, "does_not_apply", "expert_tp", ()),
        ({"tp": 2, "context": 15, **WHOLE}, "devices_divide", "tp", (1,)),
    ],
)
def test_what_whole_experts_need_is_said(settings, code, setting, works):
    degrees = {axis: settings.pop(axis) for axis in ("tp", "ep") if axis in settings}
    model = settings.pop("model", "moe")
    shapes = MOE if model == "moe" else {}
    with pytest.raises(SpecError) as refused:
        prepare(spec_of(degrees, **(shapes | settings | {"model": model})))
    assert (refused.value.code, refused.value.setting) == (code, setting)
    assert not works or set(refused.value.suggest) <= set(works)
    for value in refused.value.suggest:  # and each works
        known = {setting: value}
        fixed = degrees | {axis: known.pop(axis) for axis in ("tp", "ep") if axis in known}
        prepare(spec_of(fixed, **(shapes | settings | {"model": model} | known)))


def test_a_mode_of_one_axis_says_that_it_has_none():
    for mode in ("tensor", "sequence", "expert"):
        with pytest.raises(SpecError) as refused:
            prepare(Spec(mode=mode, devices=2, model="moe", expert_tp=1))
        assert (refused.value.code, refused.value.setting) == ("does_not_apply", "expert_tp")


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"tp": 2}, {"optimizer": "adamw", "lr": 1e-3, "accumulate": 2}),
        ({"tp": 2, "ep": 2}, {"clip": 0.1, **SEQUENCES}),
        ({"tp": 2, "ep": 2}, {"clip": 0.1, "recompute": "selective", "dataset": "text"}),
        ({"tp": 2, "dp": 2}, {"clip": 0.1, "accumulate": 2, **SEQUENCES}),
        ({"tp": 2, "fsdp": 2}, {"clip": 0.1, "recompute": "full"}),
        ({"tp": 2, "pp": 2}, {"clip": 0.1, "schedule": "zbv", **SEQUENCES}),
        ({"tp": 2, "cp": 2}, {"clip": 0.1}),
        ({"tp": 4, "ep": 2}, {"clip": 0.1, "heads": 4, "experts": 8}),
        ({"tp": 2, "ep": 2, "fsdp": 2}, {"clip": 0.1, "precision": "bf16", **SEQUENCES}),
        ({"tp": 2, "ep": 2, "cp": 2}, {"attention": "ulysses", "heads": 4, **SEQUENCES}),
        ({"tp": 2, "ep": 2, "pp": 2}, {"clip": 0.1, "schedule": "interleaved_1f1b", "masked": 0.5, **SEQUENCES}),
        ({"tp": 2, "dp": 2, "pp": 2}, {"schedule": "1f1b", "recompute": "full", "evaluate_every": 2}),
    ],
)
def test_whole_experts_beside_tensor_ranks_equal_those_of_one_device(degrees, settings, launcher, runs_dir):
    result = finished(spec_of(degrees, **(FOUR | WHOLE | settings), **BRIEF), launcher, runs_dir)
    holds(result)
    for counts in result["expert_tokens"]["last"].values():
        assert sum(counts) == TOKENS * TOP_K  # each token once, whichever tensor rank sent it


@pytest.mark.real
def test_an_expert_without_a_token_has_a_gradient_of_zeros_beside_tensor_ranks_too(launcher, runs_dir):
    few = {"context": 2, "global_batch": 4, "top_k": 1, "layers": 3}  # 8 tokens for 8 experts
    result = finished(spec_of({"tp": 2, "ep": 2}, **(MOE | WHOLE | few), **BRIEF), launcher, runs_dir)
    holds(result)
    assert all(0 in counts for counts in result["expert_tokens"]["last"].values())


@pytest.mark.real
def test_tokens_that_were_sent_by_one_tensor_rank_for_all_would_be_seen(launcher, runs_dir):
    """The negative control of conformance: the plan of experts that are cut, and one of equal numbers for each expert.
    And of parity: a wrong gradient on one of four ranks."""
    spec = spec_of({"tp": 2, "ep": 2}, **MOE, **WHOLE, fault="gradient@3:2", **SHORT)
    result = finished(spec, launcher, runs_dir)
    assert result["parity"]["ok"] is False
    assert 0.1 < result["parity"]["grad_max_rel_diff"] <= 1 + 1e-3
    assert result["conformance"]["ok"] and result["conformance"]["routed"]
    spans = list(Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3).spans())
    for plan in (modes.plan(prepare(spec.with_(expert_tp=2)), 3), modes.plan(prepare(spec), 3)):
        report, _ = conform(spans, lambda step, p=plan: p, [3])
        assert not report["ok"]
    sent = [[s.bytes for s in spans if s.rank == rank and s.payload == "tokens"] for rank in range(4)]
    assert all(len(sizes) == 2 * BLOCKS for sizes in sent)
    back = [sum(sizes[1::2]) for sizes in sent]  # what came to the experts of each rank
    assert sum(back) == 4 * HIDDEN * TOKENS * TOP_K * BLOCKS and len(set(back)) > 1
