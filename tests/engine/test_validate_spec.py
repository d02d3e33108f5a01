"""Published rows as Specs and machines, and the whole command on a few that are carried here with their sources."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cost.catalogue import MACHINES, SUSTAINED
from engine.cost.collectives import collective_seconds
from engine.cost.kernels import EACH_PARAMETER, FLAT_PARAMETER, SUMMED_LAST, memory
from engine.cost.matmul import kernel_seconds
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec
from engine.validate import words
from engine.validate.compared import compare
from engine.validate.report import validate
from engine.validate.rows import Unusable, parse, read
from engine.validate.spec_of import BLOCKING, machine_of, predicted, spec_of
from engine.validate.statistics import errors
from tests.engine.test_validate_reading import case, entry

SMALL = Path(__file__).parents[1] / "published_small.json"


def settings(**changes) -> dict:
    spec, _ = spec_of(case(**changes))
    return spec.to_dict()


def test_a_pipeline_is_a_hybrid_with_its_schedule():
    found = settings()
    wanted = {"mode": "hybrid", "tp": 2, "pp": 2, "dp": 4, "fsdp": 1, "microbatches": 8, "schedule": "1f1b"}
    assert {name: found[name] for name in wanted} == wanted
    assert found["split"] == [13, 13]  # 24 blocks, the embedding and the head
    wanted = {"global_batch": 64, "recompute": "full", "precision": "fp16", "kv_heads": 16}
    assert {name: found[name] for name in wanted} == wanted


def test_stages_share_out_blocks_as_the_row_says():
    """22 blocks over 8 stages: the embedding and the head each take the place of one. 23: the last has what is left."""
    eight = {"parallel": {"gpus": 8, "tp": 1, "pp": 8, "dp": 1}, "batch": {"micro": 1, "global": 8}}
    assert settings(model={"layers": 22}, **eight)["split"] == [3] * 8
    assert settings(model={"layers": 23}, **eight)["split"] == [4, 3, 3, 3, 3, 3, 3, 3]
    _, inferred = spec_of(case(model={"layers": 22}, **eight))
    assert any("place of a block" in text for text in inferred)


def test_ranks_that_share_out_experts_are_counted_among_replicas_there_and_have_an_axis_here():
    model = {"experts": 8, "top_k": 2, "ffn": 4096}
    layout = {"gpus": 32, "tp": 2, "pp": 2, "dp": 8, "ep": 4}
    found = settings(model=model, parallel=layout | {"zero": 1})
    wanted = {"tp": 2, "pp": 2, "ep": 4, "fsdp": 2, "dp": 1, "devices": 32}
    assert {name: found[name] for name in wanted} == wanted
    spec = Spec(**found)
    assert predict(spec).job.replicas == 8


def test_whole_experts_are_shared_out_over_tensor_ranks_too():
    """Megatron-LM's ep 16 with etp 1 beside tp 2 is an ep of 8 here; where there are fewer replicas than ep nothing
    else is possible."""
    model = {"experts": 16, "top_k": 2, "ffn": 4096}
    layout = {"gpus": 32, "tp": 2, "pp": 2, "dp": 8, "ep": 16}
    for parallel, fits in ((layout | {"etp": 1}, (8, 1)), (layout, (8, 1)), (layout | {"ep": 4, "etp": 1}, (2, 4))):
        spec, inferred = spec_of(case(model=model, parallel=parallel))
        assert (spec.ep, spec.dp, spec.expert_tp) == (*fits, 1)
        assert any("whole beside tensor ranks" in text for text in inferred) == ("etp" not in parallel)
        assert predict(spec).job.replicas == 8
    for parallel in (layout | {"ep": 1, "etp": 1}, layout | {"ep": 3}, layout | {"tp": 4, "dp": 4, "ep": 4, "etp": 2}):
        with pytest.raises(Unusable, match="of the tensor ranks"):
            settings(model=model | {"experts": 48}, parallel=parallel)


@pytest.mark.parametrize(
    ("zero", "mode"), [(0, "ddp"), (1, "zero1"), ("ZeRO-2", "zero2"), (3, "fsdp"), ("Megatron-FSDP group 2", "hsdp")]
)
def test_replicas_share_what_the_row_says(zero, mode):
    found = settings(parallel={"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "zero": zero})
    assert (found["mode"], found["accumulate"]) == (mode, 4)  # 64 / (8 replicas x 2)
    assert (found["fsdp"], found["dp"]) == ((2, 4) if mode == "hsdp" else (None, None))


def test_a_vocabulary_is_padded_for_tensor_ranks():
    assert settings(model={"vocab": 50_257})["vocabulary"] == 50_432  # 197 x 256


def test_a_machine_has_the_links_and_the_memory_of_its_row():
    found = machine_of(
        case(
            hardware={
                "gpu": "H100-SXM 96GB HBM2e 2.4TB/s, 500W cap",
                "inter": "400Gb/s RDMA per GPU",
                "gpus_per_node": 4,
                "intra": "NVLink3 600GB/s total",
            }
        )
    )
    known = MACHINES["h100"]
    assert found.node_size == 4 and found.memory_size == round(0.99 * 96 * 2**30)
    assert found.link_rate == pytest.approx(12 * 20e9)
    assert found.tiers[-1][1].rate == pytest.approx(known.tiers[-1][1].rate)  # its catalogue has 400 Gb/s too
    assert found.memory_rate / known.memory_rate == pytest.approx(2.4 / 3.35)


def test_what_leaves_a_node_by_one_of_its_cards_has_that_one_for_all():
    """BLOOM's nodes have four for 8 devices, 100 Gb/s each, of which NCCL used one: 12.5 GB/s, an eighth for each."""
    inter = {"inter": "4x100Gb/s Omni-Path per node"}
    other, bloom = (machine_of(case(source=named, hardware=inter)).tiers[-1][1] for named in ("SC21", "bigscience"))
    assert other.rate == pytest.approx(4 * bloom.rate) and bloom.rate == pytest.approx(0.95 * 12.5e9 / 8)
    assert (other.latency, other.chunk) == (bloom.latency, bloom.chunk)
    plain, shared = (
        machine_of(case(source=named, hardware={"inter": "8x200Gb/s HDR IB per node"})).tiers[-1][1]
        for named in ("SC21", "DeepSpeed ZeRO-3")
    )
    assert plain.rate == pytest.approx(8 * shared.rate) and shared.latency == pytest.approx(12 * plain.latency)


