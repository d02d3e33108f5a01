"""What goes wrong with pipelines and with what parity stands on, in public reports, tried here without processes."""

from __future__ import annotations

import json

import pytest

from engine import __main__ as command_line
from engine import schedules
from engine.asking.rules import SpecError
from engine.asking.settings import TOKEN_MODELS
from engine.job import prepare
from engine.model.presets import PRESETS
from engine.spec import MODELS, Spec

ENOUGH_LAYERS = {"model": "mlp", "layers": 15, "hidden": 16}


def refusal(**settings) -> SpecError | None:
    try:
        prepare(Spec(mode="pipeline", **(ENOUGH_LAYERS | settings)))
    except SpecError as error:
        return error
    return None


def test_eight_rows_in_three_microbatches_are_refused_with_the_numbers_that_work():
    """pytorch#126600: torch fails on one rank, in the middle of a step."""
    error = refusal(devices=2, global_batch=8, microbatches=3)
    assert (error.code, error.setting, error.suggest) == ("batch_by_microbatches", "microbatches", (2, 4, 8))


# pytorch PR#144702 and torch 2.13: what each schedule says to one microbatch on two ranks, and the fewest it takes.
FEWEST = {
    "gpipe": 1,
    "1f1b": 2,
    "looped_bfs": 1,
    "interleaved_1f1b": 1,
    "interleaved_zero_bubble": 1,
    "zbv": 1,
    "dualpipev": 4,
}


@pytest.mark.parametrize(("schedule", "fewest"), FEWEST.items())
def test_the_fewest_microbatches_are_those_that_torch_takes_and_a_sentence_says_so(schedule, fewest):
    for count in range(1, 5):
        error = refusal(devices=2, schedule=schedule, microbatches=count, global_batch=12)
        if count >= fewest:
            assert error is None, count
        else:
            assert error.code == "too_few_microbatches"
            assert str(error).startswith(
                f"The schedule {schedule} needs at least as many microbatches as stages ({fewest}); "
                f"microbatches is {count}. Try: "
            )
            assert error.suggest[0] == fewest


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize(("microbatches", "rounds"), [(3, 1), (7, 1), (8, 2), (9, 2), (10, 2), (12, 3), (13, 3)])
def test_interleaved_schedules_take_microbatches_in_rounds(schedule, microbatches, rounds):
    """pytorch PR#129597: on 4 ranks M % max(1, M // 4) == 0: 10 goes in 2 rounds, 3 in one, and 9 does not."""
    error = refusal(devices=4, schedule=schedule, microbatches=microbatches, global_batch=10 * microbatches)
    if microbatches % rounds == 0:
        assert error is None
    else:
        assert (error.code, error.values["rounds"]) == ("rounds_of_microbatches", str(rounds))


@pytest.mark.parametrize(
    ("schedule", "devices", "batch", "works"),
    [("1f1b", 4, 3, (4, 5, 6)), ("dualpipev", 4, 7, (8, 9, 10)), ("dualpipe", 4, 63, (60, 62, 64))],
)
def test_a_batch_without_any_right_number_of_microbatches_is_refused_with_batches_that_have_one(
    schedule, devices, batch, works
):
    error = refusal(devices=devices, schedule=schedule, global_batch=batch)
    assert (error.code, error.setting, error.suggest) == ("batch_of_schedule", "global_batch", works)
    for better in works:
        assert refusal(devices=devices, schedule=schedule, global_batch=better) is None


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_a_v_puts_the_first_and_the_last_stage_on_one_rank(schedule):
    """torchtitan#774: on 4 ranks, 0 and 7 on rank 0, 3 and 4 on rank 3."""
    assert schedules.placement(schedule, 4, 2) == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", [32] * 8), ("1f1b", [8, 7, 6, 5, 4, 3, 2, 1])])
