"""Activation recomputation: what is kept, what is computed again and when, and numbers that it does not change."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from engine import modes
from engine.cost.machine import machine
from engine.job import prepare
from engine.rules import SpecError
from engine.simulate import simulate
from engine.spec import Spec
from tests.engine.proof import finished, holds

TEXT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}
MODES = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "layer_split")


def plan_of(mode: str, recompute: str, **settings):
    spec = Spec(mode=mode, devices=1 if mode == "single" else 2, recompute=recompute, **TEXT | settings)
    return modes.plan(prepare(spec))


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_computed_again_right_before_it_goes_back(mode):
    plan = plan_of(mode, "full")
    again = []
    for rank in range(1 if mode != "layer_split" else 2):
        computes = [op for op in plan.program(rank).ops if op.is_compute]
        for op, following in itertools.pairwise(computes):
            if op.kind == "recompute":
                assert (following.kind, following.part) == ("backward", op.part)
                again.append(op.part)
    assert sorted(again) == ["block1", "block2", "head"]  # an embedding keeps its input alone as it is


@pytest.mark.parametrize("mode", MODES)
def test_without_it_the_plan_is_the_same_but_for_that(mode):
    plain, full = (plan_of(mode, recompute).program(0).ops for recompute in ("none", "full"))
    kinds = [[(op.kind, op.part, op.bytes) for op in ops if op.kind != "recompute"] for ops in (plain, full)]
    assert kinds[0] == kinds[1]


def test_what_is_kept_falls_by_what_is_computed_again():
    """Of a block: 18 hidden vectors of each token, two norms' scales, the log-sum-exps; selectively its output and the
    results of five products (1 + 3 + 1 + 1 + 4 + 1 = 11) and the log-sum-exps; with all recomputed the output alone,
    which is the next one's input."""
    token, heads, scales = 4 * 16 * 32, 4 * 16 * 2, 4 * 16 * 2
    saved = {
        recompute: next(op.saved for op in plan_of("single", recompute).program(0).ops if op.part == "block1")
        for recompute in ("none", "selective", "full")
    }
    block = 18 * token + scales + heads
    assert saved == {"none": 16 * block, "selective": 16 * (11 * token + heads), "full": 16 * token}


def test_the_peak_is_one_layer_s_activations_above_what_all_keep():
    plans = {r: plan_of("single", r, layers=8) for r in ("none", "full")}
    peaks = {r: simulate(plan, machine("h100")).peak_memory[0] for r, plan in plans.items()}
    standing = sum(plans["none"].program(0).memory.values())
    forwards = [op for op in plans["none"].program(0).ops if op.kind == "forward"]
    block, output, batch = forwards[1].saved, 4 * 16 * 32 * 16, 2 * 8 * 16 * 16
    assert peaks["none"] - standing == batch + sum(op.saved for op in forwards)
    # When the last block goes back it is there again, with the outputs of those before it.
    assert peaks["full"] - standing == batch + forwards[0].saved + 7 * output + block


def test_a_full_recomputation_costs_a_third_more_on_a_pass_that_takes_one_and_its_backward_two():
    spans = list(simulate(plan_of("single", "full"), machine("unit")).timeline.spans())
    assert sum(s.end - s.start for s in spans) == pytest.approx(4.0)
    selective = simulate(plan_of("single", "selective"), machine("unit"))
    assert selective.makespan == pytest.approx(3.0)


@pytest.mark.parametrize("mode", ["data_parallel", "pipeline", "tensor"])
def test_where_it_is_not_done_it_is_refused_with_the_reason(mode):
    with pytest.raises(SpecError) as error:
        plan_of(mode, "full")
    assert error.value.code == "option_of_mode"


@pytest.mark.parametrize(("model", "recompute"), [("mlp", "full"), ("cnn", "full"), ("cnn", "selective")])
def test_torch_computes_again_the_products_that_are_planned(model, recompute):
    """Counted by torch itself, in a backward pass with and without: a product at a layer's end is not repeated, and no
    layer of an mlp, of which only its output is kept, which the next one needs."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from engine.real import models
    from engine.real.data import Batches
    from engine.real.recompute import recompute as change

    flops, gradients = [], []
    for how in ("none", recompute):
        job = prepare(Spec(mode="single", devices=1, model=model, global_batch=4, recompute=how))
        chain = models.build(job)
        change(chain, job)
        inputs, targets = Batches(job, 0, 1, torch.device("cpu"))(0)
        loss = models.loss_of(chain(inputs), targets)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops.append(counter.get_total_flops())
        gradients.append([p.grad for p in chain.parameters()])
    planned = Counter()
    for op in modes.plan(job).program(0).ops:
        planned[op.kind] += op.flops
    assert flops[1] - flops[0] == planned["recompute"]
    assert (planned["recompute"] > 0) == ((model, recompute) == ("cnn", "full"))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("ddp", TEXT | {"recompute": "full", "accumulate": 2}),
        ("zero2", {"model": "cnn", "global_batch": 16, "recompute": "selective"}),
        ("fsdp", TEXT | {"recompute": "full"}),
        ("hsdp", TEXT | {"recompute": "selective"}),
        ("layer_split", TEXT | {"recompute": "full"}),
    ],
)
def test_real_runs_recompute_what_was_planned_and_come_to_the_same(mode, settings, launcher, runs_dir):
    result = finished(Spec(mode=mode, devices=2, **settings, steps=4, device="cpu"), launcher, runs_dir)
    holds(result)
    assert result["parity"]["grad_max_rel_diff"] < 1e-5