def test_the_baseline_of_megascale_writes_scores_and_takes_them_again():
    found = settings(source="MegaScale", recompute="not stated")
    assert (found["flash"], found["recompute"]) == (False, "selective")


def test_a_device_under_its_power_is_as_fast_as_was_measured_or_as_its_power_allows():
    """Of 989.4 TFLOP/s in bf16 and 1979 in fp8, 60 % at 500 W; at 400 W the cube root of 4 / 7."""
    limits = {watts: machine_of(case(hardware={"gpu": f"H100-SXM 96GB, {watts}W cap"})) for watts in (500, 400)}
    for precision, peak in (("bf16", 989.4e12), ("fp8", 1979e12)):
        assert limits[500].at(precision).flop_rate == pytest.approx(SUSTAINED * 0.60 * peak)
    assert limits[400].flop_rate == pytest.approx(MACHINES["h100"].flop_rate * (400 / 700) ** (1 / 3))
    blackwell = machine_of(case(hardware={"gpu": "B200, 750W cap"}))
    assert blackwell.flop_rate == pytest.approx(MACHINES["b200"].flop_rate * 750 / 1000)


def test_what_cannot_be_planned_says_the_rule():
    with pytest.raises(Unusable, match="Lockstep"):
        one_head = {"heads": 1, "kv_heads": 1}  # and two tensor ranks
        predicted(case(model=one_head, parallel={"gpus": 8, "tp": 2, "pp": 2, "dp": 2}))


def test_every_device_that_a_row_can_name_is_in_the_catalogue():
    assert {name for _, name in words.DEVICES} <= set(MACHINES)


def test_a_kernel_waits_for_its_host_where_launches_block():
    plain, blocking = (machine_of(case(notes=notes)) for notes in ("", "CUDA_LAUNCH_BLOCKING=1 may be set"))
    assert (plain.op_overhead, blocking.op_overhead) == (MACHINES["a100"].op_overhead, BLOCKING)