def test_whose_bubble_78_slots_and_both_fractions_under_their_names(schedule, in_flight, capsys):
    """PP-Schedule-Visualization#1, DeepSeek-V3#211: 8 stages, 32 microbatches, 2 (32 + 7) slots, 14 of 78 idle. Of all
    time that is 0.1795, of the useful time 14 / 64. GPipe and 1F1B differ in what they keep, not in this."""
    words = f"simulate --mode pipeline --devices 8 --microbatches 32 --schedule {schedule} --model mlp --layers 7"
    assert command_line.main([*words.split(), "--machine", "slots", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step_time"] == 78
    assert summary["bubble_fraction"] == pytest.approx(14 / 78) and round(14 / 78, 4) == 0.1795
    assert summary["bubble_over_ideal"] == pytest.approx(14 / 64)
    assert summary["peak_in_flight"] == in_flight
    assert command_line.main([*words.split(), "--machine", "slots"]) == 0
    text = capsys.readouterr().out
    assert "bubble fraction        17.9 % = idle compute time / (ranks × makespan)" in text
    assert "bubble over ideal      21.9 % = idle compute time / busy compute time" in text


@pytest.mark.parametrize(("receives", "longer"), [("late", False), ("early", True)])
def test_receives_that_block_early_make_a_step_longer(receives, longer, capsys):
    """pytorch#188833: 8 ranks, 2 stages each. Late: 3 s x 2 x 16 and the 7 stages' idle time of 3 s each."""
    words = "simulate --mode pipeline --devices 8 --schedule interleaved_1f1b --microbatches 16 --model mlp --layers 15"
    assert command_line.main([*words.split(), "--machine", "unit", "--receives", receives, "--json"]) == 0
    step_time = json.loads(capsys.readouterr().out)["step_time"]
    assert step_time > 117 if longer else step_time == 3 * (2 * 16 + 7) == 117


@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_zero_bubble", "zbv"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_without_a_trained_parameter_leaves_the_others_their_gradients(frozen, schedule, tmp_path):
    """PiPPy PR#1029, pytorch#153484, qlora-pipe#56. Two stages on one rank, in this process."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from engine.modes.pipeline import run
    from engine.real.recorder import Recorder
    from engine.real.training import Place

    settings = {"model": "mlp", "layers": 3, "hidden": 8, "global_batch": 8, "microbatches": 4, "device": "cpu"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = prepare(Spec(mode="pipeline", schedule=schedule, devices=1, **settings))
        place = Place(0, 1, torch.device("cpu"), Recorder(tmp_path / "spans", 0, 0, enabled=False), tmp_path)
        training = run.training(job, place)
        training.make_gradients(0)
        wanted = {name: p.grad.clone() for name, p in training.held().items()}
        for parameter in training.chains[frozen].parameters():
            parameter.requires_grad_(False)
        training.make_gradients(0)
        of_stage = {name for name, _ in training.chains[frozen].named_parameters()}
        for name, parameter in training.held().items():
            assert parameter.grad is None if name in of_stage else torch.equal(parameter.grad, wanted[name]), name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model", [model for model in MODELS if model not in PRESETS])
def test_no_model_computes_with_chance_or_with_the_statistics_of_a_batch(model):
    """moco#41, torchgpipe#14, pytorch#168058: batch normalisation and dropout depend on how samples are shared out, and
    with them no run could be compared with one device; pytorch#22095: nor could one with buffers that forward changes
    in place, which DDP broadcasts. Each sample's output is its own, and no buffer is kept."""
    torch = pytest.importorskip("torch")
    from engine.real import models
    from engine.real.data import Batches

    sizes = {"layers": 1, "hidden": 16} if model != "cnn" else {}
    sizes |= {"heads": 2, "context": 8} if model in TOKEN_MODELS else {}
    job = prepare(Spec(mode="single", devices=1, model=model, dataset="synthetic", global_batch=8, **sizes))
    module = models.build(job).train()
    inputs, _ = Batches(job, 0, 1, torch.device("cpu"))(0)
    together = module(inputs)
    alone = torch.cat([module(inputs[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(together, module.eval()(inputs), rtol=0, atol=0)
    assert not list(module.buffers())
