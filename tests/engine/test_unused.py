"""Parameters that are not in a rank's loss: who is named, what DDP does to find them, what their gradients come to."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.job import prepare
from engine.modes.ddp.buckets import buckets, filled_without
from engine.spec import Spec
from tests.engine.proof import finished, holds

MLP = {"mode": "ddp", "model": "mlp", "layers": 3, "hidden": 32, "global_batch": 24}
GPT = {"mode": "ddp", "model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 8}
BRANCHES = {"leave_out": "0:block1,1:block2", "find_unused": True}


def refused(**settings) -> SpecError:
    with pytest.raises(SpecError) as error:
        prepare(Spec(**MLP | {"devices": 2} | settings))
    return error.value


def test_without_the_option_the_unused_parameters_are_named_for_each_rank():
    """pytorch#43259: the other ranks would wait for their gradients."""
    error = refused(leave_out="0:fc2,1:fc3")
    assert (error.code, error.suggest) == ("unused_parameters", ("true",))
    assert "rank 0: fc2.weight, fc2.bias; rank 1: fc3.weight, fc3.bias" in str(error)


@pytest.mark.parametrize(
    ("leave_out", "code"),
    [
        ("0:fc1", "bad_leave_out"),  # of another shape than what comes in
        ("0:out", "bad_leave_out"),
        ("2:fc2", "bad_leave_out"),
        ("fc2", "bad_leave_out"),
        ("", "bad_leave_out"),
        ("0:fc2,1:fc2", "left_out_by_all"),
    ],
)
def test_a_layer_that_cannot_be_left_out_is_refused(leave_out, code):
    assert refused(leave_out=leave_out, find_unused=True).code == code


def test_powersgd_is_refused_beside_it():
    assert refused(find_unused=True, compress="powersgd").code == "unused_of_powersgd"


def test_a_rank_computes_what_it_has_and_reduces_all():
    plan = modes.plan(prepare(Spec(**GPT, devices=2, **BRANCHES, bucket_mb=0.02)))
    one, other = (plan.program(rank).ops for rank in range(2))
    for ops, absent in ((one, "block1"), (other, "block2")):
        computed = {op.part for op in ops if op.kind in ("forward", "backward")}
        assert computed == {"embed", "block1", "block2", "head"} - {absent}
    sent = [[(op.part, op.bytes) for op in ops if op.kind == "all_reduce"] for ops in (one, other)]
    assert sent[0] == sent[1]
    num = sum(len(layer.params) for layer in prepare(Spec(**GPT)).layers)
    assert sent[0][-1] == ("used parameters", 4 * num)


def test_buckets_are_cut_from_the_first_parameter_on_and_never_again():
    job = prepare(Spec(**GPT, devices=2, find_unused=True, bucket_mb=0.02))
    found = buckets(job.layers, 0.02, forward=True)
    names = [f"{layer.name}.{name}" for layer in job.layers for name, _ in layer.params]
    assert [name for bucket in reversed(found) for name in bucket.params] == names
    assert all(bucket.bytes >= 0.02 * 2**20 for bucket in found[1:])  # the last one to be cut goes first
    plans = [modes.plan(job, step) for step in range(3)]
    assert plans[0] == plans[1] == plans[2]
    assert not any(op.kind == "broadcast" for op in plans[1].program(0).ops)


def test_a_bucket_without_gradients_waits_for_its_turn():
    job = prepare(Spec(**GPT, devices=2, bucket_mb=0.001, find_unused=True))
    order = [layer.name for layer in job.layers]
    whole = buckets(job.layers, 0.001, forward=True)
    left = filled_without(whole, ["head", "block2", "embed"])
    places = [order.index(bucket.last_layer) for bucket in left]
    assert all(a >= b for a, b in pairwise(places))
    of_absent = [b.last_layer for b in left if all(name.startswith("block1") for name in b.params)]
    assert of_absent and set(of_absent) == {"block2"}
    assert filled_without(whole, ["head", "block2", "block1", "embed"]) == whole


@pytest.mark.real
@pytest.mark.parametrize(
    "settings",
    [
        GPT | BRANCHES | {"devices": 2, "bucket_mb": 0.02},
        MLP | {"devices": 3, "leave_out": "2:fc2", "find_unused": True, "accumulate": 2, "optimizer": "adamw"},
        MLP | {"devices": 2, "leave_out": "1:fc3", "find_unused": True, "compress": "fp16", "clip": 0.1},
        MLP | {"devices": 2, "find_unused": True, "accumulate": 2, "sync_every_microstep": True},
    ],
    ids=["branches", "accumulated", "compressed", "none"],
)
def test_gradients_of_what_a_rank_left_out_are_averages_with_zeros(settings, launcher, runs_dir):
    holds(finished(Spec(**settings, steps=4, device="cpu"), launcher, runs_dir))
