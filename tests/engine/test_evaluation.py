"""Looking at the validation samples during a training changes nothing of it, and sees what the whole model sees."""

from __future__ import annotations

import pytest

from engine import checkpoints
from engine.spec import Spec
from tests.engine.proof import finished, holds

pytestmark = pytest.mark.real

SHORT = {"steps": 3, "device": "cpu", "optimizer": "adamw", "evaluate_every": 1}
MLP = {"model": "mlp", "layers": 3, "hidden": 16, "global_batch": 24}
GPT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 4, "context": 16, "dataset": "synthetic", "global_batch": 12}
MOE = GPT | {"model": "moe", "experts": 4}


@pytest.mark.parametrize(
    ("mode", "devices", "model"),
    [
        ("single", 1, MLP), ("data_parallel", 2, MLP), ("ddp", 4, MLP), ("zero1", 2, MLP), ("zero2", 3, MLP),
        ("fsdp", 2, GPT), ("hsdp", 4, MLP), ("layer_split", 3, MLP), ("tensor", 2, GPT), ("sequence", 2, GPT),
        ("context", 2, GPT), ("expert", 2, MOE),
    ],
)  # fmt: skip
def test_every_mode_sees_the_loss_and_the_accuracy_of_its_whole_model(mode, devices, model, launcher, runs_dir):
    """The last evaluation has the accuracy that rank 0 finds with the parameters of all ranks gathered; and no op of a
    later step, no gradient and no parameter is another than of one device that was never evaluated."""
    result = finished(Spec(mode=mode, devices=devices, **model, **SHORT), launcher, runs_dir)
    holds(result)
    assert [one["step"] for one in result["evaluations"]] == [1, 2, 3]
    assert result["evaluations"][-1]["accuracy"] == pytest.approx(result["validation_accuracy"], abs=1e-12)
    losses = [one["loss"] for one in result["evaluations"]]
    assert losses[2] < losses[0] < 5 and losses[0] != losses[1]


def tensors(result: dict, runs_dir) -> dict:
    """Everything in the last checkpoint of a run: parameters, moments, counts of steps."""
    import torch
    import torch.distributed.checkpoint as dcp

    from engine.real.checkpoint import Reader

    reader = Reader(checkpoints.find(result["run_id"], runs_dir).folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [("fsdp", None), ("zero2", None), ("pipeline", "1f1b"), ("pipeline", "zbv"), ("pipeline", "dualpipev")],
)
def test_a_training_that_is_evaluated_is_bit_by_bit_the_one_that_is_not(mode, schedule, launcher, runs_dir):
    torch = pytest.importorskip("torch")
    spec = Spec(mode=mode, schedule=schedule, devices=2, **MLP, **SHORT, save_every=3)
    seen = finished(spec, launcher, runs_dir)
    holds(seen)
    assert seen["evaluations"][-1]["accuracy"] == pytest.approx(seen["validation_accuracy"], abs=1e-12)
    alone = finished(spec.with_(evaluate_every=None), launcher, runs_dir)
    assert alone["evaluations"] == []
    assert seen["losses"] == alone["losses"]
    one, other = tensors(seen, runs_dir), tensors(alone, runs_dir)
    assert one.keys() == other.keys() and len(one) == 4 * 8  # a parameter, two moments, a count; of 8 parameters
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_and_a_step_that_follows_are_left_alone(tmp_path):
    """On one rank, in this process, between backward and update: torch's own `schedule.eval` fails here (zbv)."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from engine.job import prepare
    from engine.modes.pipeline import run
    from engine.real.evaluation import evaluate
    from engine.real.recorder import Recorder
    from engine.real.training import Place

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = prepare(Spec(mode="pipeline", schedule="zbv", devices=1, **MLP, **SHORT))
        place = Place(0, 1, torch.device("cpu"), Recorder(tmp_path / "spans", 0, 0, enabled=False), tmp_path)
        training = run.training(job, place)
        training.make_gradients(0)
        before = {name: p.grad.clone() for name, p in training.held().items()}
        first = evaluate(job, place, training)
        assert all(torch.equal(p.grad, before[name]) for name, p in training.held().items())
        assert first == evaluate(job, place, training)
        training.make_gradients(0)
        assert all(torch.equal(p.grad, before[name]) for name, p in training.held().items())
        with pytest.raises(Exception, match=r"steal_bwd_input|backward"):
            training.schedule.eval(*training.batches(0)[:1], target=training.batches(0)[1], losses=[])
    finally:
        dist.destroy_process_group()
