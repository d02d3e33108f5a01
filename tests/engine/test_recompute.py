"""Activation recomputation: what is kept, what is computed again and when, and numbers that it does not change."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.machine import machine
from engine.job import prepare
from engine.modes.expert.pieces import pieces
from engine.simulation import simulate
from engine.spec import Spec

TEXT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16, "global_batch": 16}
MODES = ("single", "data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "layer_split")


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
    # When the last block goes back it is there again, with the outputs of those before it. Its own output, the head's
    # input, is gone with the head.
    assert peaks["full"] - standing == batch + forwards[0].saved + 7 * output + block - output


def test_a_full_recomputation_costs_a_third_more_on_a_pass_that_takes_one_and_its_backward_two():
    spans = list(simulate(plan_of("single", "full"), machine("unit")).timeline.spans())
    assert sum(s.end - s.start for s in spans) == pytest.approx(4.0)
    selective = simulate(plan_of("single", "selective"), machine("unit"))
    assert selective.makespan == pytest.approx(3.0)


def test_what_is_computed_again_attends_again_and_selectively_only_to_what_it_gathers_for_it():
    """Of a ring of two, one message each way: again, or the result is kept, which takes no message. What is gathered is
    gathered again, but attention is a product of it, and kept."""
    ring = ["recompute qkv", "send attention1", "recompute attention0", "recv attention1", "recompute attention1"]
    gathered = ["recompute qkv", "all_gather attention"]
    by_heads = ["recompute qkv", "all_to_all attention", "recompute attention", "all_to_all attention"]
    expected = {
        ("ring", "full"): [*ring, "recompute mlp"],
        ("ring", "selective"): ["recompute qkv"],
        ("all_gather", "full"): [*gathered, "recompute attention", "recompute mlp"],
        ("all_gather", "selective"): [*gathered, "recompute attention", "recompute mlp"],
        ("ulysses", "full"): [*by_heads, "recompute mlp"],
        ("ulysses", "selective"): [*by_heads, "recompute mlp"],
    }
    for (attention, recompute), wanted in expected.items():
        done = back_through_block2("context", recompute, attention=attention)
        assert done[: len(wanted)] == wanted, attention
        assert done[len(wanted)] == "backward mlp"
        assert not any(word.startswith("recompute") for word in done[len(wanted) :])


def words(op) -> str:
    return f"{op.kind} {op.part}".replace("block2.", "").strip()


def back_through_block2(mode: str, recompute: str, **settings) -> list[str]:
    """What a rank does for the second block after the head's way back. Norms' gradients are summed in the end."""
    ops = plan_of(mode, recompute, **settings).program(0).ops
    after = 1 + max(i for i, op in enumerate(ops) if op.kind == "backward" and op.part.startswith("head"))
    sums = ("all_reduce block2.norm1", "all_reduce block2.norm2")
    return [words(op) for op in ops[after:] if op.part.startswith("block2") and f"{op.kind} {op.part}" not in sums]


def test_tensor_ranks_sum_again_what_is_needed_and_not_what_comes_out():
    """The all-reduce after the first pair of matrices is done again, since what follows needs its result; the second
    one's makes the output, which the next layer had. Then the way back, which sums twice, as ever."""
    back = ["backward mlp", "all_reduce mlp", "backward attention", "all_reduce attention", "backward norm1"]
    again = ["recompute attention", "all_reduce attention", "recompute mlp"]
    assert back_through_block2("tensor", "full") == again + back
    assert back_through_block2("tensor", "selective") == ["recompute attention", *back]  # sums are kept like products


def test_sequence_ranks_gather_again_and_scatter_again_only_what_is_needed():
    """The gradient of the output is gathered first: to add a residual needs nothing of the forward."""
    first = ["backward sum", "all_gather mlp"]
    back = ["backward mlp", "reduce_scatter mlp", "backward norm2", "all_gather attention", "backward attention"]
    back += ["reduce_scatter attention", "backward norm1"]
    again = ["recompute norm1", "all_gather attention", "recompute attention", "reduce_scatter attention"]
    again += ["recompute norm2", "all_gather mlp", "recompute mlp"]
    assert back_through_block2("sequence", "full") == first + again + back
    selective = ["recompute norm1", "all_gather attention", "recompute attention", "all_gather mlp", "recompute mlp"]
    assert back_through_block2("sequence", "selective") == first + selective + back


