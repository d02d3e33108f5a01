"""Memory by category: the plan's bytes against closed forms, and against what a real run's tensors took."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from engine import schedules
from engine.cost.memory import CATEGORIES, by_category, errors
from engine.job import prepare
from engine.model.chain import Unit
from engine.model.shapes import Layer
from engine.modes.fsdp.turns import most_whole
from engine.modes.hybrid.whole import most_gathered, most_gradients
from engine.predict import predict
from engine.schedules import Action
from engine.spec import MODES, Spec
from tests.engine.proof import finished

GPT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 2, "context": 16}
VOCABULARY = 144  # the text's 103 characters, padded
SHORT = {"steps": 2, "parity_steps": 0, "device": "cpu"}
# A loss, and places of tokens (8 bytes each), are not planned.
NEAR = 0.01


def planned(**settings) -> list[dict[str, int]]:
    return predict(Spec(**settings)).summary()["memory"]


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_what_is_held_is_sorted_into_five_categories_and_nothing_is_lost():
    standing = {"parameters": 3, "gradients": 5, "optimizer": 7, "buckets": 11, "gathered": 13, "outputs": 17, "x": 19}
    held = by_category(standing, 23)
    assert tuple(held) == CATEGORIES
    assert held == {"parameters": 3, "gradients": 5, "optimizer": 7, "activations": 17 + 23, "buffers": 11 + 13 + 19}


def test_the_peak_is_the_sum_of_the_categories():
    for mode in MODES:
        devices = 1 if mode == "single" else 2
        model = GPT | ({"model": "moe"} if mode == "expert" else {})
        summary = predict(Spec(mode=mode, devices=devices, **model)).summary()
        assert [sum(held.values()) for held in summary["memory"]] == summary["peak_memory"]


def test_one_device_keeps_what_autograd_keeps_of_a_gpt():
    """Of a token: both norms' inputs without weight, outputs and scales; q, k, v; attention's output and log-sum-exps;
    the sum between; up's output and GELU's; the block's output. Then the head's norm, and the loss's logarithms."""
    h, heads, c = 32, 2, 16
    block = 2 * (2 * h + 1) + 3 * h + h + heads + h + 8 * h + h
    token = 4 * (h + 2 * block + 2 * h + 1 + VOCABULARY) + 2 * 8  # and itself, and its target
    (held,) = planned(mode="single", devices=1, global_batch=48, **GPT)
    assert held["activations"] == 48 * c * token
    assert held["buffers"] == 0


def test_in_two_bytes_norms_keep_a_copy_of_their_input_in_fp32_in_place_of_it():
    """Of a token: of each norm the copy, the value before the weight and the scale in fp32, and its output in two
    bytes; of the rest what fp32 keeps, but for the sums; and the logarithms in fp32."""
    h, heads, c = 32, 2, 16
    norm = 4 * (2 * h + 1) + 2 * h
    block = 2 * norm + 2 * (3 * h + h + 8 * h) + 4 * heads
    token = 2 * block + norm + 4 * VOCABULARY + 2 * 8
    (held,) = planned(mode="single", devices=1, global_batch=48, **GPT, precision="bf16")
    assert held["activations"] == 48 * c * token


def test_what_is_sent_is_kept_by_its_sender_though_the_next_layer_keeps_a_copy():
    """Two stages of a block each: the first keeps its output, 48 * 16 tokens of 32 numbers, until it goes back."""
    whole, *parts = (
        planned(mode=mode, devices=devices, global_batch=48, **GPT, precision="bf16")
        for mode, devices in (("single", 1), ("layer_split", 2))
    )
    assert sum(held["activations"] for held in parts[0]) == whole[0]["activations"] + 48 * 16 * 32 * 2


def test_a_pipeline_keeps_what_is_in_flight_and_a_place_for_each_message():
    """1F1B on 4 stages of one mlp layer each, 8 microbatches of 6: stage i has 4 - i in flight. A warm-up send of it is
    held by its handle; not of the last stage, which keeps its 10 outputs for all microbatches."""
    ranks = planned(mode="pipeline", devices=4, model="mlp", layers=3, global_batch=48, microbatches=8)
    one = 6 * 256 * 4
    assert [held["activations"] for held in ranks] == [
        48 * 784 * 4 + (4 + 1) * one,
        (3 + 1) * one,
        (2 + 1) * one,
        48 * 8 + 48 * 10 * 4 + 6 * 10 * 4,
    ]
    assert [held["buffers"] for held in ranks] == [8 * one, 16 * one, 16 * one, 8 * one]


