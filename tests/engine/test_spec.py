"""What a person sets is taken as meant, or refused with the rule, the value, and values that work; nothing between."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.asking.faults import Fault, parse_fault
from engine.asking.rules import RULES, SpecError, closest
from engine.cost.machine import MACHINES, machine
from engine.job import prepare
from engine.schedules.rules import SENTENCES
from engine.spec import MODES, Spec

ROOT = Path(__file__).parents[2]

LARGE = {"model": "gpt", "hidden": "65536", "dataset": "synthetic", "vocabulary": "16777216"}

# (settings as in a URL, the rule that refuses them, the setting it is about)
RANGES = [
    ({"devices": "0"}, "out_of_range", "devices"),
    ({"devices": "-1"}, "out_of_range", "devices"),
    (
        {"devices": str(10**9), "model": "gpt", "context": "2", "global-batch": "16384"},
        "out_of_range",
        "devices",
    ),
    ({"lr": "nan"}, "not_finite", "lr"),
    ({"lr": "inf"}, "not_finite", "lr"),
    ({"lr": "-inf"}, "not_finite", "lr"),
    ({"lr": "1e999"}, "not_finite", "lr"),
    ({"accumulate": "5"}, "batch_by_microsteps", "accumulate"),
    ({"precision": "bf16", "compress": "fp16"}, "compress_of_bf16", "compress"),
    ({"bucket-mb": "1", "compress": "powersgd"}, "one_bucket", "bucket_mb"),
    ({"find-unused": "1", "compress": "powersgd"}, "unused_of_powersgd", "find_unused"),
    ({"sync-every-microstep": "1", "accumulate": "2", "compress": "powersgd"}, "exclusive", "sync_every_microstep"),
    ({"compress": "fp16", "compress-rank": "2"}, "does_not_apply", "compress_rank"),
    ({"mode": "pipeline", "model": "moe", "compile_stage": "torchscript"}, "option_of_model", "compile_stage"),
    ({"model": "mlp", "freeze": "fc1,fc9"}, "bad_freeze", "freeze"),
    ({"model": "mlp", "freeze": "fc1", "mode": "pipeline", "schedule": "zb_h2"}, "schedule_of_frozen", "schedule"),
    ({"model": "mlp", "recompute": "selective"}, "nothing_to_recompute", "recompute"),
    (
        {"mode": "pipeline", "recompute": "full", "compile-stage": "torchscript"},
        "compile_recomputes",
        "compile_stage",
    ),
    ({"mode": "local_sgd", "sync-every-microstep": "1"}, "option_of_mode", "sync_every_microstep"),
    ({"bucket-mb": "nan"}, "not_finite", "bucket_mb"),
    ({"lr": "-0.1"}, "out_of_range", "lr"),
    ({"lr": "1e9"}, "out_of_range", "lr"),
    ({"bucket-mb": "0"}, "out_of_range", "bucket_mb"),
    ({"steps": "0"}, "out_of_range", "steps"),
    ({"steps": "1000001"}, "out_of_range", "steps"),
    ({"epochs": "0"}, "out_of_range", "epochs"),
    ({"mode": "single", "devices": "1", "global-batch": "0"}, "out_of_range", "global_batch"),
    ({"seed": "-1"}, "out_of_range", "seed"),
    ({"seed": str(2**31)}, "out_of_range", "seed"),
    ({"parity-steps": "-1"}, "out_of_range", "parity_steps"),
    ({"model": "gpt", "context": "1"}, "out_of_range", "context"),
    ({"model": "gpt", "hidden": "64", "heads": "0"}, "out_of_range", "heads"),
    ({"model": "gpt", "layers": "2000"}, "out_of_range", "layers"),
]
NAMES = [
    ({"mode": "dpp"}, "unknown_name", "mode"),
    ({"mode": ""}, "unknown_name", "mode"),
    ({"model": "transformer"}, "unknown_name", "model"),
    ({"dataset": "mnist"}, "unknown_name", "dataset"),
    ({"mode": "pipeline", "schedule": "f1b1"}, "unknown_name", "schedule"),
    ({"optimizer": "adam"}, "unknown_name", "optimizer"),
    ({"device": "gpu"}, "unknown_name", "device"),
]
JOINED = [
    ({"devices": "3"}, "batch_by_devices", "global_batch"),
    ({"mode": "data_parallel", "devices": "7"}, "batch_by_devices", "global_batch"),
    ({"mode": "fsdp", "devices": "7"}, "batch_by_devices", "global_batch"),
    ({"mode": "hsdp", "devices": "4", "fsdp": "3"}, "degree_divides", "fsdp"),
    ({"mode": "hsdp", "devices": "8", "dp": "5"}, "degree_divides", "dp"),
    ({"mode": "hsdp", "devices": "8", "dp": "4", "fsdp": "4"}, "degrees_of_devices", "dp"),
    ({"devices": "100"}, "batch_by_devices", "global_batch"),
    ({"devices": "1000", "global-batch": "1400"}, "batch_by_devices", "global_batch"),
    ({"mode": "pipeline", "devices": "4", "microbatches": "5"}, "batch_by_microbatches", "microbatches"),
    ({"mode": "pipeline", "devices": "2", "microbatches": "100"}, "batch_by_microbatches", "microbatches"),
    ({"mode": "pipeline", "devices": "4", "global-batch": "3"}, "batch_of_schedule", "global_batch"),
    ({"mode": "pipeline", "schedule": "dualpipe", "global-batch": "7"}, "batch_of_schedule", "global_batch"),
    (
        {"mode": "pipeline", "devices": "4", "microbatches": "3", "schedule": "gpipe"},
        "batch_by_microbatches",
        "microbatches",
    ),
    (
        # The batch of 64 has no number of microbatches that is enough for so many stages: it has to change first.
        {"mode": "pipeline", "model": "gpt", "layers": "100", "devices": "102", "microbatches": "100"},
        "batch_of_schedule",
        "global_batch",
    ),
    ({"mode": "pipeline", "devices": "4", "microbatches": "2"}, "too_few_microbatches", "microbatches"),
    ({"mode": "pipeline", "devices": "3", "microbatches": "1"}, "too_few_microbatches", "microbatches"),
    ({"mode": "hybrid", "devices": "8", "pp": "3"}, "degrees_product", "devices"),
    ({"mode": "hybrid", "devices": "8", "pp": "2", "dp": "2", "fsdp": "2", "tp": "2"}, "degrees_splits", "devices"),
    ({"mode": "hybrid", "devices": "8", "pp": "2", "tp": "2"}, "degrees_left", "fsdp"),
    ({"mode": "hybrid", "devices": "12", "tp": "2", "fsdp": "1"}, "degrees_left", "dp"),
    ({"mode": "hybrid", "devices": "4", "dp": "2", "tp": "2", "schedule": "gpipe"}, "needs_axis", "schedule"),
    ({"mode": "hybrid", "devices": "2", "microbatches": "4"}, "needs_axis", "microbatches"),
    ({"mode": "hybrid", "devices": "2", "pp": "2", "schedule": "dualpipe"}, "schedule_of_mode", "schedule"),
    ({"mode": "hybrid", "devices": "4", "tp": "2", "fsdp": "2", "balance": "none"}, "needs_axis", "balance"),
    ({"mode": "hybrid", "devices": "4", "cp": "2", "fsdp": "2", "model": "mlp"}, "model_of_mode", "model"),
    ({"mode": "hybrid", "devices": "4", "ep": "2", "cp": "2", "model": "deepseek_v3"}, "axis_of_model", "cp"),
    ({"mode": "hybrid", "devices": "6", "cp": "3", "fsdp": "2", "model": "gpt"}, "context_divides", "cp"),
    ({"mode": "hybrid", "devices": "3"}, "batch_by_replicas", "global_batch"),
    ({"mode": "hybrid", "devices": "8", "tp": "8", "model": "gpt"}, "devices_divide", "tp"),
    ({"mode": "hybrid", "devices": "8", "pp": "8"}, "too_many_stages", "pp"),
    ({"mode": "pipeline", "devices": "5"}, "too_many_stages", "devices"),
    ({"mode": "layer_split", "devices": "16384"}, "too_many_stages", "devices"),
    ({"mode": "pipeline", "model": "gpt", "layers": "2", "devices": "5"}, "too_many_stages", "devices"),
    ({"mode": "pipeline", "schedule": "zbv", "devices": "3"}, "too_many_stages", "devices"),
    ({"mode": "pipeline", "schedule": "looped_bfs", "stages-per-rank": "3"}, "too_many_stages", "devices"),
    (
        {"mode": "pipeline", "schedule": "looped_bfs", "devices": "1", "stages-per-rank": "5"},
        "too_many_stages",
        "stages_per_rank",
    ),
    ({"mode": "pipeline", "stages-per-rank": "2"}, "stages_of_schedule", "stages_per_rank"),
    ({"mode": "pipeline", "schedule": "zbv", "stages-per-rank": "1"}, "stages_of_schedule", "stages_per_rank"),
    ({"mode": "pipeline", "schedule": "dualpipev", "stages-per-rank": "4"}, "stages_of_schedule", "stages_per_rank"),
    ({"mode": "pipeline", "schedule": "dualpipev", "microbatches": "2"}, "too_few_microbatches", "microbatches"),
    # Two ranks, five microbatches: two rounds, and five is no multiple of two.
    (
        {"mode": "pipeline", "schedule": "interleaved_1f1b", "microbatches": "5", "global-batch": "60"},
        "rounds_of_microbatches",
        "microbatches",
    ),
    (
        {"mode": "pipeline", "schedule": "interleaved_zero_bubble", "microbatches": "15", "global-batch": "60"},
        "rounds_of_microbatches",
        "microbatches",
    ),
    ({"mode": "pipeline", "schedule": "dualpipe", "devices": "3"}, "two_way_devices", "devices"),
    ({"mode": "pipeline", "schedule": "dualpipe", "devices": "5"}, "two_way_devices", "devices"),
    ({"mode": "pipeline", "schedule": "dualpipe", "devices": "6"}, "too_many_stages", "devices"),
    ({"mode": "pipeline", "schedule": "dualpipe", "microbatches": "2"}, "two_way_microbatches", "microbatches"),
    (
        {"mode": "pipeline", "model": "gpt3_175b", "machine": "h100", "devices": "96"}
        | {"microbatches": "16384", "global-batch": "16384"},
        "forwards_of_plan",
        "microbatches",
    ),
    ({"mode": "pipeline", "schedule": "zbv", "split": "2,2"}, "split_sum", "split"),
    ({"mode": "pipeline", "split": "1,1"}, "split_sum", "split"),
    ({"mode": "pipeline", "split": "4"}, "split_sum", "split"),
    ({"mode": "layer_split", "split": "0,4"}, "split_sum", "split"),
    ({"mode": "layer_split", "split": "5,-1"}, "split_sum", "split"),
    ({"mode": "layer_split", "devices": "3", "split": "2,2"}, "split_sum", "split"),
    ({"model": "gpt", "heads": "5"}, "heads_divide", "heads"),
    ({"model": "gpt", "hidden": "1"}, "norm_of_one", "hidden"),
    ({**LARGE, "context": "65536", "global-batch": "1048576"}, "not_countable", "global_batch"),
    ({**LARGE, "context": "1048576", "heads": "1024", "head-dim": "65536"}, "not_countable", "context"),
    ({**LARGE, "model": "moe", "experts": "1024", "ffn": "4194304", "layers": "1024"}, "not_countable", "layers"),
    ({"model": "moe", "hidden": "1", "heads": "1"}, "norm_of_one", "hidden"),
    ({"model": "gpt", "kv-heads": "3"}, "kv_heads_divide", "kv_heads"),
    # The divisors nearest to 1000 are 1026 and 513, but a model has at most 1024 heads.
    ({"model": "gpt", "hidden": "1026", "heads": "1000"}, "heads_divide", "heads"),
    ({"model": "cnn", "dataset": "text"}, "dataset_of_model", "dataset"),
    ({"model": "gpt", "dataset": "digits"}, "dataset_of_model", "dataset"),
    ({"global-batch": "2000"}, "batch_too_large", "global_batch"),
    ({"global-batch": "1440", "devices": "32"}, "batch_too_large", "global_batch"),
    ({"global-batch": "4096", "devices": "3", "dataset": "synthetic"}, "batch_too_large", "global_batch"),
    ({"mode": "pipeline", "global-batch": "3000"}, "batch_too_large", "global_batch"),
    ({"mode": "pipeline", "global-batch": "3000", "microbatches": "6"}, "batch_too_large", "global_batch"),
    ({"mode": "pipeline", "global-batch": "2000", "microbatches": "1600"}, "batch_too_large", "global_batch"),
    ({"mode": "tensor", "devices": "3"}, "devices_divide", "devices"),
    ({"mode": "tensor", "devices": "16384"}, "devices_divide", "devices"),
    ({"mode": "tensor", "model": "mlp", "hidden": "7"}, "devices_divide", "devices"),
    ({"mode": "tensor", "model": "gpt", "devices": "8"}, "devices_divide", "devices"),
    ({"mode": "sequence", "model": "gpt", "devices": "4", "context": "10"}, "devices_divide", "devices"),
    ({"mode": "tensor", "model": "gpt", "devices": "4", "ffn": "510"}, "devices_divide", "devices"),
    ({"mode": "tensor", "model": "gpt", "devices": "4", "kv-heads": "2"}, "devices_divide", "devices"),
    (
        {"mode": "hybrid", "model": "moe", "devices": "4", "tp": "4", "dense-layers": "1", "dense-ffn": "99"},
        "devices_divide",
        "tp",
    ),
    ({"mode": "sequence", "model": "cnn"}, "model_of_mode", "model"),
    ({"mode": "context", "model": "mlp"}, "model_of_mode", "model"),
    ({"mode": "context", "model": "gpt", "devices": "3"}, "context_divides", "devices"),
    ({"mode": "context", "model": "gpt", "devices": "64"}, "context_divides", "devices"),
    ({"mode": "context", "model": "gpt", "devices": "256", "context": "512"}, "ring_too_long", "devices"),
    ({"mode": "context", "model": "gpt", "devices": "8", "attention": "ulysses"}, "heads_of_ulysses", "devices"),
    ({"mode": "context", "model": "gpt", "attention": "ulysses", "balance": "head_tail"}, "does_not_apply", "balance"),
    ({"mode": "sequence", "model": "gpt", "attention": "ring"}, "does_not_apply", "attention"),
    ({"mode": "expert", "model": "gpt"}, "model_of_mode", "model"),
    ({"mode": "expert", "model": "moe", "devices": "3", "global-batch": "48"}, "devices_divide", "devices"),
    ({"mode": "expert", "model": "moe", "devices": "4", "experts": "6"}, "devices_divide", "devices"),
    ({"model": "moe", "experts": "2", "top-k": "3"}, "top_k_of_experts", "top_k"),
    ({"mode": "single", "devices": "2"}, "devices_of_mode", "devices"),
    ({"steps": "3", "epochs": "2"}, "exclusive", "steps"),
    ({"fault": "raise@2:1"}, "bad_fault", "fault"),
    ({"fault": "raise@1:20"}, "bad_fault", "fault"),
    ({"fault": "model@1:2"}, "bad_fault", "fault"),
    ({"mode": "single", "devices": "1", "fault": "alone@0:1"}, "fault_with_peers", "fault"),
    ({"fault": "mean@1:0", "model": "gpt"}, "fault_of_targets", "fault"),
    ({"mode": "tensor", "model": "gpt", "masked": "0.5", "fault": "mean@1:0"}, "fault_of_targets", "fault"),
    ({"fault": "slow@12:3:0.5", "devices": "8"}, "bad_fault", "fault"),
    ({"model": "gpt", "context": "1000000"}, "no_data", "context"),
    ({"data-dir": "/nowhere/at/all"}, "no_data", "data_dir"),
    ({"model": "gpt", "data-dir": "x"}, "does_not_apply", "data_dir"),
]
MALFORMED = [
    ({"devices": "four"}, "wrong_type", "devices"),
    ({"devices": "4.0"}, "wrong_type", "devices"),
    ({"devices": ""}, "wrong_type", "devices"),
    ({"devices": "9" * 5000}, "wrong_type", "devices"),
    ({"lr": "fast"}, "wrong_type", "lr"),
    ({"record": "maybe"}, "wrong_type", "record"),
    ({"mode": "pipeline", "split": "2,,2"}, "wrong_type", "split"),
    ({"mode": "pipeline", "split": "2;2"}, "wrong_type", "split"),
    ({"deviecs": "4"}, "unknown_setting", "deviecs"),
    ({"global-batch": "32", "global_batch": "64"}, "given_twice", "global_batch"),
]
BAD_FAULTS = ["raise", "raise@1", "raise@1:x", "raise@-1:3", "sleep@1:3", "RAISE@1:3", "@1:3", "raise@1:3:1"]
BAD_FAULTS += ["slow@1:3", "slow@1:3:99", "slow@1:3:-1", "slow@1:3:nan", "slow@1:3:inf"]
MALFORMED += [({"fault": text}, "bad_fault", "fault") for text in BAD_FAULTS]
MALFORMED += [({"resume": text}, "bad_resume", "resume") for text in ("../x", "a b", "run:x")]
MALFORMED += [
    ({"resume": "run:20", "steps": "20"}, "resume_ends", "steps"),
    ({"resume": "run:50", "epochs": "2"}, "resume_ends", "epochs"),
]
MALFORMED += [
    ({"mode": "pipeline", "schedule": "zb_h2", "compile-stage": "torch_compile"}, "compile_halves", "compile_stage"),
]
ORDER = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"  # two ranks, a stage each, two microbatches
FILED = {"mode": "pipeline", "schedule-file": ORDER}
MALFORMED += [
    (FILED | {"devices": "4"}, "of_schedule_file", "devices"),
    (FILED | {"microbatches": "4"}, "of_schedule_file", "microbatches"),
    (FILED | {"stages-per-rank": "2"}, "of_schedule_file", "stages_per_rank"),
    (FILED | {"global-batch": "63"}, "batch_of_schedule_file", "global_batch"),
    (FILED | {"schedule": "gpipe"}, "exclusive", "schedule"),
    (FILED | {"schedule-file": "0F0,0B0\n1F0,1F0"}, "bad_schedule_file", "schedule_file"),
    (
        {"mode": "pipeline", "devices": "1", "schedule-file": "0F0,1F0,2F0,3F0,4F0,4B0,3B0,2B0,1B0,0B0"},
        "stages_of_schedule_file",
        "schedule_file",
    ),
]
CASES = RANGES + NAMES + JOINED + MALFORMED


def refusal(settings: dict[str, str]) -> SpecError:
    with pytest.raises(SpecError) as refused:
        prepare(Spec.from_params(settings))
    return refused.value


@pytest.mark.parametrize(("settings", "code", "setting"), CASES, ids=lambda value: str(value)[:60])
def test_a_wrong_setting_is_refused_with_its_rule_and_value(settings, code, setting):
    error = refusal(settings)
    assert (error.code, error.setting) == (code, setting)
    sentence = RULES[code].format_map(error.values)
    assert str(error).startswith(sentence)
    assert isinstance(error, ValueError)
    if code != "unknown_setting":  # there the name is what is wrong
        assert error.values["value"] in str(error)


@pytest.mark.parametrize(("settings", "code", "setting"), CASES, ids=lambda value: str(value)[:60])
def test_every_value_that_is_suggested_works(settings, code, setting):
    """Put in the place of the wrong one, it makes a job: the person who follows the advice is done."""
    error = refusal(settings)
    for value in error.suggest:
        if code == "unknown_setting":
            assert value in {field.name for field in dataclasses.fields(Spec)}
            continue
        name = setting if setting in settings else setting.replace("_", "-")
        better = settings | {name: str(value)}
        if code == "batch_of_schedule":  # whatever microbatches was: none would do
            better.pop("microbatches", None)
        try:
            prepare(Spec.from_params(better))
        except SpecError as still:
            # Another name may need other settings beside it: this one at least is right.
            assert code == "unknown_name" and (still.code, still.setting) != (code, setting), better


def test_there_is_a_suggestion_wherever_one_value_is_out_of_place():
    """No value can stand for a number that is none, or a text that is no number. Else there is a nearest one."""
    for settings, code, _ in CASES:
        if code in ("out_of_range", "unknown_name", "unknown_setting", "split_sum", "heads_divide", "dataset_of_model"):
            assert refusal(settings).suggest, settings
    assert refusal({"devices": "3"}).suggest == (63, 66)
    assert refusal({"devices": "100"}).suggest == (100,)
    assert refusal({"mode": "pipeline", "devices": "4", "microbatches": "5"}).suggest == (4, 8, 16)
    assert refusal({"mode": "pipeline", "devices": "4", "microbatches": "2"}).suggest == (4, 8, 16)
    assert refusal({"mode": "pipeline", "devices": "5"}).suggest == (4,)
    assert refusal({"mode": "pipeline", "devices": "4", "global-batch": "3"}).suggest == (4, 5, 6)
    assert refusal({"fault": "slow@12:3:0.5", "devices": "8"}).suggest == ("slow@7:3:0.5",)
    assert refusal({"deviecs": "4"}).suggest[0] == "devices"
    assert refusal({"optimizer": "adam"}).suggest == ("adamw",)


def test_sentences_read_as_a_person_would_say_them():
    assert str(refusal({"devices": "0"})) == "devices must be between 1 and 16384; it is 0. Try: 1."
    assert (
        str(refusal({"devices": "3"}))
        == "global-batch must be divisible by the number of devices (3); it is 64. Try: 63, 66."
    )
    assert str(refusal({"lr": "nan"})) == "lr must be a finite number; it is nan."
    assert str(refusal({"mode": "pipeline", "split": "1,1"})) == (
        "split must give each of the 2 stages at least one layer and add up to the model's 4 layers; it is [1, 1]. "
        "Try: 2,2."
    )


def test_every_rule_that_a_spec_can_break_is_among_the_cases():
    files = [*ROOT.glob("engine/asking/*.py"), *(ROOT / f"engine/{name}.py" for name in ("spec", "job", "checkpoints"))]
    source = "".join(path.read_text() for path in files)
    raised = set(re.findall(r'SpecError\(\s*"(\w+)"', source)) | SENTENCES.keys()
    elsewhere = {"not_json", "no_file", "no_gpu", "more_ranks_than_gpus", "cannot_run_here", "planned_only"}  # below
    elsewhere |= {"blocked_on_gpus", "no_compiler"}  # in test_schedule_file.py
    elsewhere |= {"bad_leave_out", "left_out_by_all", "unused_parameters"}  # in test_unused.py
    elsewhere |= {"slow_is_simulated", "planned_model", "expert_tp_of_tp"}  # in test_slow, _presets, _whole_experts.py
    elsewhere |= {"no_checkpoint", "resume_differs", "resume_parameters", "damaged_checkpoint"}  # in test_checkpoint.py
    elsewhere |= {"whole_experts"}  # in test_whole_experts.py
    assert raised - elsewhere == {code for _, code, _ in CASES}
    assert raised <= RULES.keys()


# Names


def test_a_machine_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(SpecError) as refused:
        machine("h10")
    assert "h100" in refused.value.suggest
    assert all(machine(name).name == name for name in refused.value.suggest)
    with pytest.raises(SpecError) as refused:
        machine("")
    assert set(refused.value.suggest) == set(MACHINES)


def test_closest_names_come_best_first_and_all_of_few_when_none_is_alike():
    assert closest("pipelines", MODES)[0] == "pipeline"
    assert closest("zzz", ("a", "b")) == ["a", "b"]
    assert closest("zzz", [str(i) for i in range(17)]) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, None),
        ("raise@1:3", Fault("raise", 1, 3)),
        ("kill@0:0", Fault("kill", 0, 0)),
        ("slow@1:3:0.2", Fault("slow", 1, 3, 0.2)),
    ],
)
def test_a_fault_is_a_kind_a_rank_and_a_step(text, fault):
    assert parse_fault(text) == fault