def test_devices_that_are_joined_in_pairs_are_islands_in_a_node():
    """Of 12 links 4 lead to each of 3 others: 4 devices have all their links among themselves, and PCIe to 4 more."""
    found = machine_of(case(hardware={"gpu": "A100-SXM4-80GB", "intra": "NVLink3 (4 links per pair)"}))
    assert [reach for reach, _ in found.tiers] == [4, 8, 0]
    four, eight = (collective_seconds(Op(kind="all_reduce", axis="tp", bytes=10**8), n, found) for n in (4, 8))
    assert four == pytest.approx(2 * 3 / 4 * 1e8 / 240e9, rel=0.1) and eight > 2 * four
    whole = machine_of(
        case(hardware={"gpu": "A100-SXM4-80GB", "intra": "NVLink3 (4 links per pair)", "gpus_per_node": 4})
    )
    assert [reach for reach, _ in whole.tiers] == [4, 0]
    with pytest.raises(Unusable, match="do not fill a node"):
        case(hardware={"intra": "NVLink3 (6 links per pair)"})


def test_eager_software_moves_what_a_fused_kernel_keeps_to_itself():
    """A norm in one kernel reads and writes a token of two bytes; in eager PyTorch 18 are read or written."""
    llama = {"activation": "swiglu", "ffn": 2816}
    assert machine_of(case(id="tt_8b_8_FSDP_eager_bf16", model=llama)).unfused == pytest.approx(3.06, abs=0.01)
    assert machine_of(case(id="tt_8b_8_FSDP+compile_bf16", model=llama)).unfused == 1
    norm, a100 = memory(4096, 4096), MACHINES["a100"]
    once, thrice = (kernel_seconds(norm, replace(a100, unfused=times)) - a100.op_overhead for times in (1, 3))
    assert thrice == pytest.approx(3 * once)


def test_pytorch_copies_the_tokens_that_it_gathers_and_async_tp_does_not():
    of = {"id": "tt_8b", "source": {"repo": "pytorch/torchtitan"}}
    layout = {"gpus": 8, "tp": 8, "pp": 1, "dp": 1, "sp": True}
    assert machine_of(case(**of, parallel=layout)).copies_tokens
    assert not machine_of(case(**of, parallel=layout | {"async_tp": True})).copies_tokens
    assert not machine_of(case()).copies_tokens


def test_rows_that_have_to_be_deterministic_fill_what_they_allocate():
    assert machine_of(case(notes="deterministic mode, NCCL_ALGO=Ring")).fills and not machine_of(case()).fills


def test_the_loss_is_as_its_software_makes_it():
    of = {"NVIDIA/Megatron-LM": True, "huggingface/nanotron": True, "NVIDIA/dgxc-benchmarking": False}
    of |= {"pytorch/torchtitan": False}
    assert {repo: machine_of(case(source={"repo": repo})).stepwise_loss for repo in of} == of
    fused = {"source": {"repo": "NVIDIA/Megatron-LM"}, "notes": "cross-entropy fusion on"}
    assert not machine_of(case(**fused)).stepwise_loss and settings(**fused)["fused_loss"]


def test_a_row_that_asks_for_rings_has_no_sums_in_switches():
    of = {"hardware": {"gpu": "H100-SXM5-80GB"}}
    assert machine_of(case(**of)).switch and machine_of(case(**of, notes="NCCL_ALGO=Ring")).switch is None


def test_attention_is_as_fast_as_its_softwares_kernel():
    """cuDNN's on Hopper, FlashAttention 2 where PyTorch chooses, and where results have to be the same in each run."""
    on_hopper = {"hardware": {"gpu": "H100-SXM5-80GB"}}
    latest, second, same = (
        machine_of(case(**on_hopper, source=source, notes=notes)).flash_rate / 989.4e12
        for source, notes in (("Megatron-LM", ""), ("torchtitan", ""), ("Megatron-LM", "deterministic mode"))
    )
    assert (latest, second, same) == pytest.approx((0.60, 0.35, 0.35))


def test_sequences_are_parallel_where_a_recipe_always_has_them_so_and_a_row_does_not_say():
    layout = {"gpus": 8, "tp": 2, "pp": 2, "dp": 2, "sp": None}
    assert settings(parallel=layout, source="Megatron-Bridge")["sequence_parallel"] is True
    assert settings(parallel=layout)["sequence_parallel"] is None
    assert settings(parallel=layout | {"sp": False}, source="Megatron-Bridge")["sequence_parallel"] is None