def test_the_more_stages_are_before_the_less_is_in_flight_and_gpipe_keeps_all():
    settings = {"mode": "pipeline", "devices": 2, "model": "mlp", "global_batch": 48, "microbatches": 8}
    gpipe, ofob = (planned(schedule=name, **settings)[0]["activations"] for name in ("gpipe", "1f1b"))
    assert gpipe - ofob == (8 - 3) * 6 * 256 * 4


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_what_a_schedule_keeps_until_it_ends_comes_bit_by_bit(schedule):
    """On the last stage's rank, gone through action by action: what each stage has in flight, and a microbatch's output
    of 10 numbers for each forward of the last one. Its loss's logarithms go with the first half of a backward."""
    settings = {"devices": 2, "model": "mlp", "layers": 3, "global_batch": 48, "microbatches": 8, "schedule": schedule}
    several = schedule not in ("gpipe", "1f1b")
    settings |= {} if several else {"split": (2, 2)}
    last = 4 if several else 2
    place = schedules.placement(schedule, 2, 2 if several else 1)
    rank = next(rank for rank, stages in enumerate(place) if last - 1 in stages)
    outputs = dict.fromkeys(range(last), 256) | {last - 1: 10}
    sends, layers = several, 4 // last  # of two layers in a stage, the inner one is kept too
    kept = {stage: 4 * 6 * (outputs[stage] + 256 * (layers - 1)) for stage in range(last)}
    here = most = 0
    for action in schedules.order(schedule, 2, 8, 2 if several else 1)[rank]:
        is_last, sent = action.stage == last - 1, 4 * 6 * outputs[action.stage]
        own = kept[action.stage] - (sent if sends and not is_last else 0)  # then its message's handle keeps it
        if action.kind == "forward":
            here += own + (sent if is_last or (sends and action.stage + 1 not in place[rank]) else 0)
            most = max(most, here)
        elif action.kind == "backward_input":
            here -= sent if is_last else 0
        elif action.kind in ("backward", "backward_weight"):
            here -= own - (sent if is_last and action.kind == "backward_weight" else 0)
    local = sum(8 * 4 * 6 * 256 for stage in place[rank] if stage - 1 in place[rank])
    batch = 48 * 8 + (48 * 784 * 4 if 0 in place[rank] else 0)
    assert planned(mode="pipeline", **settings)[rank]["activations"] == most + local + batch


@pytest.mark.parametrize("schedule", ["1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv"])
@pytest.mark.parametrize(
    "more", [{"mode": "pipeline", "devices": 2}, {"mode": "hybrid", "devices": 4, "dp": 2, "pp": 2}]
)
def test_a_second_micro_step_keeps_no_more_than_the_first(schedule, more):
    settings = more | {"model": "gpt", "schedule": schedule, "microbatches": 4}
    once, twice = (planned(**settings, global_batch=16 * count, accumulate=count) for count in (1, 2))
    assert [held["activations"] for held in once] == [held["activations"] for held in twice]


def test_stages_that_are_sharded_are_whole_as_long_as_their_rank_computes_with_them():
    """Two stages, of layers of 4, 1 and 2 bytes and of 3 and 3. Gathered in the background, the first takes what all of
    its layers were gathered into, and its largest layer beside; then it is given up while the other is there."""
    sizes = {0: [4, 1, 2], 1: [3, 3]}
    row = [
        Action(*each)
        for each in (
            ("unshard", 0, None), ("forward", 0, 0), ("unshard", 1, None), ("reshard", 0, None), ("forward", 1, 0),
            ("backward", 1, 0), ("reduce_grad", 1, None), ("unshard", 0, None), ("backward", 0, 0),
            ("reduce_grad", 0, None),
        )
    ]  # fmt: skip
    assert most_gathered(row, sizes, 2) == 7 + 6
    assert most_gathered(row[:2], sizes, 2) == 7 + 4
    assert most_gathered(row, sizes, 1) == 7  # of one shard nothing is gathered; a copy is made when it is needed
    whole, shards = {0: 7, 1: 6}, {0: 4, 1: 3}
    assert most_gradients(row, whole, shards, added=False) == 7 + 3
    assert most_gradients(row, whole, shards, added=True) == 7 + 7
    assert most_gradients(row[:6], whole, shards, added=False) == 6


