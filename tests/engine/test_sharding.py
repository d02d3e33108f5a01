"""What a rank keeps of a sharded model, what is gathered and reduced, and who owns which parameters."""

from __future__ import annotations

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.machine import machine
from engine.job import prepare
from engine.model.shapes import Layer
from engine.modes.fsdp.units import equal_ranks, gathered_bytes, padded_bytes, shard
from engine.modes.zero1.owners import owners
from engine.simulation import simulate
from engine.spec import Spec

# 10 rows of 4 on 4 ranks: chunks of 3, 3, 3 and 1; a bias of 5: 2, 2, 1 and none.
LAYER = Layer("a", (("weight", (10, 4)), ("bias", (5,))), 0, (10,), 0)


def plan_of(mode: str, devices: int, **settings):
    return modes.plan(prepare(Spec(mode=mode, devices=devices, global_batch=48, **settings)))


def moves(plan, rank: int = 0) -> list[tuple]:
    """Kind and layer of every op in order, but for the load and the update."""
    return [(op.kind, op.part) for op in plan.program(rank).ops if op.kind not in ("load", "optimizer")]


def test_a_rank_keeps_ceil_of_the_rows_and_the_last_ranks_fewer_or_none():
    assert [shard(LAYER, 4, rank).params for rank in range(4)] == [
        (("weight", (3, 4)), ("bias", (2,))),
        (("weight", (3, 4)), ("bias", (2,))),
        (("weight", (3, 4)), ("bias", (1,))),
        (("weight", (1, 4)), ("bias", (0,))),
    ]
    assert shard(LAYER, 1, 0) == LAYER


@pytest.mark.parametrize("ranks", range(1, 17))
def test_shards_add_up_to_the_layer_and_ranks_with_equal_ones_are_found(ranks):
    shards = [shard(LAYER, ranks, rank) for rank in range(ranks)]
    assert sum(s.param_bytes for s in shards) == LAYER.param_bytes
    runs = equal_ranks([LAYER], ranks)
    assert [rank for run in runs for rank in run] == list(range(ranks))
    assert [[shards[rank] for rank in run] for run in runs] == [[shards[run.start]] * len(run) for run in runs]


def test_what_travels_is_padded():
    assert padded_bytes(LAYER, 4) == 4 * (3 * 4 + 2)
    assert gathered_bytes(LAYER, 4) == 4 * padded_bytes(LAYER, 4) > LAYER.param_bytes


def test_fsdp_gathers_the_next_layer_before_the_current_one_goes_back():
    """The order in which PyTorch issues them: the layer before is gathered, then this one computes and is reduced."""
    layers = ("fc1", "fc2", "out")
    forward = [(kind, layer) for layer in layers for kind in ("all_gather", "forward")]
    backward = [("all_gather", "out")]
    for layer, following in (("out", "fc2"), ("fc2", "fc1"), ("fc1", None)):
        backward += [("all_gather", following)] if following else []
        backward += [("backward", layer), ("reduce_scatter", layer)]
    assert moves(plan_of("fsdp", 4, model="mlp")) == forward + backward


def test_zero2_gathers_once():
    found = moves(plan_of("zero2", 4, model="mlp"))
    assert [layer for kind, layer in found if kind == "all_gather"] == ["fc1", "fc2", "out"]
    assert found[-6:] == [(kind, layer) for layer in ("out", "fc2", "fc1") for kind in ("backward", "reduce_scatter")]


def test_bytes_follow_the_paper():
    """Rajbhandari et al. 2020 (arXiv:1910.02054), section 7: with P parameters, ZeRO-1 and 2 send about as much as
    data parallelism, 2 P a rank, and ZeRO-3 3 P; here (n-1)/n of it, and n divides all rows."""
    sent = {}
    for mode in ("ddp", "zero1", "zero2", "fsdp"):
        plan = plan_of(mode, 2, model="gpt", layers=2, hidden=32, heads=2)
        simulation = simulate(plan, machine("h100"))
        sent[mode] = simulation.bytes_sent[plan.roles[0]]
    # ZeRO-1 all-reduces all gradients and then broadcasts: PyTorch sends more than the paper's reduce-scatter would.
    parameters = sum(
        layer.param_bytes
        for layer in prepare(Spec(mode="ddp", devices=2, model="gpt", layers=2, hidden=32, heads=2)).layers
    )
    odd_rows = 4 * 32  # both the embedding's and the head's vocabulary has an odd number of rows, padded by one
    assert sent["ddp"] == pytest.approx(parameters)
    assert sent["zero2"] == pytest.approx(parameters, abs=2 * odd_rows)
    assert sent["fsdp"] == pytest.approx(1.5 * parameters, abs=3 * odd_rows)
    assert sent["zero1"] == pytest.approx(2 * parameters)


def test_on_devices_of_their_own_gathers_overlap_compute_and_on_processes_they_do_not():
    def gathers(name):
        return [op for op in plan_of("fsdp", 4, machine=name).program(0).ops if op.kind == "all_gather"]

    assert all(op.asynchronous for op in gathers("h100"))
    assert not any(op.asynchronous for op in gathers("local"))
    found = moves(plan_of("fsdp", 4, model="mlp", machine="h100"))
    assert found[:5] == [
        ("all_gather", "fc1"),
        ("all_gather", "fc2"),
        ("forward", "fc1"),
        ("all_gather", "out"),
        ("forward", "fc2"),
    ]


