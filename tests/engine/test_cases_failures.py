"""Ranks that leave, hang, disagree or wait for each other, as public reports tell of: who is named, how soon, and why.

Each report is of a training that hung, or died with a message from the wrong rank. Here it ends, and the rank that is
the cause is named with what it did.
"""

from __future__ import annotations

import time

import pytest

from engine.asking.rules import SpecError
from engine.job import prepare, prepare_real
from engine.launch import start
from engine.spec import Spec

TIMEOUT = 4.0  # seconds that a rank waits for another, where one is to wait in vain
LONGEST = 25.0  # seconds that a run may take to fail, also on a busy machine; what waits by default waits for a minute
SMALL = {"model": "mlp", "hidden": 16, "global_batch": 48, "steps": 4, "device": "cpu"}


@pytest.fixture
def failed(launcher, runs_dir):
    """Settings -> the error of their run, which fails long before anybody has waited too long."""

    def failed(**settings) -> dict:
        began = time.monotonic()
        result = start(Spec(**(SMALL | settings)), runs_dir=runs_dir, launcher=launcher).result(timeout=60)
        assert result["status"] == "failed"
        assert time.monotonic() - began < LONGEST
        assert result["conformance"]["ok"] is not False
        return result["error"]

    return failed


@pytest.mark.real
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pipeline"])
def test_a_rank_without_a_batch_left_is_named_though_it_ended_well(mode, failed):
    """pytorch#33148, Lightning#20404: its peers say "connection reset", and it exits with 0."""
    error = failed(mode=mode, devices=2, fault="leave@1:2")
    assert error["rank"] == 1
    assert error["message"] == "rank 1 ended after 2 of 4 steps; its peers waited for it"


WAITING = {"ddp": ("hang", 1), "pipeline": ("hang", 1), "fsdp": ("alone", 0)}  # mode: what is wrong, on which rank


@pytest.fixture(scope="module")
def waited(launcher, tmp_path_factory) -> dict[str, dict]:
    """The results of runs that end when a rank has waited too long; all wait at once."""
    handles = {}
    for mode, (kind, rank) in WAITING.items():
        spec = Spec(**SMALL, mode=mode, devices=3, timeout=TIMEOUT, fault=f"{kind}@{rank}:2")
        handles[mode] = start(spec, runs_dir=tmp_path_factory.mktemp("waited"), launcher=launcher)
    began = time.monotonic()
    results = {mode: handle.result(timeout=60) for mode, handle in handles.items()}
    assert time.monotonic() - began < LONGEST
    return results


@pytest.mark.real
@pytest.mark.parametrize("mode", ["ddp", "pipeline"])
def test_a_rank_that_lives_on_in_silence_is_named_and_not_those_that_time_out(mode, waited):
    error = waited[mode]["error"]
    assert error["rank"] == 1
    assert error["message"].startswith("rank 1 did not answer; rank ")
    assert f"Timed out waiting {TIMEOUT * 1000:.0f}ms" in error["message"]


@pytest.mark.real
def test_ranks_in_different_collectives_are_told_with_what_each_of_them_is_in(waited):
    """pytorch#54059: one rank evaluates through the wrapper, which broadcasts, and the others go on."""
    error = waited["fsdp"]["error"]
    assert (error["rank"], error["step"], error["op"]) == (0, 2, "broadcast")
    what, _, doing = error["message"].partition(": ")
    assert what == "the ranks waited for each other"
    assert "rank 0 in broadcast" in doing and "rank 1, 2 in " in doing


@pytest.mark.real
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pipeline", "layer_split"])
def test_parameters_outside_of_the_loss_are_named_on_the_rank_that_has_them(mode, failed):
    """pytorch#43259, mmdetection#2153: the peers of such a rank wait for gradients that never come."""
    layer = {"pipeline": "fc2", "layer_split": "fc2"}.get(mode, "fc1")  # the first layer that rank 1 holds
    error = failed(mode=mode, devices=2, fault="skip@1:2")
    assert (error["rank"], error["step"]) == (1, 2)
    assert f"no gradient for {layer}.weight, {layer}.bias: on this rank" in error["message"]


@pytest.mark.real
@pytest.mark.parametrize("settings", [{"mode": "layer_split"}, {"schedule": "1f1b"}, {"schedule": "gpipe"}], ids=str)
def test_a_first_stage_that_is_not_trained_hangs_nobody(settings, failed):
    """PiPPy PR#1029, pytorch#153484: "does not require grad". All of the step is computed, and then it is said."""
    error = failed(**({"mode": "pipeline", "split": (1, 2)} | settings), devices=2, fault="skip@0:2")
    assert (error["rank"], error["step"]) == (0, 2)
    assert "no gradient for fc1.weight, fc1.bias: on this rank" in error["message"]


