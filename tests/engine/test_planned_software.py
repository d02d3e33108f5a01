"""What published software does beside its layout, as settings of planned models: what each changes in a plan."""

from collections import Counter
from dataclasses import replace

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost import kernels
from engine.cost.catalogue import MACHINES
from engine.cost.collectives import HOST_WAIT, communication_seconds
from engine.cost.compute import compute_seconds
from engine.cost.kernels import (
    ATTENTION,
    EACH_PARAMETER,
    FLAT_PARAMETER,
    MATMUL,
    MEMORY,
    SUMMED_LAST,
    Kernel,
    matmul,
    memory,
)
from engine.cost.matmul import UNALIGNED, UNALIGNED_BATCH, kernel_seconds
from engine.job import prepare
from engine.model import chain
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec

GPT = {"model": "gpt", "layers": 2, "hidden": 64, "heads": 4, "context": 32, "dataset": "synthetic", "machine": "a100"}


def ops_of(**settings) -> list[Op]:
    """Of the first rank."""
    known = {"mode": "hybrid", "precision": "bf16", "global_batch": 8}
    return list(modes.plan(prepare(Spec(**(GPT | known | settings)))).programs[0].ops)


STAGES = {"devices": 4, "pp": 2, "tp": 2, "microbatches": 4}


def test_a_scattered_message_is_a_part_of_it_and_is_gathered():
    """An activation of 2 samples x 32 tokens x 64 numbers x 2 bytes, or half of it from each of 2 ranks."""
    whole, parts = (ops_of(**STAGES, scatter_gather=value) for value in (None, True))
    assert {op.bytes for op in whole if op.kind == "send"} == {8192}
    assert {op.bytes for op in parts if op.kind == "send"} == {4096}
    gathered = [op for op in parts if op.part == "message"]  # of each microbatch's gradient, which comes back here
    assert {(op.kind, op.axis, op.bytes) for op in gathered} == {("all_gather", "tp", 4096)} and len(gathered) == 4


def test_messages_that_are_waited_for_are_not_in_the_background():
    for overlap, background in ((None, True), (False, False)):
        sent = [op for op in ops_of(**STAGES, overlap=overlap) if op.kind == "send"]
        assert len(sent) == 4 and all(op.asynchronous is background for op in sent)


def test_a_distributed_optimizer_gathers_a_layer_once_in_a_step_and_fsdp_whenever_its_stage_comes():
    """Two ranks of a pipeline have four stages of a layer each, of which FSDP has three whole at a time."""
    sizes = {"devices": 4, "pp": 2, "fsdp": 2, "layers": 6, "split": (1,) * 8}
    known = sizes | {"microbatches": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 4}
    for master_weights in (True, None):
        ops = ops_of(**known, master_weights=master_weights)
        gathered = Counter(op.part for op in ops if (op.kind, op.axis) == ("all_gather", "fsdp"))
        assert len(gathered) == 4 and (set(gathered.values()) == {1}) is bool(master_weights)


def test_a_distributed_optimizer_gathers_on_all_stages_at_once_and_fsdp_as_the_first_microbatch_comes():
    """So with it no stage waits for the gathers of those before it."""
    known = {"mode": "hybrid", "devices": 8, "pp": 4, "fsdp": 2, "precision": "bf16", "global_batch": 8}
    known |= {"layers": 2, "microbatches": 4, "split": (1,) * 4, "schedule": "1f1b", "overlap": False}
    for master_weights in (True, None):
        simulation = predict(Spec(**(GPT | known), master_weights=master_weights)).simulation
        starts = []
        for first, program in zip(simulation.graph.first, simulation.plan.programs, strict=False):
            (gather,) = (i for i, op in enumerate(program.ops) if (op.kind, op.axis) == ("all_gather", "fsdp"))
            received = [i for i, op in enumerate(program.ops) if op.kind == "recv" and op.payload == "activation"]
            assert all((gather < i) is bool(master_weights) for i in received[:1])
            starts.append(float(simulation.start[first + gather]))
        loaded = min(starts)  # the first stage has its batch by then
        assert len(starts) >= 4 and (max(starts) <= loaded + 1e-5) is bool(master_weights)