def test_a_stage_that_gathers_layer_by_layer_has_the_layer_before_twice():
    row = [Action("forward", 0, 0), Action("backward", 0, 0), Action("reduce_grad", 0, None)]
    assert most_gathered(row, {0: [4, 1, 2]}, 2) == 4 + 1 + 2 + (1 + 2)
    assert most_gathered(row, {0: [4, 3, 1]}, 2) == 4 + 3 + (4 + 3)
    assert most_gathered(row, {0: [4, 3, 1]}, 1) == 8


def test_around_experts_that_are_gathered_their_layer_is_whole():
    """An embedding of 2 bytes, a block of 3 whose experts are an inner unit of 10, a head of 4. Experts are copied out
    of what they were gathered into, while the block around them is there, and the head's gradients wait; on a rank
    that has them whole they are copied. While attention goes back the embedding is gathered and the experts' gradients
    wait, beside 20 more bytes."""
    names = ("embed", "block1", "block1.experts", "head")
    units = [Unit(Layer(name, (), 0, (), 0), (), (), inner=name.endswith("experts")) for name in names]
    sizes = [2, 3, 10, 4]
    assert most_whole(units, sizes, 2) == 3 + 2 * 10 + 4
    assert most_whole(units, sizes, 1) == 3 + 10 + 4
    assert most_whole(units, sizes, 2, 20) == 3 + 2 + 10 + 20


def test_a_convolution_keeps_its_result_if_all_but_products_is_computed_again():
    """Of an image: itself, with its target; the results of both convolutions and what their pools leave; of the linear
    layers an activation and logarithms. These are gone, with what the second pool left, when the second convolution is
    computed again: its activation is there in place of its result, and the places of its pool."""
    (held,) = planned(mode="single", devices=1, model="cnn", global_batch=16, recompute="selective")
    image, first, pooled, second, left = 784, 20 * 24 * 24, 20 * 12 * 12, 50 * 8 * 8, 50 * 4 * 4
    ahead = 4 * (image + first + pooled + second + left + 500 + 10) + 8
    again = 4 * (image + first + pooled + second) + 8 * left + 8
    assert held["activations"] == 16 * max(ahead, again)


def test_gradients_of_an_embedding_are_whole_on_each_tensor_rank():
    for held in planned(mode="tensor", devices=2, **GPT):
        assert held["gradients"] == held["parameters"] + 4 * VOCABULARY * 32 // 2


# --- measured -------------------------------------------------------------------------------------------------------