def test_memory_falls_with_the_stage_of_zero():
    """16 ranks, AdamW: optimizer state, then gradients, then parameters become a sixteenth."""
    held = {}
    for mode in ("ddp", "zero1", "zero2", "fsdp"):
        plan = plan_of(mode, 16, model="mlp", optimizer="adamw")
        held[mode] = plan.program(0).memory
    whole = held["ddp"]["parameters"]
    assert held["zero1"]["parameters"] == held["zero1"]["gradients"] == whole
    # fc1's weight cannot be cut by its owner: 256 x 784 of 4 bytes, twice. And a count of steps for each tensor.
    assert held["zero1"]["optimizer"] == 2 * 4 * 256 * 784 + 4
    for mode in ("zero2", "fsdp"):
        # 256 rows are 16 a rank, the output's 10 rows one: 16 x (784 + 1) + 16 x (256 + 1) + 1 x (256 + 1) numbers.
        assert held[mode]["parameters"] == held[mode]["gradients"] == 4 * (16 * 785 + 16 * 257 + 257)
        assert held[mode]["optimizer"] == 2 * held[mode]["parameters"] + 4 * 6
    # What fc1 was gathered into is there until fc2 was copied out of its own. On the way back, fc1 is copied out beside
    # fc2's gradients.
    fc1, fc2 = 4 * 256 * 785, 4 * 256 * 257
    assert held["zero2"]["gathered"] == 2 * fc1 + 2 * fc2
    assert held["fsdp"]["gathered"] == 2 * fc1 + fc2


def test_a_rank_without_rows_holds_nothing():
    plan = plan_of("fsdp", 12, model="mlp", hidden=16)
    assert plan.program(0).holds == (0, 1, 2)
    assert plan.program(11).holds == ()  # 16 rows are two each for eight ranks; 10 rows one each for ten
    assert plan.program(9).holds == (2,)
    assert plan.program(11).memory["optimizer"] == 0  # of SGD


def test_replicas_reduce_what_their_shards_hold():
    plan = plan_of("hsdp", 8, fsdp=4, model="mlp")
    assert (plan.mesh.axes, plan.mesh.degrees) == (("dp", "fsdp"), (2, 4))
    assert plan.roles[:4] == plan.roles[4:]
    reduced = [(op.kind, op.axis, op.bytes) for op in plan.program(0).ops if op.part == "fc2" and op.kind != "forward"]
    shard_bytes = 4 * (64 * 256 + 64)
    assert [r for r in reduced if r[0] != "backward"] == [
        ("all_gather", "fsdp", shard_bytes),
        ("all_gather", "fsdp", shard_bytes),
        ("reduce_scatter", "fsdp", 4 * shard_bytes),
        ("all_reduce", "dp", shard_bytes),
    ]


@pytest.mark.parametrize(
    ("devices", "given", "degrees"),
    [
        (8, {}, (2, 4)),
        (8, {"fsdp": 2}, (4, 2)),
        (8, {"dp": 8}, (8, 1)),
        (6, {"dp": 3, "fsdp": 2}, (3, 2)),
        (2, {}, (1, 2)),
        (3, {}, (1, 3)),
        (1, {}, (1, 1)),
    ],
)
def test_one_degree_follows_from_the_other(devices, given, degrees):
    spec = prepare(Spec(mode="hsdp", devices=devices, global_batch=48, **given)).spec
    assert (spec.dp, spec.fsdp) == degrees


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(SpecError) as error:
        prepare(Spec(mode="hsdp", devices=8, fsdp=3))
    assert str(error.value) == "fsdp must divide the number of devices (8); it is 3. Try: 1, 2, 4."
    with pytest.raises(SpecError) as error:
        prepare(Spec(mode="hsdp", devices=8, dp=4, fsdp=4))
    assert error.value.suggest == (2,)


def test_the_largest_parameter_goes_to_the_rank_that_owns_least():
    """By hand: 784 x 256 to rank 0; 256 x 256 and then all the rest to rank 1, which stays below it."""
    job = prepare(Spec(mode="zero1", devices=2, model="mlp"))
    first, second = owners(job.layers, 2)
    assert first.params == ("fc1.weight",)
    assert second.params == ("fc2.weight", "out.weight", "fc1.bias", "fc2.bias", "out.bias")
    assert (first.bytes, second.bytes) == (4 * 784 * 256, 4 * (256 * 256 + 2560 + 256 + 256 + 10))


def test_an_owner_of_nothing_broadcasts_one_number():
    plan = plan_of("zero1", 8, model="mlp", layers=1)
    sizes = [op.bytes for op in plan.program(7).ops if op.kind == "broadcast"]
    assert sizes == [4 * 784 * 256, 4 * 2560, 4 * 256, 4 * 10, 4, 4, 4, 4]
    assert plan.program(7).ops[-9].kind == "optimizer" and plan.program(7).ops[-9].flops == 0


@pytest.mark.parametrize(("ranks", "rank"), [(3, 2), (8, 7), (16, 3), (48, 10)])
def test_fully_shard_itself_keeps_those_rows(ranks, rank):
    """PyTorch's own cut, on one rank of a world that does not exist."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from engine.real import models

    job = prepare(Spec(mode="fsdp", devices=ranks, model="cnn", global_batch=48))
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        chain = models.build(job)
        for layer in chain.children():
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
        kept = {name: tuple(p.to_local().shape) for name, p in chain.named_parameters()}
        padded = sum(p.to_local().untyped_storage().nbytes() for p in chain.parameters())
    finally:
        dist.destroy_process_group()
    shards = [shard(layer, ranks, rank) for layer in job.layers]
    assert kept == {f"{layer.name}.{name}": shape for layer in shards for name, shape in layer.params}
    assert padded == modes.plan(job).program(rank).memory["parameters"]