def test_what_a_rows_source_has_otherwise_counts_and_is_listed():
    layout = {"gpus": 8, "tp": 4, "pp": 1, "dp": 2, "sp": True}
    file = "tests/functional_tests/test_cases/gpt/gpt3_7b_tp4_pp1_memory_speed/golden_values_dev_dgx_h100.json"
    known, other = ({"repo": "NVIDIA/Megatron-LM", "file": name} for name in (file, file.replace("7b", "8b")))
    assert settings(parallel=layout, source=known)["sequence_parallel"] is None
    assert settings(parallel=layout, source=other)["sequence_parallel"] is True
    asks = "no sequence parallelism, which the model_config.yaml of the source does not ask for"
    assert asks in case(parallel=layout, source=known).inferred
    assert asks not in case(parallel=layout | {"sp": False}, source=known).inferred


def test_what_is_recomputed_selectively_depends_on_the_software():
    assert settings(recompute="selective", source="torchtitan")["every_other"] is True
    assert settings(recompute="full", source="torchtitan")["every_other"] is None
    assert settings(recompute="selective", source="Megatron-LM")["every_other"] is None


def test_what_a_softwares_own_examples_do_holds_where_a_row_does_not_say():
    """Sizes in billions that the authors give: 46 blocks of 5120 and 62 of 6144 (Qi et al. 2024, table 3)."""
    for layers, hidden, billions in ((46, 5120, 14.6), (62, 6144, 28.3)):
        found = case(
            model={"layers": layers, "hidden": hidden, "heads": hidden // 128, "kv_heads": None, "vocab": None},
            group="Zero Bubble",
        )
        assert round((12 * layers * hidden**2 + found.vocabulary * hidden) / 1e9, 1) == billions
    recipe = {"source": "NVIDIA/dgxc-benchmarking, maxtext/README_70b.md", "recompute": "not stated"}
    alone = {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "zero": 3}
    found = settings(**recipe, parallel=alone)
    assert (found["recompute"], found["keep_qkv"], found["early_stop"]) == ("full", True, None)
    assert settings(**(recipe | {"recompute": "none"}), parallel=alone)["keep_qkv"] is None


def test_what_each_software_does_with_gradients_and_gathers():
    shards = {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "zero": 3}
    foundry = settings(source="mosaicml/llm-foundry", parallel=shards, precision="amp_bf16")
    assert foundry["backward_prefetch"] is False and foundry["reduce_fp32"] is None
    for source, precision, wide in (
        ("Megatron-LM", "bf16", True),
        ("Megatron-LM", "fp16 mixed", None),
        ("torchtitan", "bf16", True),
        ("Megatron-Bridge", "BF16", None),
    ):
        found = settings(source=source, parallel=shards, precision=precision)
        assert (found["reduce_fp32"], found["backward_prefetch"]) == (wide, None), source


def test_recipes_give_multiprocessors_to_tokens_that_travel_beside_products():
    """In 16 bits they go in a pipeline behind two products of a block, in 8 round a ring; without tp they do not go."""
    of = {"source": "NVIDIA/dgxc-benchmarking", "hardware": {"gpu": "H100-SXM5-80GB"}}
    layout = {"gpus": 8, "tp": 4, "pp": 1, "dp": 2, "sp": True}
    sizes = {"hidden": 8192, "heads": 64}
    for precision, taken, does in (
        ("BF16", {"proj": 24, "down": 16, "qkv weight": 24}, ()),
        ("FP8", {"qkv weight": 24}, (SUMMED_LAST,)),
    ):
        machine = machine_of(case(**of, model=sizes, parallel=layout, precision=precision))
        assert (dict(machine.taken), machine.does) == (taken, does)
        for other in ({"parallel": layout | {"tp": 1, "dp": 8}}, {"source": "NVIDIA/Megatron-LM"}, {"model": {}}):
            machine = machine_of(case(**(of | {"model": sizes, "parallel": layout} | other), precision=precision))
            assert (machine.taken, machine.does) == ((), ())


def test_llm_foundry_is_that_of_its_rows():
    """Of PyTorch 1.13, and of 2.1, where recomputing stops early."""
    shards = {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "zero": 3}
    for precision, early_stop in (("bf16", False), ("amp_bf16", None)):
        of = {"source": "mosaicml/llm-foundry", "parallel": shards, "precision": precision}
        found = settings(**of, recompute="full", batch={"micro": 1, "grad_accum": 2, "global": 16})
        assert (found["early_stop"], found["sync_every_microstep"]) == (early_stop, True)
        assert settings(**of, batch={"micro": 1, "grad_accum": 1, "global": 8})["sync_every_microstep"] is None
        machine = machine_of(case(**of))
        assert (machine.does, round(30 * machine.stepwise_optimizer)) == ((FLAT_PARAMETER,), 88)
    assert machine_of(case(source="torchtitan")).does == (EACH_PARAMETER,) and machine_of(case()).does == ()


def test_context_ranks_exchange_heads_where_their_software_does():
    ranks = {"gpus": 4, "tp": 1, "pp": 1, "cp": 4, "dp": 1, "sp": None}
    assert settings(source="MooreThreads/SimuMax", parallel=ranks)["attention"] == "ulysses"
    assert settings(parallel=ranks)["attention"] is None


def test_ranks_that_wait_for_nobody_hide_their_ramp():
    """4 stages, 16 micro-batches, each pass and half of one 1 s: 16 x 3 s of work, and 3 s until the last rank has any.
    Clipping by the norm of all gradients lets all ranks wait for the last."""
    known = {"mode": "pipeline", "model": "mlp", "layers": 7, "devices": 4, "microbatches": 16, "machine": "unit"}
    ramp = [predict(Spec(**known, schedule="zb_h2", clip=clip)) for clip in (None, 1.0)]
    assert [each.step_time for each in ramp] == [51, 51] and [each.period for each in ramp] == [48, 51]
    assert predict(Spec(**known, schedule="1f1b")).period == 16 * 3 + 9  # rank 0 is there from first to last


@pytest.fixture(scope="module")
def small():
    return validate(read(SMALL), predicted, rows=True)


def test_every_row_is_used_or_refused_with_a_reason(small):
    used = [row["id"] for row in [*small["rows"], *small["calls"]]]
    refused = [row["id"] for row in small["rows_not_used"]]
    assert sorted(used + refused) == sorted(row.id for row in read(SMALL).rows)
    assert all(row["why"] for row in small["rows_not_used"])
    assert {"mlm_h100_70B", "kor_mem_22B", "maxtext_Llama_2_70B_TPU_v6e_256"} <= set(refused)
    json.dumps(small, allow_nan=False)


def test_the_floor_is_the_one_constant_model_of_the_definition(small):
    """Two Llama-sized rows of one device: loads and times by hand give the median rate, and so the floor's errors."""
    (found,) = [each for each in small["sets"] if each["set"] == "dgxc_nemo_megatron"]
    times = [8.309, 8.408]
    load = 1 + 7 / (6 * 64)  # of each: the same FLOPs a device, and the same idle time
    rate = (load / times[0] + load / times[1]) / 2
    by_hand = errors([load / rate] * 2, times)["mape"]
    assert found["time"]["floor_mape"] == pytest.approx(by_hand)


MOST = 0.10  # mean error over the carried rows of dense models that were not fitted


def test_predictions_are_near_what_was_measured(small):
    assert small["overall"]["rows"] >= 10
    assert small["overall"]["mape"] <= MOST


def test_a_machine_of_half_the_rate_would_be_seen(monkeypatch):
    """Negative control: the bound above is one that a wrong device breaks."""
    from engine.validate import spec_of as module

    slower = {name: known if known.unit else _slower(known) for name, known in MACHINES.items()}
    monkeypatch.setattr(module, "MACHINES", slower)
    rows = [row for row in read(SMALL).rows if row.group in ("korthikanti_t5", "vtrain_multi")]
    used, _, _ = compare(rows, predicted)
    assert errors([each.predicted.seconds for each in used], [each.time.value for each in used])["mape"] > MOST


def _slower(machine):
    return replace(machine, flop_rate=machine.flop_rate / 2)


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "engine", "validate", *words], capture_output=True, text=True)


def test_the_command_prints_a_table_and_an_error_is_one_line(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"entries": [entry(), entry(id="b", batch={"micro": None})]}))
    shown = run(str(path), "--rows")
    assert shown.returncode == 0 and "not published: size of a micro-batch" in shown.stdout
    path.write_text("{")
    wrong = run(str(path))
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1 and "Traceback" not in wrong.stderr


def test_a_file_of_other_things_has_no_rows():
    found = parse({"entries": [{"id": "a"}, {"metrics": []}]}, "here")
    assert len(found.rows) == 1 and len(found.broken) == 1
    report = validate(found, predicted)
    assert report["used"] == 0 and report["overall"] is None and report["targets"] == []