@pytest.mark.real
def test_a_rank_that_aborts_is_shown_with_its_signal_and_its_last_words(failed):
    """pytorch#174844: gloo ends the rank that is given too much, without an exception; its peer sees a reset."""
    error = failed(mode="ddp", devices=2, fault="size@1:2")
    assert error["message"].startswith("rank 0 aborted (signal 6): ")
    assert "Received data size doesn't match expected size" in error["message"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "fault", "message"),
    [
        # pytorch#73547, flow_grpo#245
        (
            "ddp",
            "model@1:0",
            "the ranks' models differ: 6 parameters on rank 0, 8 on rank 1 "
            "(extra.weight only on rank 1, extra.bias only on rank 1)",
        ),
        # pytorch#78022: three numbers here, five there
        (
            "zero1",
            "shape@0:0",
            "the ranks differ in the shape of fc1.weight: [16, 784] on rank 1, [17, 784] on rank 0",
        ),
        ("tensor", "weights@1:0", "the ranks differ in the sum of |fc1.weight|: "),
    ],
)
def test_ranks_that_would_not_train_the_same_model_are_told_before_the_first_step(mode, fault, message, failed):
    rank = int(fault[fault.index("@") + 1])
    error = failed(mode=mode, devices=3 if mode == "zero1" else 2, fault=fault)
    assert error["rank"] == rank
    assert error["step"] is None
    assert message in error["message"]


def test_what_differs_is_told_of_the_rank_that_stands_alone():
    agree = pytest.importorskip("engine.real.agree")

    def said(**changes) -> dict:
        same = {
            "torch": "2.13.0",
            "settings": {"lr": 0.1},
            "samples": 9,
            "shapes": {"w": [2, 2]},
            "weights": {"w": 1.0},
        }
        return same | changes

    agree.compare([said(), said(), said()])
    for change, words in [
        ({"torch": "2.11.0"}, "the version of torch: 2.13.0 on rank 0, 2.11.0 on rank 2"),
        ({"settings": {"lr": 0.2}}, "lr: 0.1 on rank 0, 0.2 on rank 2"),
        ({"samples": 8}, "the number of training samples: 9 on rank 0, 8 on rank 2"),
        ({"shapes": {"w": [2, 3]}}, "the shape of w: [2, 2] on rank 0, [2, 3] on rank 2"),
        ({"weights": {"w": float("nan")}}, "the sum of |w|: 1.0 on rank 0, nan on rank 2"),
    ]:
        with pytest.raises(agree.Disagreement) as differs:
            agree.compare([said(), said(), said(**change)])
        assert (differs.value.rank, str(differs.value)) == (2, f"the ranks differ in {words}")


@pytest.mark.parametrize(
    ("settings", "fault", "code", "suggest"),
    [
        ({"devices": 2, "steps": 4}, "raise@1:4", "bad_fault", ("raise@1:3",)),
        ({"devices": 2}, "kill@2:0", "bad_fault", ("kill@1:0",)),
        ({"mode": "data_parallel", "devices": 4}, "slow@1:0:0.1", "bad_fault", ("slow@0:0:0.1",)),
        ({"devices": 2}, "model@1:3", "bad_fault", ("model@1:0",)),
        ({"mode": "single", "devices": 1}, "alone@0:0", "fault_with_peers", ("raise@0:0", "exit@0:0", "kill@0:0")),
    ],
)
def test_a_fault_that_could_not_happen_is_refused_and_not_passed_over(settings, fault, code, suggest):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(**settings, fault=fault))
    assert (refused.value.code, refused.value.suggest) == (code, suggest)
    for better in suggest:
        prepare(Spec(**settings, fault=better))


@pytest.mark.parametrize(
    ("factor", "ok"), [(1.0, True), (1 + 5e-7, True), (1 + 5e-6, False), (2.0, False), (float("nan"), False)]
)
def test_gradients_that_fully_shard_sums_and_does_not_average_are_refused(factor, ok):
    """pytorch#162338: on gloo it summed them, and nothing was said."""
    torch = pytest.importorskip("torch")
    from engine.real.averaging import verdict

    gradient = torch.full((1, 1), 1.5, dtype=torch.float64) * factor  # of 1 on rank 0 and 2 on rank 1
    if ok:
        verdict(gradient, 1.5, 2)
    else:
        with pytest.raises(RuntimeError, match="times the average over 2 ranks"):
            verdict(gradient, 1.5, 2)


@pytest.mark.parametrize(
    ("version", "mode", "says"),
    [
        ("2.13.0+cpu", "fsdp", None),
        ("2.11.1", "ddp", None),
        ("2.7.1", "fsdp", "older ones have no reduce_scatter on gloo, or no average in it; this is 2.7.1"),
        ("2.7.1+cpu", "ddp", "A real run needs torch 2.11 or newer; this is 2.7.1+cpu."),
        ("1.13.1", "sequence", "no reduce_scatter on gloo"),
    ],
)
def test_a_torch_that_is_too_old_is_refused_with_what_it_lacks(version, mode, says, monkeypatch):
    """pytorch#149781, #149869: fully_shard on CPU processes is of 2025."""
    monkeypatch.setattr("engine.asking.here.metadata.version", lambda package: version)
    spec = Spec(mode=mode, model="gpt", device="cpu")
    if says is None:
        prepare_real(spec)
    else:
        with pytest.raises(SpecError, match=says.replace("+", r"\+")):
            prepare_real(spec)