@pytest.mark.parametrize(("microbatches", "microsteps"), [(2, 1), (4, 1), (2, 3)])
def test_shared_gradients_of_a_stage_are_whole_from_its_first_backward_until_they_are_reduced(microbatches, microsteps):
    """Four bytes a parameter, beside a shard of each; without, all are whole all the step long. Gone through op by op:
    in a stage's first backward they come, and where the reductions of its layer end they go."""
    known = {"mode": "hybrid", "devices": 4, "pp": 2, "fsdp": 2, "precision": "bf16", "master_weights": True}
    known |= {"layers": 6, "split": (1,) * 8, "schedule": "interleaved_1f1b", "stages_per_rank": 4}
    known |= {"microbatches": microbatches, "accumulate": microsteps, "global_batch": 2 * microbatches * microsteps}
    alone, shared = (predict(Spec(**(GPT | known), share_gradients=value)).simulation for value in (None, True))
    layers, first = prepare(Spec(**GPT | known)).layers, shared.graph.first
    for role, program in enumerate(shared.plan.programs):
        sizes = {op.stage: 2 * layers[op.stage].param_bytes for op in program.ops if op.kind == "backward"}
        total, held = sum(sizes.values()), shared.memory_over_time(role)
        assert len(sizes) == 4 and set(alone.memory_over_time(role).bytes["gradients"]) == {total}
        changes, whole = [], set()
        for node, op in enumerate(program.ops, first[role]):
            if op.kind == "backward" and op.stage not in whole:
                whole.add(op.stage)
                changes.append((shared.start[node], sizes[op.stage]))
            if op.kind == "reduce_scatter":
                whole.remove(op.stage)
                changes.append((shared.end[node], -sizes[op.stage]))
        assert len(changes) == 8 * microsteps
        for moment, size in zip(held.seconds, held.bytes["gradients"], strict=True):
            assert size == total / 2 + sum(change for at, change in changes if at <= moment)


def test_llama_3_405b_fits_on_16384_devices_where_gradients_are_shared_as_they_were():
    """Grattafiori et al. 2024 (arXiv:2407.21783, table 4 and section 3.3.2). On the fullest rank none are whole when
    most activations are there: a 1/128 is left of four bytes of each of its 3.2 billion parameters."""
    known = {"devices": 16_384, "tp": 8, "pp": 16, "fsdp": 128, "global_batch": 2048, "microbatches": 16}
    known |= {"schedule": "interleaved_1f1b", "stages_per_rank": 8, "sequence_parallel": True, "flash": True}
    spec = Spec(mode="hybrid", model="llama3_405b", machine="h100", **known)
    whole, shared = (predict(spec.with_(share_gradients=value)) for value in (None, True))
    assert whole.step_time == shared.step_time
    peaks = [max(found.simulation.peak_memory) for found in (whole, shared)]
    assert peaks[0] > MACHINES["h100"].memory_size > peaks[1]
    parameters = 8 * (2 * 16_384 * (16_384 + 1024) + 3 * 16_384 * 53_248) / 8  # of 8 blocks, but for their norms
    assert peaks[0] - peaks[1] == pytest.approx(4 * parameters * 127 / 128, rel=1e-4)


def test_a_host_that_waits_starts_over_again():
    send = Op(kind="send", bytes=1000, axis="pp", peer=1, asynchronous=True)
    took = [communication_seconds(op, (0, 1), MACHINES["a100"]) for op in (send, replace(send, asynchronous=False))]
    assert took[1] - took[0] == pytest.approx(HOST_WAIT)


