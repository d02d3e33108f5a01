"""Meshes of several axes: what is planned by closed forms, what PyTorch would call on any rank, what real runs did."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.held import memory_of
from engine.graph.matching import match
from engine.graph.notation import format_plan, parse_plan
from engine.job import Job, prepare
from engine.plan import Program
from engine.spec import Spec

HIDDEN, LAYERS, CONTEXT = 32, 2, 16
SMALL = {
    "model": "gpt", "hidden": HIDDEN, "heads": 2, "context": CONTEXT, "layers": LAYERS, "dataset": "synthetic",
    "global_batch": 16,
}  # fmt: skip
SHORT = {"steps": 4, "device": "cpu"}
GROUPED = ("all_gather", "reduce_scatter", "all_reduce")
SUMS = {"embed": 1, "head": 4}  # all-reduces over tp, there and back; a block has two each way
AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
SEQUENCES = {"sequence_parallel": True}
MOE = {"model": "moe", "experts": 8, "top_k": 2}
FOUR = MOE | {"experts": 4}  # what two ranks of `ep` have several of, each


def spec_of(degrees: dict[str, int], **settings) -> Spec:
    degrees = dict.fromkeys(AXES, 1) | degrees
    return Spec(mode="hybrid", devices=math.prod(degrees.values()), **(SMALL | degrees | settings))


def job_of(degrees: dict[str, int], **settings) -> Job:
    return prepare(spec_of(degrees, **settings))


def counted(program: Program) -> Counter:
    return Counter((op.kind, op.axis) for op in program.ops if op.axis)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_mesh_has_the_axes_that_are_more_than_one_wide_with_tensor_ranks_next_to_each_other():
    plan = modes.plan(job_of({"pp": 2, "dp": 2, "tp": 2}))
    assert (plan.mesh.axes, plan.mesh.degrees) == (("pp", "dp", "tp"), (2, 2, 2))
    assert plan.mesh.group(0, "tp") == (0, 1)
    assert plan.mesh.group(0, "pp") == (0, 4)


def test_shards_of_tensor_ranks_travel_as_what_is_left_of_a_layer():
    """A block has 12 matrices of hidden x hidden that are cut in two, and two norms that are not; four shards each."""
    job = job_of({"fsdp": 4, "tp": 2, "dp": 2})
    ops = modes.plan(job).programs[0].ops
    block = 4 * (12 * HIDDEN**2 // 2 + 2 * HIDDEN)
    moved = [(op.kind, op.axis, op.bytes) for op in ops if op.part == "block1" and op.axis in ("fsdp", "dp")]
    gather = ("all_gather", "fsdp", block // 4)
    assert moved == [gather, gather, ("reduce_scatter", "fsdp", block), ("all_reduce", "dp", block // 4)]
    summed = 4 * (16 // 8) * CONTEXT * HIDDEN  # bytes of a replica's samples
    of_blocks = [op.bytes for op in ops if op.axis == "tp" and op.part.startswith("block")]
    assert of_blocks == [summed] * 4 * LAYERS


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_a_pipeline_gathers_and_reduces_a_layer_once_and_sums_every_microbatch(schedule):
    job = job_of({"pp": 2, "fsdp": 2, "tp": 2, "dp": 2}, schedule=schedule, microbatches=4)
    plan = modes.plan(job)
    for program in plan.programs:
        layers = len(program.holds)
        sums = sum(SUMS.get(plan.layers[i], 4) for i in program.holds)
        counts = counted(program)
        assert counts["all_gather", "fsdp"] == counts["reduce_scatter", "fsdp"] == counts["all_reduce", "dp"] == layers
        assert counts["all_reduce", "tp"] == sums * 4
    sent = sum(counted(program)["send", "pp"] for program in plan.programs)
    cuts = len(job.stages) - 1 - (schedule == "zbv")  # in a V the last rank hands on to itself
    assert sent == 2 * cuts * 4


def test_a_stage_keeps_its_layers_whole_and_gradients_of_their_size_unless_its_shards_are_whole():
    replicas, shards = (modes.plan(job_of({"pp": 2, axis: 2}, schedule="1f1b")) for axis in ("dp", "fsdp"))
    assert [p.memory["gathered"] for p in replicas.programs] == [p.memory["parameters"] for p in replicas.programs]
    assert [p.memory["gathered"] for p in shards.programs] == [4 * p.memory["parameters"] for p in shards.programs]


def test_without_a_pipeline_a_layer_is_gathered_for_each_way():
    (program,) = modes.plan(job_of({"fsdp": 2, "tp": 2})).programs
    assert counted(program) == {
        ("all_gather", "fsdp"): 2 * (LAYERS + 2),
        ("reduce_scatter", "fsdp"): LAYERS + 2,
        ("all_reduce", "tp"): 4 * LAYERS + sum(SUMS.values()),
    }


def test_replicas_with_other_samples_and_with_other_tokens_average_together():
    plan = modes.plan(job_of({"dp": 2, "fsdp": 2, "cp": 2}))
    assert (plan.mesh.axes, plan.mesh.group(5, "dp_cp"), plan.mesh.group(5, "fsdp")) == (
        ("dp", "fsdp", "cp"), (0, 1, 4, 5), (5, 7),
    )  # fmt: skip
    block = 4 * (12 * HIDDEN**2 + 2 * HIDDEN)
    for program in plan.programs:
        averaged = [op.bytes for op in program.ops if op.axis == "dp_cp" and op.part == "block1"]
        assert averaged == [block // 2]
    match(plan)
    assert parse_plan(format_plan(plan)) == plan


def test_a_ring_in_a_mesh_carries_the_heads_of_a_tensor_rank_and_a_stage_hands_on_its_own_tokens():
    settings = {"microbatches": 4, "schedule": "zbv", "sequence_parallel": True, "layers": 6}
    plan = modes.plan(job_of({"pp": 2, "cp": 2, "tp": 2}, **settings))
    samples, tokens = 16 // 4, CONTEXT // 2
    for rank in range(8):
        ops = plan.program(rank).ops
        hops = [op.bytes for op in ops if op.axis == "cp" and op.kind == "send"]
        blocks = sum(plan.layers[i].startswith("block") for i in plan.program(rank).holds)
        assert hops == [4 * samples * 2 * tokens * HIDDEN // 2] * (4 * blocks * (1 + 3))  # of half the heads
        assert {op.bytes for op in ops if op.axis == "pp" and op.peer is not None} == {
            4 * samples * tokens * HIDDEN // 2
        }
    loads = [next(op for op in plan.program(rank).ops if op.kind == "load") for rank in (0, 2)]
    assert [op.part for op in loads] == ["tokens 0:4 12:16", "tokens 4:12"]
    assert {op.bytes for op in loads} == {16 * 2 * 8 * tokens}
    match(plan)


@pytest.mark.parametrize("attention", ["ring", "all_gather", "ulysses"])
def test_what_tensor_ranks_keep_of_attention_is_what_one_rank_keeps_in_parts(attention):
    """Of q, k, v, the output and its log-sum-exps: nothing of it twice, and nothing left out."""
    kept = []
    for degrees in ({"cp": 2}, {"cp": 2, "tp": 2}):
        ops = modes.plan(job_of(degrees, attention=attention, heads=4)).programs[0].ops
        kept.append({op.part: op.saved for op in ops if op.kind == "forward" and "block1" in op.part})
    numbers = 4 * 16 * CONTEXT // 2  # bytes of one number of each token that a rank sees
    norms = 2 * numbers * (2 * HIDDEN + 1)  # whole on every tensor rank, as are the sums after both pairs
    whole, part = (sum(each.values()) - norms - 2 * numbers * HIDDEN for each in kept)
    assert part == whole / 2
    copies = 2 if attention == "ulysses" else 1  # of attention's output, by tokens and by heads
    assert kept[1]["block1.proj"] == numbers * (copies * HIDDEN + 4) // 2


def test_tensor_ranks_that_share_out_tokens_gather_and_scatter_them_and_hand_shards_to_the_next_stage():
    """Of each sum an all-gather and a reduce-scatter are made; norms, which see some tokens, are summed once a step."""
    settings = {"schedule": "1f1b", "microbatches": 4}
    plain, shared = (
        modes.plan(job_of({"pp": 2, "dp": 2, "tp": 2}, sequence_parallel=on, **settings)) for on in (False, True)
    )
    of_blocks = [[op for op in p.programs[0].ops if op.axis == "tp" and "block" in op.part] for p in (plain, shared)]
    kinds = [Counter(op.kind for op in ops if op.microbatch is not None) for ops in of_blocks]
    blocks = sum(plain.layers[i].startswith("block") for i in plain.programs[0].holds)
    assert kinds[0] == {"all_reduce": 4 * 4 * blocks}
    assert kinds[1] == {"all_gather": 4 * 4 * blocks, "reduce_scatter": 4 * 4 * blocks}
    norms = [(op.part, op.bytes) for op in of_blocks[1] if op.microbatch is None]
    assert norms == [(f"block{i}.norm{k}", 4 * HIDDEN) for i in range(1, blocks + 1) for k in (1, 2)]
    sent = [{op.bytes for p in plan.programs for op in p.ops if op.kind == "send"} for plan in (plain, shared)]
    whole = 4 * (16 // 2 // 4) * CONTEXT * HIDDEN
    assert sent == [{whole}, {whole // 2}]


def test_shards_of_a_dealt_out_context_meet_along_it():
    """Ranks of cp have the same shards and other tokens: they average each shard, and send keys and values round."""
    plan = modes.plan(job_of({"cp": 2, "fsdp": 2}))
    assert (plan.mesh.axes, plan.mesh.degrees) == (("fsdp", "cp"), (2, 2))
    block = 4 * (12 * HIDDEN**2 + 2 * HIDDEN)
    for program in plan.programs:
        moved = [(op.kind, op.axis, op.bytes) for op in program.ops if op.part == "block1" and op.kind in GROUPED]
        gather = ("all_gather", "fsdp", block // 2)
        assert moved == [gather, gather, ("reduce_scatter", "fsdp", block), ("all_reduce", "cp", block // 2)]
        assert counted(program)["send", "cp"] == LAYERS * (1 + 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_thousand_ranks_share_a_few_programs(schedule):
    degrees = {"pp": 4, "dp": 4, "fsdp": 8, "tp": 8}
    plan = modes.plan(job_of(degrees, heads=8, hidden=64, layers=14, schedule=schedule, global_batch=512))
    assert plan.world_size == 1024
    assert len(plan.programs) <= 2 * 4  # per stage, those with a full shard and those with less of the vocabulary


def test_a_weights_half_of_a_whole_stage_frees_what_its_layers_kept():
    """However the backward is recorded, a microbatch keeps as much for as long as in a pipeline without a mesh."""
    settings = {"schedule": "zbv", "layers": 6, "microbatches": 8}
    mesh = modes.plan(job_of({"pp": 2}, **settings))
    alone = modes.plan(prepare(Spec(mode="pipeline", devices=2, **(SMALL | settings))))
    kept, kept_alone = (
        [memory_of(dataclasses.replace(program, memory={})) for program in plan.programs] for plan in (mesh, alone)
    )
    assert kept == kept_alone


def test_a_stage_between_a_pair_hands_on_the_part_that_a_tensor_rank_has():
    """fc1 by columns, fc2 by rows: cut between them, half of the features travel."""
    settings = {"model": "mlp", "layers": 2, "heads": None, "context": None, "split": (1, 2), "microbatches": 2}
    plan = modes.plan(job_of({"pp": 2, "tp": 2}, **settings))
    sends = {op.bytes for op in plan.programs[0].ops if op.kind == "send"}
    assert sends == {4 * 8 * HIDDEN // 2}


def test_the_degree_that_is_left_out_is_filled_in_where_only_one_is():
    filled = prepare(Spec(mode="hybrid", devices=8, dp=1, tp=2, pp=2, **SMALL)).spec
    assert filled.fsdp == 2
    alone = prepare(Spec(mode="hybrid", devices=8, **SMALL)).spec
    assert [getattr(alone, axis) for axis in AXES] == [1, 4, 2, 1, 1, 1]
    experts = prepare(Spec(mode="hybrid", devices=8, dp=2, **(SMALL | MOE))).spec
    assert experts.ep == 4


@pytest.mark.parametrize(
    ("given", "code", "suggest"),
    [
        ({"devices": 8, "pp": 2, "tp": 2}, "degrees_left", (2,)),
        ({"devices": 8, "pp": 3}, "degrees_product", (3,)),  # nine would leave a three to nobody
        ({"devices": 8, "dp": 2, "fsdp": 2, "tp": 1, "pp": 1}, "degrees_splits", (4,)),
        ({"devices": 6, "dp": 3, "tp": 2, "fsdp": 1}, "batch_by_replicas", (15, 18)),
        ({"devices": 4, "tp": 4, "fsdp": 1, "dp": 1}, "devices_divide", (1, 2)),
        ({"devices": 4, "tp": 2, "fsdp": 2, "dp": 1, "schedule": "1f1b"}, "needs_axis", ()),
        ({"devices": 8, "pp": 2, "fsdp": 4, "dp": 1, "microbatches": 3}, "batch_by_microbatches", (2, 4)),
        ({"devices": 8, "dp": 2, "ep": 4, **MOE, "experts": 6}, "devices_divide", ()),  # no other divisor makes eight
        ({"devices": 4, "ep": 4, **MOE, "experts": 6}, "devices_divide", (1, 2)),
        ({"devices": 8, "ep": 2, "tp": 4, **MOE}, "devices_divide", (1, 2)),  # two heads
        ({"devices": 4, "cp": 2, "ep": 2, "model": "deepseek_v3"}, "axis_of_model", (1,)),
        ({"devices": 4, "fsdp": 4, "tp": 1, "sequence_parallel": True}, "needs_axis", ()),
        ({"devices": 8, "tp": 8, "heads": 8, "context": 12, "sequence_parallel": True}, "devices_divide", ()),
        ({"devices": 4, "ep": 4}, "model_of_mode", ("moe",)),
        ({"devices": 8, "dp": 2, "ep": 4, **MOE, "global_batch": 12}, "batch_by_replicas", (8, 16)),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(given, code, suggest):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(mode="hybrid", **(SMALL | given)))
    assert (refused.value.code, refused.value.suggest) == (code, suggest)
    for value in suggest:
        prepare(Spec(mode="hybrid", **(SMALL | given | {refused.value.setting: value})))


def test_degrees_that_make_too_many_devices_are_told_with_those_that_do_not():
    """finetrainers#408: 2 x 2 x 2 on 6 devices."""
    asked = {"mode": "hybrid", "devices": 6, "model": "gpt", "heads": 4, "global_batch": 48}
    with pytest.raises(SpecError) as refused:
        prepare(Spec(dp=2, tp=2, pp=2, **asked))
    splits = refused.value.values["splits"].split("; ")
    # 3 tensor ranks cannot share 4 heads, and of what is left these are all with one degree of 1.
    assert set(splits) == {"pp 1 x dp 3 x tp 2", "pp 2 x dp 3 x tp 1", "pp 3 x dp 1 x tp 2"}
    for split in splits:
        degrees = {axis: int(degree) for axis, degree in map(str.split, split.split(" x "))}
        assert math.prod(degrees.values()) == 6
        prepare(Spec(**degrees, **asked))


