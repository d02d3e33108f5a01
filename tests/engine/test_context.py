"""Context parallelism: the work, the messages and the memory of each rank by closed forms, and what real runs did."""

from __future__ import annotations

import re

import numpy as np
import pytest

from engine import modes
from engine.cost.kernels import MEMORY
from engine.job import Job, prepare
from engine.modes.context.deal import positions
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec, SpecError
from engine.timeline import Timeline
from tests.engine.proof import finished, holds

HIDDEN, HEADS, CONTEXT, BATCH, LAYERS = 32, 8, 48, 8, 2
SMALL = {
    "mode": "context", "model": "gpt", "hidden": HIDDEN, "heads": HEADS, "context": CONTEXT, "global_batch": BATCH,
    "layers": LAYERS, "dataset": "synthetic",
}  # fmt: skip
VOCABULARY = 96  # of the dataset synthetic, 64, rounded up to a multiple of 48
SHORT = {"steps": 4, "device": "cpu"}
KV = 4 * 2 * BATCH * CONTEXT * HIDDEN  # bytes of the keys and values of all tokens
PARAMETERS = LAYERS * (12 * HIDDEN**2 + 2 * HIDDEN) + HIDDEN * (2 * VOCABULARY + CONTEXT + 1)
EVERY_WAY = [("ring", "head_tail"), ("ring", "none"), ("all_gather", "head_tail"), ("all_gather", "none")]
EVERY_WAY += [("ulysses", None)]


def job_of(devices: int, **settings) -> Job:
    return prepare(Spec(devices=devices, **(SMALL | settings)))


def programs(devices: int, **settings) -> list[tuple[Op, ...]]:
    """One a rank."""
    plan = modes.plan(job_of(devices, **settings))
    return [plan.program(rank).ops for rank in range(devices)]


def attention_flops(ops: tuple[Op, ...], kind: str = "forward") -> int:
    return sum(op.flops for op in ops if op.kind == kind and ".attention" in op.part)


# --- who has which tokens, and how much work they make --------------------------------------------------------------