def test_of_tokens_that_travel_beside_products_the_first_part_is_waited_for():
    known = {"devices": 2, "tp": 2, "sequence_parallel": True}
    whole, parts = (
        [op.bytes for op in ops_of(**known, tp_overlap=value) if op.axis == "tp" and op.part.endswith("mlp")]
        for value in (None, True)
    )
    assert [size // 2 for size in whole] == parts


def test_operands_at_odd_places_take_longer():
    """Rows of 108 numbers of 2 bytes do not begin at multiples of 16; those of 112 do."""
    odd, even = (kernel_seconds(matmul(4096, size, 4096, 2), MACHINES["a100"]) for size in (108, 112))
    assert odd > 0.9 * even / UNALIGNED
    products = [Kernel(MATMUL, 2048, 2048, size, batch=64, weight=False) for size in (108, 112)]
    odd, even = (kernel_seconds(product, MACHINES["a100"]) for product in products)  # of heads, without tensor cores
    assert odd > 0.9 * even / UNALIGNED_BATCH


def test_every_other_product_is_done_again_and_attention_is_not():
    """Of a block of Llama 3 8B: the matrix behind attention, 4096 x 4096, and the MLP's last, 14,336 x 4096."""
    spec = Spec(
        mode="single", devices=1, model="llama3_8b", layers=1, context=1024, recompute="selective", every_other=True
    )
    (block,) = [layer for layer in prepare(spec).layers if layer.name == "block1"]
    again = chain.recompute(block, 1, spec)
    assert again.flops == 2 * 1024 * 4096 * (4096 + 14_336)
    assert {kernel.kind for kernel in again.kernels} == {MATMUL, MEMORY}
    kept = chain.recompute(block, 1, spec.with_(every_other=None))
    assert kept.flops == 0 and ATTENTION in {kernel.kind for kernel in kept.kernels}


def test_of_every_other_product_the_result_is_kept():
    """Of a token of Llama 3 8B, in two bytes: of seven products the first, third, fifth and seventh (queries, values,
    gate and the MLP's output), what attention gives with a log-sum-exp a head, and the block's output."""
    spec = Spec(**(LLAMA | {"layers": 2}), recompute="selective", every_other=True)
    first, last = (layer for layer in prepare(spec).layers if layer.name.startswith("block"))
    numbers = 4096 + 1024 + 14_336 + 4096 + 4096 + 4096
    assert chain.kept(first, spec) == chain.kept(last, spec) == 1024 * (2 * numbers + 4 * 32)
    # Cut over two ranks, half of the keys and of the gate's partner is not kept, and all that is behind attention.
    tensor, saved = spec.with_(mode="tensor", devices=2), []
    for every_other in (None, True):
        ops = modes.plan(prepare(tensor.with_(every_other=every_other))).programs[0].ops
        saved.append(sum(op.saved for op in ops if op.kind == "forward" and op.part.startswith("block1.")))
    assert saved[0] - saved[1] == tensor.global_batch * 1024 * 2 * (1024 // 2 + 4096 + 14_336 // 2)


LLAMA = {"mode": "single", "devices": 1, "model": "llama3_8b", "layers": 1, "context": 1024, "precision": "bf16"}


def test_what_is_recomputed_in_full_may_spare_queries_keys_and_values():
    """Of a block of Llama 3 8B: 4096 numbers of queries, 1024 of keys and of values, from 4096; nor is their rotation
    done again. Kept in two bytes, beside the block's input."""
    spec = Spec(**LLAMA, recompute="full", keep_qkv=True)
    (block,) = [layer for layer in prepare(spec).layers if layer.name == "block1"]
    again, all_of_it = (chain.recompute(block, 1, spec.with_(keep_qkv=value)) for value in (True, None))
    assert all_of_it.flops - again.flops == 2 * 1024 * 4096 * (4096 + 2 * 1024)
    assert [kernel.kind for kernel in all_of_it.kernels[:4]] == [MEMORY, MATMUL, MEMORY, ATTENTION]
    assert [kernel.kind for kernel in again.kernels[:2]] == [MEMORY, ATTENTION]
    assert chain.kept(block, spec) - chain.kept(block, spec.with_(keep_qkv=None)) == 2 * 1024 * (4096 + 2 * 1024)


@pytest.mark.parametrize("cut", ({"mode": "tensor"}, {"mode": "hybrid", "tp": 2}, {"mode": "hybrid", "cp": 2}))
def test_where_a_block_is_cut_none_are_spared(cut):
    with pytest.raises(SpecError, match="keep-qkv"):
        prepare(Spec(**(LLAMA | {"devices": 2, "recompute": "full", "keep_qkv": True} | cut)))


def test_a_layer_may_be_gathered_when_the_one_before_it_is_through():
    """On the way back from the head through two blocks to the embedding: its gather before or behind its neighbour."""
    known = GPT | {"mode": "fsdp", "devices": 2, "global_batch": 8}
    for prefetch, first in ((None, "all_gather"), (False, "backward")):
        ops = modes.plan(prepare(Spec(**known, backward_prefetch=prefetch))).programs[0].ops
        back = [op for op in ops if op.kind == "backward" or (op.kind == "all_gather" and op.payload == "weights")]
        back = back[[op.kind for op in back].index("backward") - (prefetch is None) :]
        assert [op.kind for op in back[:2]] == [first, {"all_gather": "backward", "backward": "all_gather"}[first]]
        assert {op.part for op in back[:2]} == {"head", "block2"}


def test_gathers_behind_the_way_back_are_waited_for():
    """Eight samples a rank take longer than any gather beside them, which hides all; behind it none is hidden."""
    known = {"mode": "fsdp", "devices": 8, "model": "llama3_8b", "layers": 8, "precision": "bf16", "global_batch": 64}
    before, behind = (predict(Spec(**known, machine="h100", backward_prefetch=value)) for value in (None, False))
    gather = next(op for op in before.plan.programs[0].ops if op.kind == "all_gather" and op.part == "block1")
    one = communication_seconds(gather, range(8), before.machine)
    assert 8 * one < behind.step_time - before.step_time < 11 * one  # 8 blocks, and an embedding of 2.4 blocks' size


def test_gradients_of_two_bytes_may_be_reduced_in_four():
    """Over replicas and shards; what tensor ranks give each other is as it was, and so is what is gathered."""
    layout = {"devices": 8, "tp": 2, "fsdp": 2, "dp": 2}
    two, four = (ops_of(**layout, reduce_fp32=value) for value in (None, True))
    grown = {(a.kind, a.axis) for a, b in zip(two, four, strict=True) if b.bytes == 2 * a.bytes > 0}
    assert grown == {("reduce_scatter", "fsdp"), ("all_reduce", "dp")}
    assert all(a == b for a, b in zip(two, four, strict=True) if (a.kind, a.axis) not in grown)
    assert ops_of(**layout, reduce_fp32=True, precision="fp32") == ops_of(**layout, precision="fp32")
    context = GPT | {"devices": 2, "mode": "hybrid", "cp": 2, "attention": "all_gather", "precision": "bf16"}
    two, four = (modes.plan(prepare(Spec(**context, reduce_fp32=value))).programs[0].ops for value in (None, True))
    changed = {(a.kind, a.payload) for a, b in zip(two, four, strict=True) if a != b}
    assert changed == {("all_reduce", "gradient")}  # not those of keys and values


@pytest.mark.parametrize(("mode", "gathers"), [("fsdp", 2), ("zero2", 1)])
def test_what_fsdp_copies_beside_its_collectives(mode, gathers):
    """Of a number of 2 bytes: what is gathered is read and written, as often as it is gathered; its gradient as it is
    put together, or read and written as it is to be reduced, in fp32 of 4 bytes, after the last of 3 micro-steps."""
    known = {"mode": mode, "devices": 4, "global_batch": 12, "accumulate": 3, "reduce_fp32": True}
    program = modes.plan(prepare(Spec(**(GPT | {"precision": "bf16"} | known)))).programs[0]
    moved = Counter()
    for op in program.ops:
        for kernel in op.kernels:
            moved[op.kind, kernel.only] += kernel.bytes * (op.part == "block1")
    whole = sum(op.bytes * 4 for op in program.ops if op.kind == "all_gather" and op.part == "block1") / gathers / 3
    back = 3 * 2 * whole * (gathers == 2)  # read and written in each micro-step
    assert moved["forward", EACH_PARAMETER] == 3 * 2 * whole
    assert moved["backward", EACH_PARAMETER] == back + 3 * whole  # 2 bytes and 4 of each number
    assert moved["backward", FLAT_PARAMETER] == 3 * 2 * whole


def test_kernels_of_one_software_take_time_there_alone_and_as_copies_do():
    a100, copy = MACHINES["a100"], memory(4096, 0, only=EACH_PARAMETER)
    assert kernel_seconds(copy, a100) == 0 == kernel_seconds(copy, replace(a100, does=(FLAT_PARAMETER,)))
    for unfused in (1.0, 3.0):  # it is one kernel in eager PyTorch too
        with_it = replace(a100, does=(EACH_PARAMETER,), unfused=unfused)
        assert kernel_seconds(copy, with_it) == kernel_seconds(memory(4096, 0), a100)


def test_an_optimizer_that_is_written_out_moves_more():
    ops = (Op(kind="optimizer", bytes=1000), Op(kind="optimizer", part="norm", bytes=1000))
    at = {times: compute_seconds(ops, replace(MACHINES["a100"], stepwise_optimizer=times), 1) for times in (1.0, 3.0)}
    beside = MACHINES["a100"].op_overhead
    assert at[3.0][0] - beside == pytest.approx(3 * (at[1.0][0] - beside)) and at[3.0][1] == at[1.0][1]


def test_a_product_has_not_the_multiprocessors_that_communication_beside_it_takes():
    """It takes as long as on a device that has only the others."""
    h100 = replace(MACHINES["h100"], taken=(("proj", 24), ("qkv weight", 24)))
    product = matmul(4096, 4096, 8192, 2)
    seconds = {name: kernel_seconds(product._replace(named=name), h100) for name in ("", "down", "proj")}
    rest = replace(MACHINES["h100"], sms=132 - 24, flop_rate=h100.flop_rate * (132 - 24) / 132)
    assert seconds["down"] == seconds[""] < seconds["proj"] == pytest.approx(kernel_seconds(product, rest))
    block = prepare(Spec(**GPT, mode="single", devices=1, precision="bf16")).layers[1]
    named = {kernel.named for kernel in kernels.backward(block.kernels, 1)} - {""}
    assert named == {"qkv weight", "proj weight", "down weight"}  # and no product for an input's gradient


def test_what_goes_round_a_ring_is_summed_at_its_end():
    """Of 2 samples x 32 tokens x 64 numbers of 2 bytes what 2 ranks made of half of the tokens, and their sum: of
    attention and of the MLP, in 2 blocks."""
    ops = ops_of(devices=2, tp=2, global_batch=2, sequence_parallel=True)
    summed = [k.bytes for op in ops for k in op.kernels if op.kind == "forward" and k.only == SUMMED_LAST]
    assert summed == [2 * 32 * 64 * 2 * 1.5] * 4


WRAPPED = [{"tp": 4}, {"pp": 2, "tp": 2, "microbatches": 4}, {"fsdp": 2, "tp": 2}]


@pytest.mark.parametrize("mesh", [{"dp": 4}, *WRAPPED, *(mesh | {"sequence_parallel": True} for mesh in WRAPPED)])
def test_all_ranks_do_the_products_of_narayanan_et_al_and_no_head_is_computed_again(mesh):
    """96 B s l h^2 (1 + s/6h + V/16lh) FLOPs (arXiv:2104.04473, equation 3): blocks four times, the head three."""
    known = {"mode": "hybrid", "precision": "bf16", "global_batch": 8, "devices": 4, "vocabulary": 512}
    software = {"master_weights": True, "early_stop": False, "recompute": "full", "ffn": 256, "flash": False}
    plan = modes.plan(prepare(Spec(**(GPT | known | software | mesh))))
    ranks = [plan.program(rank) for rank in range(plan.world_size)]
    done = sum(
        kernel.flops for program in ranks for op in program.ops for kernel in op.kernels if kernel.kind != MEMORY
    )
    samples, tokens, layers, hidden, vocabulary = 8, 32, 2, 64, 512
    blocks = 1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert done == pytest.approx(96 * samples * tokens * layers * hidden**2 * blocks, rel=1e-12)
    again = {op.part.split(".")[0] for program in ranks for op in program.ops if op.kind == "recompute"}
    assert again == {"block1", "block2"}