@pytest.mark.parametrize("mode", ["tensor", "sequence"])
def test_cut_layers_take_as_many_products_again_as_whole_ones(mode):
    """Each of two ranks half of them: of a block all but the last, of a head none."""
    whole, halves = (
        sum(op.flops for op in plan_of(each, "full").program(0).ops if op.kind == "recompute")
        for each in ("single", mode)
    )
    assert halves == whole // 2 > 0
    assert not any(op.flops for op in plan_of(mode, "selective").program(0).ops if op.kind == "recompute")


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "pipeline", "schedule": "1f1b"},
        {"mode": "pipeline", "schedule": "interleaved_1f1b", "layers": 6},
        {"mode": "hybrid", "devices": 4, "pp": 2, "tp": 2},
        {"mode": "hybrid", "devices": 8, "pp": 2, "fsdp": 2, "tp": 2, "sequence_parallel": True},
        {"mode": "pipeline", "schedule": "zbv", "layers": 6},
        {"mode": "hybrid", "devices": 4, "pp": 2, "tp": 2, "schedule": "interleaved_zero_bubble", "layers": 6},
    ],
)
def test_stages_compute_every_layer_of_every_microbatch_again_and_keep_less(settings):
    plans = {
        r: modes.plan(prepare(Spec(**{"devices": 2} | TEXT | settings, microbatches=4, recompute=r)))
        for r in ("none", "selective", "full")
    }
    again = Counter()
    for program in plans["full"].programs:
        again.update({(op.part.split(".")[0], op.microbatch) for op in program.ops if op.kind == "recompute"})
    blocks = {f"block{i + 1}" for i in range(settings.get("layers", 2))}
    assert set(again) == {(name, m) for name in {*blocks, "head"} for m in range(4)}
    peaks = {r: max(simulate(plan, machine("h100")).peak_memory) for r, plan in plans.items()}
    assert peaks["full"] < peaks["selective"] < peaks["none"]


@pytest.mark.parametrize("mode", ["pipeline", "layer_split"])
@pytest.mark.parametrize("how", ["torchscript", "torch_compile"])
def test_a_compiled_stage_is_not_computed_again(how, mode):
    with pytest.raises(SpecError) as error:
        plan_of(mode, "full", compile_stage=how)
    assert (error.value.code, error.value.setting) == ("compile_recomputes", "compile_stage")
    assert {"torchscript": "a trace has no checkpoint", "torch_compile": "decides itself"}[how] in str(error.value)
    plan_of(mode, "full", compile_stage=error.value.suggest[0])


