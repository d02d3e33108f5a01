"""Meshes place ranks as a row-major array does; programs in columns are tuples of ops; DDP's buckets close in time."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from engine import modes
from engine.graph.columns import Ops, unroll
from engine.job import prepare
from engine.modes.ddp.buckets import buckets
from engine.plan import Mesh, Op, lane_of
from engine.spec import Spec

MIB = 1024 * 1024

# The mesh


@pytest.mark.parametrize(
    ("axes", "degrees"), [(("dp",), (5,)), (("pp", "dp"), (2, 3)), (("dp", "pp", "tp"), (3, 2, 4)), ((), ())]
)
def test_a_mesh_places_ranks_as_a_row_major_array(axes, degrees):
    """numpy's own row-major order is the oracle, and torch's DeviceMesh is laid out the same."""
    mesh, grid = Mesh(axes, degrees), np.arange(np.prod(degrees, dtype=int)).reshape(degrees)
    assert mesh.size == grid.size
    for place in np.ndindex(*degrees):
        rank = int(grid[place])
        for i, axis in enumerate(axes):
            line = grid[place[:i] + (slice(None),) + place[i + 1 :]]
            assert mesh.coordinate(rank, axis) == place[i]
            assert mesh.group(rank, axis) == tuple(line)
            assert [mesh.peer(rank, axis, k) for k in range(degrees[i])] == line.tolist()


def test_an_axis_that_a_mesh_does_not_have_has_degree_1():
    assert Mesh(("dp",), (4,)).degree("tp") == 1


def test_a_link_is_one_lane_a_direction():
    send, recv = Op(kind="send", axis="pp", peer=1), Op(kind="recv", axis="pp", peer=1)
    assert lane_of(send, 0) == "pp:0>1"
    assert lane_of(recv, 0) == "pp:1>0"
    assert lane_of(replace(recv, peer=0), 1) == "pp:0>1"
    assert lane_of(Op(kind="all_reduce", axis="dp"), 3) == "dp"
    assert lane_of(Op(kind="optimizer"), 3) == "compute"


# Programs in columns

LOAD = Op(kind="load", bytes=8)
FORWARD = (Op(kind="recv", axis="pp", peer=0), Op(kind="forward", stage=1, flops=2))
BACKWARD = (Op(kind="backward", stage=1), Op(kind="send", axis="pp", peer=0), Op(kind="send", axis="pp", peer=2))
PASSES = {"forward": FORWARD, "backward": BACKWARD, "nothing": ()}
ORDER = [("forward", 0), ("nothing", 4), ("forward", 1), ("backward", 1), ("backward", 0), ("forward", 7)]


def test_unrolled_passes_are_the_ops_one_by_one():
    written_out = [LOAD]
    for name, microbatch in ORDER:
        written_out += [replace(op, microbatch=microbatch) for op in PASSES[name]]
    written_out.append(Op(kind="optimizer"))
    ops = unroll(PASSES, ORDER, before=[LOAD], after=[Op(kind="optimizer")])
    assert list(ops) == written_out
    assert ops == tuple(written_out) and tuple(written_out) == ops
    assert [ops[i] for i in range(len(ops))] == written_out
    assert ops[-1] == written_out[-1]
    assert ops[2:9:3] == tuple(written_out[2:9:3])


@pytest.mark.parametrize("change", [{"microbatch": 3}, {"bytes": 9}, {"kind": "recv"}])
def test_columns_that_differ_in_one_op_are_not_equal(change):
    ops = unroll(PASSES, ORDER)
    other = (*ops[:5], replace(ops[5], **change), *ops[6:])
    assert ops != other and other != ops
    assert ops != Ops.of(other) and ops[:5] == other[:5]
    assert ops != ops[:-1]
    assert ops != list(ops)  # as a tuple is not a list


def test_any_tuple_of_ops_has_columns():
    ops = (LOAD, *FORWARD, Op(kind="backward", microbatch=5), LOAD)
    assert Ops.of(ops) == ops
    assert Ops.of(Ops.of(ops)) == ops
    assert Ops.of(()) == () and len(unroll({}, [])) == 0
    assert pickle.loads(pickle.dumps(Ops.of(ops))) == ops


def test_a_pipelines_plan_is_its_schedule_with_the_messages_between_stages():
    """Two stages, two microbatches of 32 samples, GPipe. conv2 puts out 50 x 4 x 4 floats a sample."""
    spec = Spec(mode="pipeline", devices=2, schedule="gpipe", microbatches=2, split=(2, 2))
    first, last = modes.plan(prepare(spec)).programs
    size = 32 * 50 * 4 * 4 * 4

    def words(ops):
        return [
            (op.kind, op.payload, op.stage, op.microbatch, op.peer, op.bytes, op.asynchronous)
            if op.axis
            else (op.kind, op.microbatch)
            for op in ops
        ]

    assert words(first.ops) == [
        ("load", None),
        ("forward", 0),
        ("send", "activation", 0, 0, 1, size, True),
        ("forward", 1),
        ("send", "activation", 0, 1, 1, size, True),
        ("recv", "gradient", 0, 0, 1, size, False),
        ("backward", 0),
        ("recv", "gradient", 0, 1, 1, size, False),
        ("backward", 1),
        ("optimizer", None),
    ]
    assert words(last.ops) == [
        ("load", None),
        ("recv", "activation", 1, 0, 0, size, False),
        ("forward", 0),
        ("recv", "activation", 1, 1, 0, size, False),
        ("forward", 1),
        ("backward", 0),
        ("send", "gradient", 1, 0, 0, size, True),
        ("backward", 1),
        ("send", "gradient", 1, 1, 0, size, True),
        ("optimizer", None),
    ]
    assert (first.holds, last.holds) == ((0, 1), (2, 3))


def test_a_pipelines_microbatches_add_up_to_the_batch():
    """Arithmetic is shared out, so four microbatches cost the FLOPs of one device with the whole batch."""
    whole = modes.plan(prepare(Spec(mode="single", devices=1))).programs[0]
    cut = modes.plan(prepare(Spec(mode="pipeline", devices=2, microbatches=4)))
    for kind in ("forward", "backward"):
        of_stages = sum(op.flops for program in cut.programs for op in program.ops if op.kind == kind)
        assert of_stages == sum(op.flops for op in whole.ops if op.kind == kind)


# DDP's buckets. Bytes of the cnn's parameters in the order in which backward makes them, last first, but of a
# convolution its weight's: fc2 40 and 20,000; fc1 2,000 and 1,600,000; conv2 100,000 and 200; conv1 2,000 and 80.
CNN = [
    # The default of 25 MiB has a first bucket of 1 MiB (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
    (25.0, [(1_622_040, "fc1"), (102_280, "conv1")]),
    (None, [(1_724_320, "conv1")]),
    (10.0, [(1_724_320, "conv1")]),
    (0.1, [(1_622_040, "fc1"), (102_280, "conv1")]),  # 104,857 bytes: the convolutions do not fill it
    (0.05, [(1_622_040, "fc1"), (100_000, "conv2"), (2_280, "conv1")]),  # 52,428 bytes
    (0.01, [(20_040, "fc2"), (1_602_000, "fc1"), (100_000, "conv2"), (2_280, "conv1")]),  # 10,485 bytes
    (20_040 / MIB, [(20_040, "fc2"), (1_602_000, "fc1"), (100_000, "conv2"), (2_280, "conv1")]),  # reached exactly
    # Missed by one byte, so that fc1's bias fills the first one and its weight a second.
    (20_041 / MIB, [(22_040, "fc1"), (1_600_000, "fc1"), (100_000, "conv2"), (2_280, "conv1")]),
]
# The mlp with two hidden layers of 256: out 40 and 10,240; fc2 1,024 and 262,144; fc1 1,024 and 802,816.
MLP = [
    (25.0, [(1_077_288, "fc1")]),  # over 1 MiB only with the very last gradient
    (0.25, [(273_448, "fc2"), (803_840, "fc1")]),  # 262,144 bytes: fc2's weight with out before it
    (0.001, [(10_280, "out"), (263_168, "fc2"), (803_840, "fc1")]),  # 1,048 bytes: biases alone do not fill it
]


@pytest.mark.parametrize(
    ("model", "limit_mb", "expected"),
    [("cnn", *case) for case in CNN] + [("mlp", *case) for case in MLP],
)
def test_a_bucket_is_closed_by_the_gradient_that_reaches_its_limit(model, limit_mb, expected):
    layers = prepare(Spec(mode="single", devices=1, model=model)).layers
    made = buckets(layers, limit_mb)
    assert [(bucket.bytes, bucket.last_layer) for bucket in made] == expected
    in_order = [name for bucket in made for name in bucket.params]
    of_layer = {"conv": ("weight", "bias")}
    wanted = [(layer.name, of_layer.get(layer.name[:4], ("bias", "weight"))) for layer in reversed(layers)]
    assert in_order == [f"{layer}.{name}" for layer, names in wanted for name in names]


@pytest.mark.parametrize(("step", "sizes"), [(0, [1_724_320]), (1, [1_622_040, 102_280]), (2, [1_622_040, 102_280])])
def test_ddp_reduces_one_bucket_in_step_0_and_rebuilds_its_buckets_in_step_1(step, sizes):
    ops = modes.plan(prepare(Spec(mode="ddp", devices=2)), step).programs[0].ops
    assert [op.bytes for op in ops if op.kind == "all_reduce"] == sizes
    # Only the rebuild tells all ranks about it: 8 indices and a count, then as many sizes as there are buckets.
    assert [op.bytes for op in ops if op.kind == "broadcast"] == ([4 * 9, 4 * 2] if step == 1 else [])


def test_a_bucket_is_reduced_right_after_the_backward_of_its_last_layer():
    ops = modes.plan(prepare(Spec(mode="ddp", devices=2))).programs[0].ops
    around = [(op.kind, op.part) for op in ops if op.kind in ("backward", "all_reduce", "optimizer")]
    assert around == [
        ("backward", "fc2"),
        ("backward", "fc1"),
        ("all_reduce", "bucket0"),
        ("backward", "conv2"),
        ("backward", "conv1"),
        ("all_reduce", "bucket1"),
        ("optimizer", ""),
    ]