@pytest.mark.parametrize(
    ("degrees", "sums"),
    [
        ({"dp": 4}, []),  # replicas have the same norms
        ({"fsdp": 2, "tp": 2}, [("fsdp", 10), ("tp", 10), ("fsdp", 6)]),  # ten matrices, five norms, the positions
        ({"dp": 2, "tp": 2, "pp": 2}, [("tp", 5), ("pp", 1)]),
        ({"fsdp": 2, "cp": 2}, [("fsdp", 16)]),
    ],
)
def test_norms_are_summed_along_every_axis_that_cuts_gradients(degrees, sums):
    ops = modes.plan(job_of(degrees, clip=1.0)).programs[0].ops
    assert [(op.axis, op.bytes // 4) for op in ops if op.part == "norm" and op.axis] == sums


def test_experts_are_averaged_over_replicas_and_all_the_rest_over_every_rank():
    """A block's expert has 8 matrices' worth of hidden x hidden; its replicas have a quarter of the eight each."""
    plan = modes.plan(job_of({"dp": 2, "ep": 4}, **MOE), 2)
    assert (plan.mesh.axes, plan.mesh.degrees, plan.roles) == (("dp", "ep"), (2, 4), (0,) * 8)
    ops = plan.programs[0].ops
    of_experts = [(op.part, op.bytes) for op in ops if op.axis == "dp"]
    assert of_experts == [(f"block{i}.experts", 4 * 2 * 8 * HIDDEN**2) for i in (2, 1)]
    dense = prepare(Spec(mode="expert", devices=4, **(SMALL | MOE)))
    alone = [op.bytes for op in modes.plan(dense, 2).programs[0].ops if op.kind == "all_reduce"]
    assert [op.bytes for op in ops if op.axis == "dp_ep"] == alone
    assert [plan.mesh.group(5, axis) for axis in ("dp", "ep", "dp_ep")] == [(1, 5), (4, 5, 6, 7), tuple(range(8))]
    match(plan)
    assert parse_plan(format_plan(plan)) == plan


def test_experts_are_gathered_for_themselves_and_reduced_among_those_that_have_the_same():
    """A block's rest meets on all ranks that share nothing of it: along dp and ep; its experts along dp alone."""
    plan = modes.plan(job_of({"dp": 2, "fsdp": 2, "ep": 2}, **MOE), 2)
    assert (plan.mesh.axes, plan.mesh.group(5, "dp_ep")) == (("dp", "fsdp", "ep"), (0, 1, 4, 5))
    ops = plan.programs[0].ops
    gathers = [op.part for op in ops if op.kind == "all_gather"]
    there = ["embed", "block1", "block1.experts", "block2", "block2.experts", "head"]
    assert gathers == [*there, "head", "block2", "block2.experts", "block1", "block1.experts", "embed"]
    experts, rest = 4 * 4 * 8 * HIDDEN**2, 4 * (4 * HIDDEN**2 + 2 * HIDDEN + 8 * HIDDEN)  # four experts of eight
    moved = [(op.kind, op.axis, op.bytes) for op in ops if op.part.startswith("block1") and op.kind in GROUPED[1:]]
    assert moved == [
        ("reduce_scatter", "fsdp", experts), ("all_reduce", "dp", experts // 2),
        ("reduce_scatter", "fsdp", rest), ("all_reduce", "dp_ep", rest // 2),
    ]  # fmt: skip
    match(plan)
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize("attention", ["ring", "all_gather", "ulysses"])
def test_experts_of_ranks_that_have_some_tokens_get_as_many_fewer_and_meet_along_dp_and_cp(attention):
    whole = modes.plan(job_of({"ep": 2}, **MOE), 2).program(0).ops
    plan = modes.plan(job_of({"dp": 2, "cp": 2, "ep": 2}, **MOE, attention=attention, global_batch=32), 2)
    ops = plan.program(0).ops
    tokens = [[op.bytes for op in each if op.payload == "tokens"] for each in (whole, ops)]
    assert [size // 2 for size in tokens[0]] == tokens[1] != []
    forward = [[op for op in each if op.kind == "forward"] for each in (whole, ops)]
    if attention == "ulysses":  # the others count blocks of attention, some of which are masked
        assert sum(op.flops for op in forward[0]) == 2 * sum(op.flops for op in forward[1])
    pieces = [op.part.partition(".")[2] for op in forward[1] if op.part.startswith("block1")]
    assert pieces[0] == "qkv" and pieces[-4:] == ["proj", "dispatch", "experts", "combine"]
    assert all(piece.startswith("attention") for piece in pieces[1:-4]) and len(pieces) > 5
    averaged = {(op.part.endswith(".experts"), op.axis) for op in ops if op.kind == "all_reduce"}
    assert averaged == {(True, "dp_cp"), (False, "dp_cp_ep")}
    assert plan.mesh.group(3, "dp_cp_ep") == tuple(range(8)) and plan.mesh.group(3, "dp_cp") == (1, 3, 5, 7)
    match(plan)
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_each_microbatch_brings_as_many_tokens_as_its_own_routers_sent(schedule):
    job = job_of({"pp": 2, "ep": 2}, schedule=schedule, microbatches=4, **MOE)
    held = [p.holds for p in modes.plan(job).programs]
    # The ranks of the first ep group have stage rank 0, of the second 1; rank r sends m + r tokens to each expert.
    routed = tuple(
        {f"block{i}": [[m + rank] * 8 for m in range(4)] for i in (1, 2) if i in held[rank // 2]} for rank in range(4)
    )
    plan = modes.plan(dataclasses.replace(job, routed=routed))
    for rank in range(4):
        came = [(op.part, op.microbatch, op.bytes) for op in plan.program(rank).ops if op.payload == "tokens"]
        others = 2 * (rank // 2) * 2 + 1  # the ranks of both members of its group, added up
        for i in (i for i in (1, 2) if i in held[rank // 2]):
            for m in range(4):
                assert (f"block{i}.combine", m, 4 * HIDDEN * 4 * (2 * m + others)) in came
    match(plan)


def test_tokens_come_from_the_ranks_of_one_replica_alone():
    job = job_of({"dp": 2, "ep": 2}, **MOE)
    routed = tuple({f"block{i}": [[rank + 1] * 4 + [0] * 4] for i in (1, 2)} for rank in range(4))
    plan = modes.plan(dataclasses.replace(job, routed=routed))
    came = [
        next(op.bytes for op in plan.program(rank).ops if (op.part, op.payload) == ("block1.combine", "tokens"))
        for rank in range(4)
    ]
    assert came == [4 * HIDDEN * 4 * (1 + 2), 0, 4 * HIDDEN * 4 * (3 + 4), 0]


def test_blocks_of_all_stages_are_cut_once(monkeypatch: pytest.MonkeyPatch):
    """However many layers a model has: the embedding, the head, a block, and one whose output goes to another stage."""
    from engine.modes.tensor import plan as tensor

    cut, backward = [], tensor.backward
    monkeypatch.setattr(tensor, "backward", lambda job, layer: cut.append(layer.name) or backward(job, layer))
    job = job_of({"pp": 4, "tp": 2}, layers=22, microbatches=4)
    plan = modes.plan(job)
    assert len(cut) == 4 and len({op.part for program in plan.programs for op in program.ops}) > 22
    for rank, program in enumerate(plan.programs):
        assert {op.stage for op in program.ops if op.kind in ("forward", "all_reduce") and op.axis != "dp"} == {rank}