def test_a_trace_has_no_checkpoint_in_it_and_none_goes_around_it():
    """Why that is refused."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from engine.real import models
    from engine.real.recompute import Again
    from engine.real.recompute import recompute as change
    from engine.real.stage_compiler import compiled

    chains = []
    for recompute in ("none", "full"):
        job = prepare(Spec(mode="single", devices=1, recompute=recompute, **TEXT))
        chains.append(models.build(job))
        change(chains[-1], job)
    x, before = torch.zeros(2, 16, dtype=torch.int64), Again.done
    plain, again = (compiled(chain, x, "torchscript") for chain in chains)
    again(x).sum().backward()
    assert Again.done == before
    with pytest.raises(RuntimeError, match="TorchScript interpreter"):
        checkpoint(plain, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev", "zb_h2", "dualpipe"])
def test_a_backward_in_halves_computes_a_layer_again_in_the_first_and_keeps_it_for_the_second(schedule):
    """Of a first stage, all of whose backward is in the second half, there."""
    plan, again = plan_of("pipeline", "full", layers=6, microbatches=4, schedule=schedule), Counter()
    firsts = (0, 2) if schedule == "dualpipe" else (0,)  # which has two copies of two stages
    for program in plan.programs:
        for op, following in itertools.pairwise([op for op in program.ops if op.is_compute]):
            if op.kind == "recompute":
                again[op.stage, op.part, op.microbatch] += 1
                assert (following.stage, following.part) == (op.stage, op.part)
                assert following.kind in ("backward", "backward_weight" if op.stage in firsts else "backward_input")
    assert set(again.values()) == {1}
    assert {(part, microbatch) for _, part, microbatch in again} == {
        (part, m) for part in [*(f"block{i + 1}" for i in range(6)), "head"] for m in range(4)
    }


HALVES = [("gpt", "block1", "full"), ("gpt", "block1", "selective"), ("gpt", "head", "full")]
HALVES += [("moe", "block1", "full"), ("cnn", "conv2", "full")]


@pytest.mark.parametrize(("model", "layer", "how"), HALVES)
def test_a_layer_that_goes_back_in_halves_is_computed_again_once_and_to_the_bit(model, layer, how):
    """PyTorch's halves, which ask for a layer once for its input, and once for each group of its weights."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    from engine.real import models
    from engine.real.recompute import Again
    from engine.real.recompute import recompute as change

    x = torch.randn(2, *{"cnn": (20, 12, 12)}.get(model, (16, 32)), generator=torch.Generator().manual_seed(3))
    sizes = {"cnn": {"model": "cnn", "global_batch": 4}, "moe": TEXT | {"model": "moe", "experts": 4}}
    found, times = [], []
    for recompute in ("none", how):
        job = prepare(Spec(mode="single", devices=1, recompute=recompute, **sizes.get(model, TEXT)))
        part = models.Chain(OrderedDict({layer: getattr(models.build(job), layer)}))
        change(part, job)
        inputs, before = x.clone().requires_grad_(), Again.done
        output = part(inputs)
        (of_input,), groups = stage_backward_input([output], [torch.ones_like(output)], [inputs], part.parameters())
        times.append(Again.done - before)
        stage_backward_weight(part.parameters(), groups)
        times.append(Again.done - before)
        found.append([of_input, *(parameter.grad for parameter in part.parameters())])
    assert times == [0, 0, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_copy_of_a_module_is_computed_again_as_itself():
    """As nn.DataParallel makes them, with other tensors for their parameters."""
    torch = pytest.importorskip("torch")
    from engine.real import models
    from engine.real.recompute import Again
    from engine.real.recompute import recompute as change

    job = prepare(Spec(mode="single", devices=1, model="cnn", recompute="full", global_batch=4))
    plain, chain = models.build(job), models.build(job)
    change(chain, job)
    copy = chain.conv2._replicate_for_data_parallel()
    copy._parameters = {name: (2 * p.detach()).requires_grad_() for name, p in chain.conv2.named_parameters()}
    with torch.no_grad():
        for parameter in plain.conv2.parameters():
            parameter.mul_(2)
    x, before = torch.randn(2, 20, 12, 12), Again.done
    for module in (copy, plain.conv2):
        module(x).square().sum().backward()
    assert Again.done == before + 1
    for name, parameter in plain.conv2.named_parameters():
        assert torch.equal(copy._parameters[name].grad, parameter.grad)
    assert all(parameter.grad is None for parameter in chain.parameters())


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


def test_a_block_of_experts_is_computed_again_whole():
    """Its last product is weighted by the router, and backward needs it; of a dense block the last one is left out."""
    for model, sizes in (("gpt", {}), ("moe", {"experts": 4})):
        ops = plan_of("single", "full", model=model, **sizes).program(0).ops
        forward, again = (
            next(o.flops for o in ops if (o.kind, o.part) == (k, "block1")) for k in ("forward", "recompute")
        )
        assert forward - again == (16 * 2 * 16 * 4 * 32 * 32 if model == "gpt" else 0)


EXPERTS = {"model": "moe", "experts": 4}


def test_tokens_travel_again_to_the_experts_and_back():
    """Before anything goes back: what experts put out is weighted last, and backward needs it for the weights. Counts
    are exchanged again, too; then gradients travel as ever."""
    back = ["backward combine", "all_to_all combine", "backward experts", "all_to_all dispatch", "backward attention"]
    again = ["recompute attention", "all_to_all counts", "recompute dispatch", "all_to_all dispatch"]
    again += ["recompute experts", "all_to_all combine", "recompute combine"]
    assert back_through_block2("expert", "none", **EXPERTS) == back
    assert back_through_block2("expert", "full", **EXPERTS) == again + back


def test_selectively_a_block_of_experts_keeps_the_results_of_its_products():
    """Of a token in fp32: queries, keys, values, attention's output, each head's log-sum-exp; the matrix after it; the
    router's scores; of each of two copies those of its expert's matrices; the block's own output."""
    h, heads, num, k = 32, 2, 4, 2
    of_token = 4 * (4 * h + heads + h + num + k * (4 * h + h) + h)
    whole = prepare(Spec(mode="single", devices=1, **TEXT | EXPERTS | {"recompute": "selective"}))
    assert whole.layers[1].products == 16 * of_token
    shared = prepare(Spec(mode="expert", devices=2, **TEXT | EXPERTS | {"recompute": "selective"}))
    arrived = 8 * 16 * k  # as many as a rank's 8 samples send
    assert sum(piece.products for piece in pieces(shared, shared.layers[1], arrived, 8)) == 16 * of_token
