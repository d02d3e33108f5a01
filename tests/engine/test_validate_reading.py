"""Published rows are read as they are; each word that decides a number is turned into it, or the row is refused."""

import json

import pytest

from engine.asking.rules import SpecError
from engine.validate import words
from engine.validate.case import case_of
from engine.validate.collectives import call_of
from engine.validate.rows import Unusable, parse, read

GPT = {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "seq_len": 2048, "vocab": 51200, "activation": "gelu"}


def entry(**changes) -> dict:
    """A row that can be used."""
    row = {
        "id": "a",
        "group": "set",
        "confidence": "read from source text",
        "kind": "measured",
        "source": {"paper": "a paper"},
        "model": {"arch": "gpt", **GPT, "kv_heads": 16, "tied_embeddings": True},
        "parallel": {"gpus": 16, "tp": 2, "pp": 2, "vpp": 1, "cp": 1, "ep": 1, "dp": 4, "sp": False, "zero": 0},
        "schedule": "1F1B",
        "batch": {"micro": 2, "global": 64},
        "hardware": {"gpu": "A100-SXM4-80GB", "gpus_per_node": 8, "intra": "NVLink3 600GB/s total"},
        "precision": "fp16 mixed",
        "recompute": "full",
        "metrics": [{"name": "iteration_time_s", "value": 1.5, "unit": "s"}],
        "notes": None,
    }
    for name, value in changes.items():
        row[name] = {**row[name], **value} if isinstance(value, dict) and isinstance(row[name], dict) else value
    return row


def row_of(**changes):
    (row,) = parse({"entries": [entry(**changes)]}, "here").rows
    return row


def case(**changes):
    return case_of(row_of(**changes))


def test_a_row_becomes_a_training_in_numbers():
    found = case(hardware={"inter": "8x200Gb/s HDR IB per node"})
    assert (found.devices, found.tp, found.pp, found.dp) == (16, 2, 2, 4)
    assert (found.micro_batch, found.microbatches, found.global_batch) == (2, 8, 64)  # 64 / (4 replicas x 2)
    assert (found.schedule, found.stages_per_rank, found.recompute) == ("1f1b", 1, "full")
    assert found.network_rate == 25e9 and found.link_rate == 300e9 and found.memory_size == 80e9
    assert found.inferred == ()


def test_what_a_row_does_not_say_is_listed():
    found = case(model={"vocab": None, "kv_heads": None}, recompute="not stated", parallel={"zero": None})
    assert found.vocabulary == 51_200 and found.kv_heads == 16 and found.recompute == "none" and found.zero == 0
    texts = " | ".join(found.inferred)
    assert all(word in texts for word in ("vocabulary", "key and value heads", "nothing is recomputed", "ZeRO 0"))
    assert "network between nodes" in texts  # 16 devices in nodes of 8, and no network named


REFUSED = {
    "no shape": ({"model": {"layers": None, "hidden": None, "heads": None}}, "no shape"),
    "part of a shape": ({"model": {"heads": None}}, "heads of the model"),
    "text for a number": ({"parallel": {"gpus": "128-512"}}, "gpus is not one whole number"),
    "a truth value for a number": ({"parallel": {"tp": True}}, "tp is not one whole number"),
    "a number for a text": ({"hardware": {"inter": 7}}, "inter is not a text"),
    "a number beyond all": ({"parallel": {"gpus": 10**30}}, "gpus is not one whole number"),
    "no micro-batch": ({"batch": {"micro": None}}, "micro-batch"),
    "degrees that do not multiply": ({"parallel": {"dp": 3}}, "degrees do not multiply"),
    "a batch that does not divide": ({"batch": {"global": 62}}, "batch does not divide"),
    "batches that disagree": ({"batch": {"num_micro": 4}}, "do not agree"),
    "an unknown device": ({"hardware": {"gpu": "TPU v6e"}}, "device is not one"),
    "an unclear device": ({"hardware": {"gpu": "unclear (EFA-era A100/H100)"}}, "device is not one"),
    "an unknown schedule": ({"schedule": "wavefront"}, "schedule is not one"),
    "part recomputed": ({"recompute": "partial (norms)"}, "recomputed"),
    "a formula": ({"kind": "figure"}, "not a measurement"),
    "layers inferred": ({"model": {"layers_inferred": True}}, "inferred"),
    "an outlier": ({"notes": "OUTLIER: as slow as a larger batch"}, "outlier"),
    "stages that decide": (
        {"schedule": "1F1B / interleaved (v not published)", "parallel": {"vpp": None}},
        "stages of a rank",
    ),
}


def test_a_collective_that_took_as_long_as_its_host_is_refused():
    """vTrain's all-reduces of 1 to 4 MiB all took 93 us; those of more took longer."""
    for size, refused in ((1 << 20, True), (4 << 20, True), (8 << 20, False)):
        metrics = [("allreduce_busbw", 100, "GB/s"), ("message_bytes", size, "B")]
        metrics = [dict(zip(("name", "value", "unit"), metric, strict=True)) for metric in metrics]
        row = row_of(source={"file": "trace/a100/AR_GPU8_1M_1024M_LUT"}, parallel={"gpus": 8}, metrics=metrics)
        if refused:
            with pytest.raises(Unusable, match="its host's"):
                call_of(row)
        else:
            assert call_of(row).size == size


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_used_say_why(name):
    changes, words_in_reason = REFUSED[name]
    with pytest.raises(Unusable, match=words_in_reason):
        case(**changes)


