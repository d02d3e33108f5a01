"""Memory of models as they are trained on GPUs: activations, states and logits against published closed forms.

Korthikanti et al. 2022, arXiv:2205.05198: a block of s tokens, b samples, width h and a heads, in numbers of two bytes
with dropout, keeps sbh (34 + 5as/h) bytes (equation 1); on t tensor ranks sbh (10 + 24/t + 5as/(ht)) (equation 2), with
parallel sequences sbh/t (34 + 5as/h) (equation 4), recomputing scores alone 34 sbh/t (equation 6), all of it 2 sbh/t.
"""

from __future__ import annotations

import pytest

from engine import modes
from engine.job import prepare
from engine.predict import predict
from engine.spec import Spec

B, S, H, A, V, L = 2, 64, 128, 4, 768, 4
SCALES = 2 * 4 * B * S  # fp32 numbers of two norms, which the paper leaves out
TRAINED = {
    "model": "gpt", "layers": L, "hidden": H, "heads": A, "context": S, "vocabulary": V, "dataset": "synthetic",
    "precision": "bf16", "master_weights": True, "optimizer": "adamw", "dropout": True, "flash": False,
    "machine": "a100",
}  # fmt: skip


def kept(**settings) -> int:
    """Bytes that a rank keeps of the first block from forward to backward."""
    spec = Spec(**(TRAINED | {"mode": "hybrid", "dp": 1, "fsdp": 1, "global_batch": B} | settings))
    program = modes.plan(prepare(spec), 2).program(0)
    return sum(op.saved for op in program.ops if op.kind == "forward" and op.part.split(".")[0] == "block1")


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(
    ("settings", "cut", "whole", "scores"),
    [
        ({}, 24, 10, True),
        ({"recompute": "selective"}, 24, 10, False),
        ({"sequence_parallel": True}, 34, 0, True),
        ({"sequence_parallel": True, "recompute": "selective"}, 34, 0, False),
    ],
)
def test_a_block_of_tensor_ranks_keeps_what_was_published(settings, cut, whole, scores, t):
    expected = S * B * H * (cut / t + whole) + scores * 5 * A * S * S * B / t
    scales = SCALES / (t if "sequence_parallel" in settings else 1)
    assert kept(devices=t, tp=t, **settings) == expected + scales


def test_a_block_that_is_computed_again_keeps_its_input_alone():
    assert kept(devices=2, tp=2, sequence_parallel=True, recompute="full") == 2 * S * B * H / 2
    assert kept(devices=2, tp=2, recompute="full") == 2 * S * B * H


