"""A stage that is compiled computes what it computed before, with the same parameters, in the same pipeline."""

from __future__ import annotations

import pytest

from engine import modes, schedules
from engine.asking.here import lacks_compiler
from engine.asking.rules import SpecError
from engine.asking.settings import SPLIT_BACKWARD
from engine.job import prepare, prepare_real
from engine.spec import Spec
from tests.engine.proof import finished, holds

GPT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "dataset": "synthetic"}
SHORT = {"mode": "pipeline", "devices": 2, "global_batch": 16, "steps": 3, "device": "cpu"}


@pytest.mark.real
@pytest.mark.parametrize(
    ("schedule", "model"), [("1f1b", {"model": "cnn"}), ("zbv", GPT)]
)  # whole backwards, and halves: a trace keeps the nodes of autograd apart
def test_a_pipeline_of_traced_stages_does_what_was_planned(schedule, model, launcher, runs_dir):
    spec = Spec(schedule=schedule, compile_stage="torchscript", evaluate_every=3, **model, **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["evaluations"][0]["accuracy"] == pytest.approx(result["validation_accuracy"], abs=1e-12)


@pytest.mark.real
@pytest.mark.skipif(lacks_compiler() is not None, reason=f"torch.compile needs {lacks_compiler()}")
def test_a_pipeline_of_stages_under_torch_compile_does_what_was_planned(launcher, runs_dir):
    spec = Spec(compile_stage="torch_compile", model="mlp", layers=3, hidden=16, **SHORT)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.real
@pytest.mark.skipif(lacks_compiler() is not None, reason=f"torch.compile needs {lacks_compiler()}")
def test_torch_compile_takes_experts_of_any_number_of_tokens(launcher, runs_dir):
    """In parts: where tokens are counted, and dealt out by these numbers, a graph ends."""
    shapes = GPT | {"model": "moe", "layers": 1, "hidden": 16, "experts": 4, "top_k": 2}
    result = finished(Spec(compile_stage="torch_compile", **shapes, **SHORT), launcher, runs_dir)
    holds(result)
    (counts,) = result["expert_tokens"]["last"].values()
    assert sum(counts) == 16 * 16 * 2 and len(set(counts)) > 1


@pytest.mark.real
@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("torchscript", {"model": "cnn", "accumulate": 2}),
        ("torchscript", GPT | {"devices": 3, "masked": 0.5}),
        pytest.param(
            "torch_compile",
            {"model": "mlp", "layers": 3, "hidden": 16},
            marks=pytest.mark.skipif(lacks_compiler() is not None, reason=f"torch.compile needs {lacks_compiler()}"),
        ),
    ],
    ids=["cnn", "gpt", "torch_compile"],
)
def test_a_model_split_by_layers_runs_compiled_stages_as_planned(how, settings, launcher, runs_dir):
    spec = Spec(compile_stage=how, **(SHORT | {"mode": "layer_split"} | settings))
    holds(finished(spec, launcher, runs_dir))


def test_of_a_compiled_stage_a_pass_is_one_op_with_the_work_of_its_layers():
    spec = Spec(**(SHORT | {"mode": "layer_split", "model": "mlp", "layers": 3, "split": (2, 2)}))
    layered, whole = (modes.plan(prepare(spec.with_(compile_stage=how))) for how in ("none", "torchscript"))
    for rank in range(2):
        for kind in ("forward", "backward"):
            several = [op for op in layered.program(rank).ops if op.kind == kind]
            (one,) = [op for op in whole.program(rank).ops if op.kind == kind]
            assert len(several) == 2 and one.part == "" and one.flops == sum(op.flops for op in several)


@pytest.mark.parametrize("mode", ["layer_split", "pipeline"])
def test_experts_are_not_traced(mode):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(compile_stage="torchscript", **(SHORT | {"mode": mode, "model": "moe"})))
    assert (refused.value.code, refused.value.setting) == ("option_of_model", "compile_stage")


@pytest.mark.real
def test_a_traced_stage_is_torchscript_and_shares_the_parameters():
    torch = pytest.importorskip("torch")
    from engine.real import models
    from engine.real.stage_compiler import compiled

    job = prepare(Spec(**GPT, **SHORT))
    chain = models.piece(models.build(job), job, 1)
    example = torch.randn(4, 16, 32, requires_grad=True)
    traced = compiled(chain, example, "torchscript")
    assert isinstance(traced, torch.jit.ScriptModule) and not isinstance(chain, torch.jit.ScriptModule)
    assert all(a is b for a, b in zip(traced.parameters(), chain.parameters(), strict=True))
    for samples in (4, 7):  # the number of samples is not part of the trace
        inputs = torch.randn(samples, 16, 32)
        assert torch.equal(traced(inputs), chain(inputs))
    with torch.no_grad():
        next(chain.parameters()).mul_(2)
    assert torch.equal(traced(inputs), chain(inputs))
    assert compiled(chain, example, "none") is chain


def test_schedules_with_backwards_in_halves_are_those_that_have_them():
    for name, shape in schedules.TABLE.items():
        order = schedules.order(name, 2, 4, shape.stages_per_rank or 2)
        halves = any(action.kind == "backward_input" for actions in order for action in actions)
        assert halves == (name in SPLIT_BACKWARD), name


def test_halves_in_a_file_are_found_too():
    text = "0F0,0I0,0W0\n1F0,1I0,1W0\n"
    with pytest.raises(SpecError) as refused:
        prepare(Spec(schedule_file=text, compile_stage="torch_compile", **SHORT))
    assert (refused.value.code, refused.value.suggest) == ("compile_halves", ("torchscript", "none"))
    prepare(Spec(schedule_file=text, compile_stage="torchscript", **SHORT))


def test_without_a_compiler_the_reason_is_told_and_what_works(monkeypatch):
    spec = Spec(compile_stage="torch_compile", **SHORT)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        SpecError, match=r"compile-stage torch_compile needs a C\+\+ compiler.*Try: torchscript, none\.$"
    ):
        prepare_real(spec)
    prepare_real(spec.with_(compile_stage="torchscript"))
    prepare(spec)  # it can still be predicted