def test_unknown_stages_are_allowed_where_they_cannot_matter():
    """1 of 2 ranks idle for 1 of 257 turns: 0.4 % of the step."""
    found = case(schedule="1F1B / interleaved", parallel={"vpp": None}, batch={"micro": 2, "global": 2048})
    assert found.microbatches == 256 and found.schedule == "1f1b"
    assert any("0.4 % at most" in text for text in found.inferred)


def test_a_broken_entry_is_named_and_the_others_are_read():
    entries = [entry(), 7, entry(id="b", model=[1]), entry(id="c", metrics="none"), entry(), entry(id="d")]
    found = parse({"entries": entries}, "here")
    assert [row.id for row in found.rows] == ["a", "d"]
    assert [named for named, _, _ in found.broken] == ["entry 2", "b", "c", "a"]
    assert [why.reason for _, _, why in found.broken] == [
        "the entry is not an object",
        "a part of the entry is not an object",
        "the entry has no list of metrics",
        "an entry of this id came before",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": 3}', '{"entries": []}', "[" * 100_000])
def test_a_file_that_has_no_rows_is_one_error(tmp_path, text):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        read(path)
    assert error.value.code == "no_measurements"


def test_a_file_that_is_not_there_is_one_error(tmp_path):
    with pytest.raises(SpecError) as error:
        read(tmp_path / "none.json")
    assert error.value.code == "no_file"


def test_a_number_that_is_not_finite_is_named():
    text = json.dumps({"entries": [entry(metrics=[{"name": "iteration_time_s", "value": float("nan"), "unit": "s"}])]})
    found = parse(json.loads(text), "here")
    assert not found.rows and found.broken[0][2].reason == "a metric is not a finite number"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_json_has_not_got_comes_back_out_of_no_entry(number, tmp_path):
    """Rows are told with their entries, as JSON."""
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"entries": [entry(model={"arch": "odd"})]}).replace('"odd"', number))
    (row,) = read(path).rows
    assert row.model["arch"] is None


NETWORKS = {
    "8x200Gb/s HDR IB per node": 25e9,
    "4x100Gb/s Omni-Path per node": 6.25e9,
    "4x200Gb/s HDR IB per node (800Gb/s)": 12.5e9,
    "400Gb/s RoCE per GPU; 3-layer Clos, 3072-GPU pods full bisection": 50e9,
    "2Tb/s RoCE per host": 31.25e9,
    "RoCE RDMA (bandwidth not stated)": None,
    "see section": None,
}


@pytest.mark.parametrize("text", NETWORKS)
def test_networks_are_bytes_a_second_of_a_device(text):
    assert words.network_rate(text, per_node=8) == NETWORKS[text]


def test_links_are_of_one_direction():
    assert words.link_rate("NVLink4 900GB/s total") == 450e9
    assert words.link_rate("NVLink5 1.8TB/s total") == 900e9
    assert words.link_rate("NVLink3 (4 links per pair)") is words.link_rate("NVSwitch") is None
    assert words.cards("4x100Gb/s Omni-Path per node") == 4 and words.cards("400Gb/s RDMA per GPU") == 1
    assert words.island("NVLink3 (4 links per pair)") == 4 and words.island("NVSwitch") is None


DEVICES = {
    "NVIDIA Ampere (A100-80G class)": ("a100", 80e9),
    "a100_40gb": ("a100_40", 40e9),
    "V100-SXM3-32GB (DGX-2)": ("v100", 32e9),
    "GB200": ("gb200", None),
    "H100-SXM 96GB HBM2e 2.4TB/s, 500W cap": ("h100", 96e9),
}


@pytest.mark.parametrize("text", DEVICES)
def test_devices_and_their_memory(text):
    assert (words.device(text), words.memory_size(text)) == DEVICES[text]


def test_memory_rates_are_read_where_a_name_has_them():
    assert words.memory_rate("H100-SXM 96GB HBM2e 2.4TB/s, 500W cap") == 2.4e12
    assert words.memory_rate("H100-SXM5-80GB") is None
    assert words.power_cap("H100-SXM 96GB HBM2e 2.4TB/s, 500W cap") == 500 and words.power_cap("H100") is None


def test_interference_is_what_a_row_says():
    notes = "no gradient bucketing; NCCL interference raises time ~30% vs isolated"
    alone = case(hardware={"inter": "8x200Gb/s"}).network_rate
    assert case(notes=notes, hardware={"inter": "8x200Gb/s"}).network_rate == pytest.approx(alone / 1.3)


def test_words_for_what_replicas_share():
    texts = ["FSDP FULL_SHARD (ZeRO-3)", "FSDP SHARD_GRAD_OP (ZeRO-2)", "distributed optimizer, overlap", "FSDP2", 1]
    assert [words.zero_stage(text) for text in texts] == [3, 2, 1, 3, 1]
    assert words.zero_stage("FSDP, params NOT resharded after forward") == 2
    assert words.shard_group("Megatron-FSDP group 64") == 64 and words.shard_group("FSDP2") is None


def test_words_for_numbers_schedules_and_recomputation():
    assert [words.precision(t) for t in ("amp_bf16", "fp16 mixed", "MXFP8", "float8 linear", "NVFP4")] == [
        "bf16",
        "fp16",
        "fp8",
        "fp8",
        "fp4",
    ]
    names = {"1F1B-I": "interleaved_1f1b", "ZB-2p": "zb_2p", "ZB-1p": "interleaved_zero_bubble", "DualPipe": "dualpipe"}
    assert {text: words.schedule(text) for text in names} == names
    assert words.recompute("full (use_checkpoint true)") == "full" and words.recompute("per-op SAC") == "selective"
    assert words.recompute("not stated in README (recipe default)") is None