def test_a_block_on_one_device_keeps_what_was_published_and_less_with_fused_attention():
    settings = TRAINED | {"mode": "single", "devices": 1, "global_batch": B}
    jobs = [prepare(Spec(**(settings | more))) for more in ({}, {"flash": True}, {"dropout": False})]
    published, flash, sure = (B * job.layers[1].saved for job in jobs)
    assert published == S * B * (34 * H + 5 * A * S) + SCALES
    assert flash == S * B * (34 * H + 4 * A) + SCALES  # a log-sum-exp a head
    assert published - sure == S * B * (2 * H + 3 * A * S)  # masks, and of scores what dropout left


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_first_stage_holds_as_many_microbatches_as_was_published(chunks):
    """1F1B: p. Interleaved with m chunks: p (1 + (p - 1) / (pm)), in chunks pm + p - 1 (section 4.2.3)."""
    p = 2
    schedule = {"schedule": "interleaved_1f1b", "stages_per_rank": chunks} if chunks > 1 else {"schedule": "1f1b"}
    settings = {"mode": "hybrid", "devices": p, "pp": p, "dp": 1, "fsdp": 1, "microbatches": 8, "global_batch": 8 * B}
    split = [L // (p * chunks)] * (p * chunks)
    split[0], split[-1] = split[0] + 1, split[-1] + 1
    simulation = predict(Spec(**(TRAINED | settings | schedule | {"split": tuple(split)}))).simulation
    in_flight = p * chunks + p - 1 if chunks > 1 else p
    assert simulation.peak_in_flight[0] == in_flight
    block = S * B * (34 * H + 5 * A * S) + SCALES
    of_embedding = S * B * H * 3  # its output, and a mask; at most p m of the first chunk are in flight
    tokens = 8 * B * S * 8
    inputs = in_flight * L // (p * chunks) * block + p * chunks * of_embedding + tokens
    assert simulation.memory[0]["activations"] == inputs


STAGES = {"mode": "hybrid", "devices": 4, "pp": 4, "dp": 1, "fsdp": 1, "microbatches": 16, "global_batch": 16 * B}


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("schedule", ["zb_h2", "zb_2p"])
def test_between_the_halves_of_a_backward_there_is_what_weights_gradients_are_made_of(schedule, recompute):
    """Of a block 32 sbh bytes (Qi et al. 2024, arXiv:2401.10241, table 1): in numbers of two bytes, inputs of products
    h, h, h, 4h and gradients of their outputs 3h, h, 4h, h. Of the head its input and the logits' gradients."""
    plan = modes.plan(prepare(Spec(**TRAINED, **STAGES, schedule=schedule, recompute=recompute)), 2)
    for rank in range(4):
        ops = plan.program(rank).ops
        made = sum(op.saved for op in ops if op.kind in ("forward", "recompute") and op.microbatch == 3)
        gone = [op.remains for op in ops if op.kind == "backward_input" and op.microbatch == 3]
        back = [op.remains for op in ops if op.kind == "backward_weight" and op.microbatch == 3]
        assert made + sum(gone) == S * B * 32 * H + (rank == 3) * S * B * 2 * (H + V)
        assert sum(gone) == -sum(back) < 0


def test_a_parameter_takes_18_bytes_of_which_replicas_share_12():
    """Two and four of weights and gradients, twelve of the optimizer (Rajbhandari et al. 2020, arXiv:1910.02054)."""
    settings = TRAINED | {"mode": "hybrid", "devices": 4, "tp": 2, "dp": 2, "fsdp": 1, "global_batch": 2 * B}
    for shared in (1, 2):
        (held,) = predict(Spec(**settings, share_optimizer=shared == 2 or None)).simulation.memory
        numbers = held["parameters"] // 2
        assert held["gradients"] == 4 * numbers
        assert held["optimizer"] == 12 * numbers // shared


def test_logits_are_kept_in_fp32_beside_their_copy_and_the_head_s_gradient():
    spec = Spec(**TRAINED, mode="single", devices=1, global_batch=B)
    fused, apart = (predict(spec.with_(fused_loss=fused)).simulation.memory[0] for fused in (True, None))
    logits = B * S * V
    assert apart["buffers"] - fused["buffers"] == 2 * logits
    matrices = 2 * 12 * H * H
    assert fused["buffers"] == matrices + 2 * V * H
    job = prepare(spec)
    kept = sum(B * layer.saved for layer in job.layers)
    assert job.layers[-1].saved == S * (2 * H + 4 + 4 * V)
    assert fused["activations"] == kept + 16 * B * S  # tokens and targets


@pytest.mark.parametrize(("tp", "tensors"), [(1, 2), (2, 3)])
def test_an_eager_loss_has_its_gradients_in_fp32_beside_its_logarithms(tp, tensors):
    """PyTorch's: that of the logarithms and that of the logits, where Megatron-LM has the logits in two bytes and the
    gradient of the head's weights; over tensor ranks one more."""
    layout = {"mode": "hybrid", "devices": 2, "tp": 2} if tp > 1 else {"mode": "single", "devices": 1}
    spec = Spec(**TRAINED, **layout, global_batch=B)
    eager, apart = (predict(spec.with_(torch_loss=loss)).simulation.memory[0] for loss in ("eager", None))
    logits = B * S * V // tp
    assert eager["activations"] == apart["activations"]
    assert eager["buffers"] - apart["buffers"] == tensors * 4 * logits - 2 * logits - 2 * V * H // tp


def test_a_compiled_loss_keeps_logits_as_they_are_and_makes_their_gradients():
    spec = Spec(**TRAINED, mode="single", devices=1, global_batch=B)
    compiled, apart = (predict(spec.with_(torch_loss=loss)).simulation.memory[0] for loss in ("compiled", None))
    assert compiled["activations"] == apart["activations"] - 2 * B * S * V
    assert compiled["buffers"] == apart["buffers"]


def test_published_models_are_trained_in_two_bytes_beside_four_with_adamw():
    job = prepare(Spec(model="llama3_8b", mode="fsdp", devices=8, machine="h100", global_batch=8))
    assert (job.spec.optimizer, job.spec.master_weights, job.spec.precision) == ("adamw", True, "bf16")
    assert prepare(Spec(model="llama3_8b", mode="fsdp", devices=8, global_batch=8, optimizer="sgd")).spec.lr == 0.05
    assert prepare(Spec()).spec.optimizer == "sgd"