EXACT = ("parameters", "gradients", "optimizer")
INDEX = 64  # bytes: the places of a rank's own tokens, under context parallelism
MLP = {"model": "mlp", "global_batch": 48}
WHOLE_EXPERTS = {"model": "moe", "experts": 4, "tp": 2, "ep": 2, "expert_tp": 1}
CASES = {
    "single": ("single", 1, {"model": "cnn", "global_batch": 48, "recompute": "selective"}),
    "single-gpt": ("single", 1, GPT | {"optimizer": "adamw"}),
    "single-recomputed": ("single", 1, GPT | {"precision": "bf16", "recompute": "selective"}),
    "data_parallel": ("data_parallel", 2, GPT | {"precision": "bf16", "recompute": "full", "accumulate": 2}),
    "data_parallel-mlp": ("data_parallel", 3, MLP | {"precision": "bf16"}),
    "ddp": ("ddp", 2, MLP | {"bucket_mb": 0.2}),
    "zero1": ("zero1", 3, MLP | {"optimizer": "adamw", "precision": "bf16"}),
    "zero2": ("zero2", 3, MLP),
    "fsdp": (
        "fsdp",
        4,
        MLP | {"hidden": 30, "accumulate": 2},
    ),  # 30 rows on 4 ranks: 8, 8, 8 and 6; the output's 10: 3, 3, 3 and 1
    "hsdp": ("hsdp", 4, MLP | {"optimizer": "adamw"}),
    "local_sgd": ("local_sgd", 2, MLP | {"sync_every": 3}),
    "layer_split": ("layer_split", 2, {"model": "cnn", "global_batch": 48, "recompute": "full"}),
    "layer_split-bf16": ("layer_split", 2, GPT | {"precision": "bf16"}),
    "pipeline": ("pipeline", 2, {"model": "cnn", "global_batch": 48}),
    "interleaved": ("pipeline", 2, MLP | {"layers": 7, "schedule": "interleaved_1f1b"}),
    "interleaved-gpt": ("pipeline", 2, GPT | {"schedule": "interleaved_1f1b", "microbatches": 8}),
    "halves": ("pipeline", 2, {"model": "cnn", "global_batch": 48, "schedule": "interleaved_zero_bubble"}),
    "zbv": ("pipeline", 2, MLP | {"layers": 7, "schedule": "zbv"}),
    "zbv-bf16": ("pipeline", 2, GPT | {"schedule": "zbv", "precision": "bf16"}),
    "dualpipev-bf16": ("pipeline", 2, GPT | {"schedule": "dualpipev", "precision": "bf16"}),
    "1f1b of tensor ranks": ("hybrid", 4, GPT | {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 8}),
    "sharded stages": ("hybrid", 4, GPT | {"pp": 2, "fsdp": 2, "schedule": "interleaved_1f1b", "accumulate": 2}),
    "replicas of stages": ("hybrid", 4, GPT | {"pp": 2, "dp": 2, "schedule": "1f1b", "accumulate": 2}),
    "tensor": ("tensor", 2, GPT),
    "tensor-bf16": ("tensor", 2, GPT | {"precision": "bf16", "recompute": "full"}),
    "sequence": ("sequence", 2, GPT | {"precision": "bf16"}),
    "context": ("context", 2, GPT | {"precision": "bf16"}),
    "context-gathered": ("context", 2, GPT | {"attention": "all_gather"}),
    "context of shards": ("hybrid", 4, GPT | {"cp": 2, "fsdp": 2, "attention": "all_gather"}),
    "context of stages": ("hybrid", 4, GPT | {"cp": 2, "pp": 2, "attention": "all_gather", "recompute": "full"}),
    "expert": ("expert", 2, GPT | {"model": "moe", "experts": 4}),
    "expert-bf16": ("expert", 2, GPT | {"model": "moe", "experts": 4, "precision": "bf16"}),
    "experts of shards": ("hybrid", 4, GPT | {"model": "moe", "experts": 4, "fsdp": 2, "ep": 2}),
    "tensor-moe": ("tensor", 2, GPT | {"model": "moe", "experts": 4, "recompute": "selective"}),
    "experts of tensor ranks": (
        "hybrid",
        4,
        GPT | {"model": "moe", "experts": 4, "tp": 2, "ep": 2, "sequence_parallel": True},
    ),
    "whole experts": ("hybrid", 4, GPT | WHOLE_EXPERTS | {"recompute": "selective"}),
    "whole experts, own tokens": ("hybrid", 4, GPT | WHOLE_EXPERTS | {"sequence_parallel": True, "precision": "bf16"}),
    "experts of replicas": ("hybrid", 4, GPT | {"model": "moe", "experts": 4, "dp": 2, "ep": 2}),
}


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_a_run_holds_what_was_planned(case, launcher, runs_dir):
    mode, devices, settings = CASES[case]
    spec = Spec(mode=mode, devices=devices, **(SHORT | settings))
    memory = finished(spec, launcher, runs_dir, measure_memory=True)["memory"]
    assert memory["categories"] == list(CATEGORIES)
    assert "MemTracker" in memory["method"]
    assert len(memory["measured"]) == len(memory["planned"]) == devices
    for plan, real in zip(memory["planned"], memory["measured"], strict=True):
        assert {name: real[name] for name in EXACT} == {name: plan[name] for name in EXACT}
        assert real["buffers"] == pytest.approx(plan["buffers"], abs=INDEX)
        if settings.get("model") != "moe":
            assert real["activations"] == pytest.approx(plan["activations"], rel=NEAR)
        assert real["activations"] > 0
    planned, measured = (sum(held["activations"] for held in memory[name]) for name in ("planned", "measured"))
    assert measured == pytest.approx(planned, rel=NEAR)  # one expert gets more than planned, and another less
    assert all(memory["error"][name] == 0 for name in EXACT)