@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_every_token_is_dealt_to_one_rank(devices, balance):
    dealt = [positions(rank, devices, CONTEXT, balance) for rank in range(devices)]
    assert sorted(token for mine in dealt for token in mine) == list(range(CONTEXT))
    assert all(mine == sorted(mine) and len(mine) == CONTEXT // devices for mine in dealt)


def test_head_tail_deals_an_early_chunk_and_the_late_one_that_mirrors_it():
    assert positions(0, 2, 8, "head_tail") == [0, 1, 6, 7]
    assert positions(1, 2, 8, "head_tail") == [2, 3, 4, 5]
    assert positions(1, 2, 8, "none") == [4, 5, 6, 7]


def blocks_seen(devices: int, balance: str) -> list[int]:
    """Counted in the causal mask itself, for each rank: blocks of two chunks in which not everything is masked."""
    size = CONTEXT // (devices * (2 if balance == "head_tail" else 1))
    mask = np.tril(np.ones((CONTEXT, CONTEXT), dtype=bool))
    blocks = mask.reshape(CONTEXT // size, size, CONTEXT // size, size).any(axis=(1, 3))
    counts = []
    for rank in range(devices):
        mine = np.unique(np.array(positions(rank, devices, CONTEXT, balance)) // size)
        counts.append(int(blocks[mine].sum()))
    return counts


@pytest.mark.parametrize("attention", ["ring", "all_gather"])
@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_attention_costs_the_blocks_that_the_mask_leaves(devices, balance, attention):
    """Each pair of a query and a key takes 2 x hidden multiply-adds: for its score, and for its part of the sum."""
    size = CONTEXT // (devices * (2 if balance == "head_tail" else 1))
    expected = [LAYERS * BATCH * blocks * size**2 * 2 * 2 * HIDDEN for blocks in blocks_seen(devices, balance)]
    planned = programs(devices, attention=attention, balance=balance)
    assert [attention_flops(ops) for ops in planned] == expected
    assert [attention_flops(ops, "backward") for ops in planned] == [2 * flops for flops in expected]


@pytest.mark.parametrize("attention", ["ring", "all_gather"])
def test_without_balancing_four_ranks_work_as_1_2_3_4_and_with_it_alike(attention):
    uneven, even = ([attention_flops(ops) for ops in programs(4, attention=attention, balance=balance)]
                    for balance in ("none", "head_tail"))  # fmt: skip
    assert [flops / uneven[0] for flops in uneven] == [1, 2, 3, 4]
    assert len(set(even)) == 1
    assert max(even) < max(uneven)


def test_the_step_is_as_long_as_that_of_the_rank_with_most_work():
    """Where attention is most of the work, head-tail makes the step shorter: no rank has more of it than another."""
    long = {"context": 16_384, "hidden": 128, "layers": 1, "global_batch": 1, "machine": "h100"}
    uneven, even = (predict(Spec(devices=4, **(SMALL | long), balance=balance)) for balance in ("none", "head_tail"))
    assert even.step_time < uneven.step_time
    busy = [
        [t["end"][mine].sum() - t["start"][mine].sum() for rank in range(4) for mine in [_computes(t, rank)]]
        for t in (uneven.timeline, even.timeline)
    ]
    assert sorted(busy[0]) == busy[0]
    assert max(busy[0]) > 1.1 * min(busy[0])
    assert max(busy[1]) == pytest.approx(min(busy[1]))


def _computes(timeline: Timeline, rank: int) -> np.ndarray:
    return (timeline["rank"] == rank) & (timeline["lane"] == "compute")


@pytest.mark.parametrize(("attention", "balance"), EVERY_WAY)
@pytest.mark.parametrize("devices", [2, 4])
def test_all_but_attention_is_shared_out_equally(devices, attention, balance):
    matrices = BATCH * CONTEXT * (LAYERS * 2 * 12 * HIDDEN**2 + 2 * HIDDEN * VOCABULARY)
    for ops in programs(devices, attention=attention, balance=balance):
        forward = sum(op.flops for op in ops if op.kind == "forward") - attention_flops(ops)
        assert forward == matrices // devices


def test_heads_are_shared_out_equally_over_the_whole_context():
    whole = LAYERS * BATCH * 4 * CONTEXT**2 * HIDDEN
    assert [attention_flops(ops) for ops in programs(4, attention="ulysses")] == [whole // 4] * 4


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_a_ring_attends_to_turn_by_turn_is_added_up_in_memory(devices):
    """Three passes over an output of a rank's own tokens in all turns but the first; on the way back over the gradients
    of its queries, and over those of keys and values, which are as wide as both of them."""
    (ops, *_) = programs(devices, attention="ring", balance="head_tail")
    added = LAYERS * BATCH * (devices - 1) * 3 * 4 * HIDDEN * CONTEXT // devices
    for kind, wide in (("forward", 1), ("backward", 1 + 2)):
        pieces = [op for op in ops if op.kind == kind and re.search(r"\.(attention|sum)\d", op.part)]
        moved = sum(kernel.bytes for op in pieces for kernel in op.kernels if kernel.kind == MEMORY)
        assert moved == wide * added


# --- what moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_keys_and_values_go_round_and_their_gradients_come_home(devices):
    """Forward: n-1 hops of keys and values. Backward: as many again, and n hops of gradients, the last one home."""
    for rank, ops in enumerate(programs(devices)):
        for kind, peer in (("send", (rank + 1) % devices), ("recv", (rank - 1) % devices)):
            hops = [op for op in ops if op.kind == kind]
            assert {(op.axis, op.peer, op.bytes) for op in hops} == {("cp", peer, KV // devices)}
            payloads = [op.payload for op in hops]
            assert payloads.count("activation") == 2 * LAYERS * (devices - 1)
            assert payloads.count("gradient") == LAYERS * devices


def test_collectives_of_a_block():
    """Keys and values gathered, their gradients reduced; or q, k, v to heads and the output back, and the reverse."""

    def calls(attention: str) -> list[tuple[str, str, int]]:
        ops = programs(4, attention=attention)[2]
        return [(op.kind, op.payload, op.bytes) for op in ops if op.axis and "block" in op.part]

    gather, scatter = ("all_gather", "activation", KV // 4), ("reduce_scatter", "gradient", KV)
    assert calls("all_gather") == [gather] * LAYERS + [scatter] * LAYERS
    there, back = KV // 2 // 4 * 3, KV // 2 // 4
    forward = [("all_to_all", "activation", size) for size in (there, back)]
    backward = [("all_to_all", "gradient", size) for size in (back, there)]
    assert calls("ulysses") == forward * LAYERS + backward * LAYERS


@pytest.mark.parametrize(("attention", "balance"), EVERY_WAY)
def test_weights_are_averaged_in_ddp_s_buckets_when_their_last_gradient_is_made(attention, balance):
    """Buckets smaller than any parameter: each is reduced on its own, right after the piece that makes it."""
    ops = programs(4, attention=attention, balance=balance, bucket_mb=1e-5)[1]
    reduced = [op for op in ops if op.kind == "all_reduce"]
    assert all(op.axis == "cp" and op.asynchronous for op in reduced)
    assert sum(op.bytes for op in reduced) == 4 * PARAMETERS
    made, piece = {}, ""
    for op in ops:
        piece = op.part if op.kind == "backward" else piece
        if op.kind == "all_reduce":
            made.setdefault(piece, []).append(op.bytes // 4)
    square = HIDDEN**2
    assert made == {
        "head": [VOCABULARY * HIDDEN, HIDDEN],
        "block2.mlp": [4 * square, 4 * square, HIDDEN, square], "block2.qkv": [3 * square, HIDDEN],
        "block1.mlp": [4 * square, 4 * square, HIDDEN, square], "block1.qkv": [3 * square, HIDDEN],
        "embed": [CONTEXT * HIDDEN, VOCABULARY * HIDDEN],
    }  # fmt: skip


def test_a_rank_holds_the_whole_model_and_keeps_a_part_of_the_activations():
    ways = ((1, "ring"), (4, "ring"), (4, "all_gather"), (4, "ulysses"))
    held = [modes.plan(job_of(devices, attention=attention)).programs[0] for devices, attention in ways]
    summed = (0, 0, KV, 0)  # gloo's copy of one layer's gradients, of all keys and values
    assert [program.memory for program in held] == [held[0].memory | {"summed": size} for size in summed]
    alone, ring, gathered, by_heads = (sum(op.saved for op in program.ops) for program in held)
    assert ring == alone // 4
    assert gathered - ring == LAYERS * (KV - KV // 4)  # what the ring passes on, all-gather keeps
    assert by_heads - ring == LAYERS * KV // 2 // 4  # attention's output by heads, and again by tokens


@pytest.mark.parametrize(
    ("settings", "code", "works"),
    [
        ({"devices": 5}, "context_divides", (1, 2, 3, 4, 6, 8, 12, 24)),
        ({"devices": 16}, "context_divides", (2, 3, 4, 6, 8, 12, 24)),
        ({"devices": 48, "context": 48}, "context_divides", (24,)),
        ({"devices": 3, "attention": "ulysses"}, "heads_of_ulysses", (1, 2, 4, 8)),
        ({"devices": 2, "attention": "ulysses", "balance": "head_tail"}, "does_not_apply", ("none",)),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_with_what_can(settings, code, works):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(**(SMALL | settings)))
    assert refused.value.code == code
    assert set(works) <= set(refused.value.suggest)
    for value in refused.value.suggest:
        prepare(Spec(**(SMALL | settings | {refused.value.setting: value})))


def test_sixteen_ranks_can_have_a_run_each_where_two_chunks_do_not_fit():
    assert job_of(16, balance="none").degree("cp") == 16


# --- attention itself, with one process in the part of every rank in turn --------------------------------------------


@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_partial_attentions_merge_to_the_whole_and_so_do_their_gradients(devices, balance):
    """PyTorch's own attention over the whole context, in double precision, is the oracle."""
    torch = pytest.importorskip("torch")
    from engine.real.context_attention import Gradients, Merged, Ranks
    from engine.real.models import causal_attention

    class Part(Ranks):
        rank, size = 0, devices

    torch.manual_seed(0)
    q, k, v, gradient = torch.randn(4, 2, 3, 24, 5, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    wanted = causal_attention(*leaves)
    wanted.backward(gradient)
    places = [positions(rank, devices, 24, balance) for rank in range(devices)]
    output, of_q, of_kv = torch.zeros_like(q), torch.zeros_like(q), torch.zeros(2, *k.shape, dtype=k.dtype)
    for rank, mine in enumerate(places):
        part = Part(None, None, balance, "block1")
        part.__class__.rank = rank
        kv = [torch.stack([k, v])[..., theirs, :] for theirs in places]
        merged = Merged(q[..., mine, :])
        for other in [*range(rank, -1, -1), *range(devices - 1, rank, -1)]:  # as they come round
            merged.add(part, q[..., mine, :], kv[other], other)
        output[..., mine, :] = merged.output
        gradients = Gradients(q[..., mine, :], merged.output, merged.lse, gradient[..., mine, :])
        for other, theirs in enumerate(places):
            of_kv[..., theirs, :] += gradients.of_kv(part, kv[other], other)
        of_q[..., mine, :] = gradients.of_q
    for made, right in zip((output, of_q, *of_kv), (wanted, *(leaf.grad for leaf in leaves)), strict=True):
        torch.testing.assert_close(made, right.detach(), rtol=1e-10, atol=1e-10)


# --- real runs ------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize(
    ("devices", "attention", "balance"),
    [
        (1, "ring", "head_tail"),
        (2, "ring", "none"),
        (3, "ring", "head_tail"),
        *((4, *way) for way in EVERY_WAY),
        (8, "ring", "head_tail"), (8, "ulysses", None),
    ],
)  # fmt: skip
def test_a_transformer_equals_one_device_and_does_what_was_planned(devices, attention, balance, launcher, runs_dir):
    spec = Spec(devices=devices, attention=attention, balance=balance, **SMALL, **SHORT)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.real
@pytest.mark.parametrize("attention", ["all_gather", "ulysses"])
def test_buckets_between_the_collectives_of_attention_under_adamw(attention, launcher, runs_dir):
    """Every parameter is reduced on its own, over the same axis as attention's collectives, while backward goes on."""
    settings = {"optimizer": "adamw", "lr": 1e-3, "bucket_mb": 1e-5, "attention": attention}
    holds(finished(Spec(devices=2, **settings, **SMALL, **SHORT), launcher, runs_dir))


@pytest.mark.real
def test_a_wrong_gradient_on_one_rank_is_seen(launcher, runs_dir):
    parity = finished(Spec(devices=2, fault="gradient@1:2", **SMALL, **SHORT), launcher, runs_dir)["parity"]
    assert parity["ok"] is False
    assert parity["grad_max_rel_diff"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.real
def test_blocks_that_lie_in_the_future_are_measured_to_be_skipped(launcher, runs_dir, alone):
    """Without balancing, rank r attends in its turns 0 to r. Each of those takes longer than any turn that is skipped:
    at best, over some steps, since a rank may have to wait for a core in any of them."""
    large = SMALL | {"context": 512, "layers": 1, "global_batch": 4, "heads": 2}
    with alone():
        result = finished(Spec(devices=4, balance="none", **large, device="cpu", steps=8), launcher, runs_dir)
    holds(result)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet")
    shortest: dict[tuple[str, int, int], float] = {}
    for span in timeline.where((timeline["lane"] == "compute") & (timeline["step"] > 1)).spans():
        if ".attention" in span.part:
            turn = span.kind, span.rank, int(span.part[-1])
            shortest[turn] = min(span.duration, shortest.get(turn, span.duration))
    assert len(shortest) == 2 * 4 * 4
    for way in ("forward", "backward"):
        computed, skipped = (
            [length for (kind, rank, turn), length in shortest.items() if kind == way and (turn <= rank) is works]
            for works in (True, False)
        )
        assert (len(computed), len(skipped)) == (10, 6)  # 1 + 2 + 3 + 4 blocks, and the rest of the square
        assert min(computed) > 2 * max(skipped)
