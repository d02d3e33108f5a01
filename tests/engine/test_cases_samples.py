"""What goes wrong with samples and batches in public reports, tried here: uneven numbers, repeats, averages."""

from __future__ import annotations

import json

import pytest

from engine import __main__ as command_line
from engine.asking.rules import SpecError
from engine.data import sampling
from engine.job import prepare
from engine.launch import start
from engine.outcome.health import memory_growth, repeated_orders
from engine.predict import predict
from engine.spec import Spec
from tests.engine.proof import finished, holds


def test_one_rank_with_a_batch_more_is_flagged_before_anything_runs():
    """pytorch#33148, #38174: the all-reduce of the rank with three batches waits for the one with two."""
    report = sampling.report(samples=5, ranks=2, batch=1)
    assert report["ways"]["keep"]["batches"] == [3, 2]
    assert report["ways"]["keep"]["runs_out"] == [{"rank": 1, "step": 2}]
    assert report["ways"]["pad"]["runs_out"] == report["ways"]["drop"]["runs_out"] == []


def test_13_samples_in_batches_of_2_on_3_ranks():
    """discuss.pytorch.org 220127: 3, 2 and 2 batches; a sampler that pads makes it 15 samples."""
    ways = sampling.report(samples=13, ranks=3, batch=2)["ways"]
    assert ways["keep"]["batches"] == [3, 2, 2]
    assert sum(map(len, ways["pad"]["samples"])) == 15 and ways["pad"]["batches"] == [3, 3, 3]
    assert sum(map(len, ways["drop"]["samples"])) == 12 and ways["drop"]["never"] == [12]


@pytest.mark.parametrize(("samples", "ranks"), [(10, 4), (13, 3), (12, 4), (3, 5), (1, 3), (7, 1)])
@pytest.mark.parametrize("way", ["pad", "drop"])
def test_samples_are_dealt_out_as_torch_s_sampler_does(samples, ranks, way):
    data = pytest.importorskip("torch.utils.data")
    drop = way == "drop"
    of_torch = [
        list(data.DistributedSampler(range(samples), ranks, rank, shuffle=False, drop_last=drop))
        for rank in range(ranks)
    ]
    assert sampling.deal(samples, ranks, way) == of_torch


def test_padded_duplicates_bias_an_accuracy_and_counting_once_does_not():
    """pytorch#25162, Lightning#2398: 10 samples on 4 ranks, of which the model is wrong on 0 and 1: 8/10, not 8/12."""
    report = sampling.report(samples=10, ranks=4, batch=1, wrong=[0, 1])
    padded = report["ways"]["pad"]
    assert padded["samples"] == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert padded["twice"] == [0, 1]
    assert padded["accuracy"] == pytest.approx(8 / 12)
    assert report["accuracy"] == report["ways"]["keep"]["accuracy"] == 0.8


def test_the_command_line_deals_and_warns(capsys):
    assert command_line.main("deal --samples 13 --devices 3 --batch 2".split()) == 0
    text = capsys.readouterr().out
    assert "3/2/2" in text and "WARNING   rank 1 runs out after 2 steps" in text
    assert command_line.main("deal --samples 10 --devices 4 --wrong 0,1 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 0.8
    for wrong in ("--samples 0", "--devices two", "--samples 5 --wrong 5", "--samples 1000000000"):
        assert command_line.main(["deal", *wrong.split()]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_global_batch_that_does_not_go_round_is_refused_with_those_that_do():
    with pytest.raises(SpecError) as refused:
        prepare(Spec(mode="ddp", devices=3, global_batch=13))
    assert (refused.value.code, refused.value.suggest) == ("batch_by_devices", (12, 15))


def test_the_batch_of_a_step_and_of_a_replica_are_both_told():
    """NVIDIA/apex#696: the learning rate goes with the batch of all replicas; an epoch is of whole ones."""
    summary = predict(Spec(mode="ddp", devices=4, global_batch=64)).summary()
    assert (summary["global_batch"], summary["replicas"], summary["local_batch"]) == (64, 4, 16)
    # 1,437 digits are 22 batches of 64 and one of 29.
    assert (summary["samples"], summary["batches_per_epoch"], summary["samples_left_out"]) == (1437, 22, 29)
    assert predict(Spec(mode="pipeline", devices=2, global_batch=64)).summary()["local_batch"] == 64


@pytest.mark.real
def test_each_rank_has_its_own_loss_and_the_mean_is_of_the_global_batch(launcher, runs_dir):
    """The loss printed on one rank is of its own samples; parity holds their mean to that of one device."""
    spec = Spec(mode="ddp", devices=4, model="mlp", hidden=16, global_batch=48, steps=4, device="cpu")
    result = finished(spec, launcher, runs_dir)
    holds(result)
    local = result["local_losses"]
    assert len(local) == 4 and all(len(losses) == 4 for losses in local)
    for step in range(4):
        assert len({losses[step] for losses in local}) == 4
        assert result["losses"][step] == pytest.approx(sum(losses[step] for losses in local) / 4)


@pytest.mark.real
@pytest.mark.parametrize(("fault", "repeated"), [(None, []), ("order@1:0", [{"rank": 1, "epoch": 1, "like": 0}])])
def test_an_epoch_in_the_order_of_an_earlier_one_is_found(fault, repeated, launcher, runs_dir):
    """pytorch#31771: without set_epoch a DistributedSampler gives every epoch the same order."""
    sizes = {"model": "mlp", "hidden": 16, "global_batch": 478, "epochs": 2}  # three steps an epoch
    spec = Spec(mode="ddp", devices=2, **sizes, device="cpu", fault=fault)
    result = finished(spec, launcher, runs_dir)
    assert result["steps"] == 6
    assert result["repeated_orders"] == repeated


def test_an_order_is_repeated_within_a_rank_and_across_its_epochs_only():
    def rows(*orders: str) -> list[dict]:
        return [{"epoch": epoch, "order": order} for epoch, order in enumerate(orders) for _ in range(3)]

    assert repeated_orders([rows("a", "b"), rows("b", "a")]) == []
    assert repeated_orders([rows("a", "b", "a"), rows("c", "c")]) == [
        {"rank": 0, "epoch": 2, "like": 0},
        {"rank": 1, "epoch": 1, "like": 0},
    ]
    assert repeated_orders([[{"step": 0}]]) == []  # a rank that loads nothing


def test_memory_growth_is_the_slope_of_the_second_half():
    """Of 200 steps, after 100 of which nothing is made for the first time; and of those that began late enough."""
    rows = [{"start": 5 + 0.1 * step, "resident": 1000 * min(step, 100) + 7 * step} for step in range(200)]
    assert memory_growth(rows) == pytest.approx(700.0)
    assert memory_growth(rows[:19]) is None
    once = [{"start": 0.005 * step, "resident": 9_000_000 * (step > 200) + 7 * step} for step in range(400)]
    assert memory_growth(once) == pytest.approx(700.0)  # the first second's spans were written after 200 steps
    assert memory_growth(once[:305]) is None  # four steps began after a second and a half


@pytest.mark.real
def test_memory_does_not_grow_with_the_steps(launcher, runs_dir):
    """lepard#12, pytorch#13246: less than a megabyte in a hundred steps, on every rank."""
    spec = Spec(mode="ddp", devices=2, model="mlp", hidden=16, global_batch=16, steps=2000, device="cpu")
    growth = start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=120)["memory_growth"]
    assert len(growth) == 2 and all(one < 1e6 for one in growth), growth