WHOLE = dict.fromkeys(CATEGORIES, 100)
LATE = [WHOLE | {"buffers": 140}, WHOLE | {"activations": 120}, WHOLE | {"gradients": 104}]


@pytest.mark.parametrize(
    ("seen", "others", "taken"),
    [
        (LATE, 0, 3),
        ([WHOLE, LATE[0], WHOLE], 0, 3),
        ([WHOLE, WHOLE, LATE[0]], 0, 2),  # alike: nothing was late
        ([WHOLE, WHOLE, LATE[0]], 1, 3),  # alike here, and not on another rank: ranks take steps together
    ],
)
def test_a_tensor_that_is_let_go_of_late_in_one_step_is_not_one_more(seen, others, taken, tmp_path, monkeypatch):
    """gloo's threads do so now and then: of several steps, all alike, the least of each category counts."""
    memory = pytest.importorskip("engine.real.memory")
    steps = iter(seen)

    class Seen:
        def __init__(self, *_):
            self.held = next(steps)

        __enter__ = __exit__ = settle = lambda *_: None

    monkeypatch.setattr(memory, "Ledger", Seen)
    monkeypatch.setattr(memory, "update", lambda *_: None)
    monkeypatch.setattr(memory.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(memory.dist, "all_reduce", lambda tensor: tensor.add_(others))
    training = SimpleNamespace(make_gradients=lambda step: None)
    place = SimpleNamespace(device=None, recorder=None, run_dir=tmp_path, rank=1)
    memory.measure(prepare(Spec(mode="ddp")), place, training)
    assert json.loads((tmp_path / "rank1.memory.json").read_text()) == {"devices": [WHOLE]}
    assert len(list(steps)) == len(seen) - taken


@pytest.mark.real
def test_measured_bytes_are_closed_forms_of_the_shards(launcher, runs_dir):
    """FSDP on 4 ranks of an mlp 784-30-30-10, under AdamW: rows of each tensor, padded where they are allocated."""
    spec = Spec(mode="fsdp", devices=4, model="mlp", hidden=30, optimizer="adamw", global_batch=48, **SHORT)
    memory = finished(spec, launcher, runs_dir, measure_memory=True)["memory"]
    rows = {784: 30, 30: 30}
    tensors = [(rows[784], 784), (30, 1), (rows[30], 30), (30, 1), (10, 30), (10, 1)]
    padded = 4 * sum(math.ceil(n / 4) * width for n, width in tensors)
    for rank, held in enumerate(memory["measured"]):
        mine = 4 * sum(max(0, min(math.ceil(n / 4), n - rank * math.ceil(n / 4))) * width for n, width in tensors)
        assert held["parameters"] == held["gradients"] == padded
        assert held["optimizer"] == 2 * mine + 4 * len(tensors)


@pytest.mark.real
def test_one_more_step_changes_nothing_that_is_told_of_a_run(launcher, runs_dir):
    spec = Spec(mode="ddp", devices=2, model="mlp", steps=4, device="cpu")
    with_, without = (finished(spec, launcher, runs_dir, measure_memory=on) for on in (True, False))
    for name in ("losses", "validation_accuracy", "parity", "steps"):
        assert with_[name] == without[name]
    assert with_["conformance"] == without["conformance"]
    assert with_["conformance"]["ok"]
    assert without["memory"]["measured"] is None
    assert without["memory"]["reason"] == "measure-memory was off"


def test_the_error_of_a_category_is_that_of_the_rank_that_is_furthest_off():
    plan = [dict.fromkeys(CATEGORIES, 100), dict.fromkeys(CATEGORIES, 100)]
    real = [dict.fromkeys(CATEGORIES, 100), dict.fromkeys(CATEGORIES, 100) | {"buffers": 0, "activations": 125}]
    found = errors(plan, real)
    assert found == dict.fromkeys(CATEGORIES, 0.0) | {"buffers": None, "activations": pytest.approx(-0.2)}
