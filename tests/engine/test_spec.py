"""What a person sets is taken as meant, or refused with the rule, the value, and values that work; nothing between."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine import job as jobs
from engine.cost.machine import MACHINES, machine
from engine.faults import Fault, parse_fault
from engine.job import prepare, prepare_real
from engine.rules import RULES, SpecError, closest
from engine.schedules.rules import SENTENCES
from engine.settings import MODE_MODELS, MODE_SETTINGS, MODEL_DEFAULTS, applies
from engine.spec import MODELS, MODES, Spec, type_of

ROOT = Path(__file__).parents[2]

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
    ({"sync-every-microstep": "1", "accumulate": "2", "compress": "powersgd"}, "exclusive", "sync_every_microstep"),
    ({"compress": "fp16", "compress-rank": "2"}, "does_not_apply", "compress_rank"),
    ({"model": "moe", "precision": "bf16"}, "option_of_model", "precision"),
    ({"model": "mlp", "recompute": "selective"}, "nothing_to_recompute", "recompute"),
    ({"mode": "pipeline", "accumulate": "2"}, "option_of_mode", "accumulate"),
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
    (
        {"mode": "pipeline", "devices": "4", "microbatches": "3", "schedule": "gpipe"},
        "batch_by_microbatches",
        "microbatches",
    ),
    (
        # No microbatches at all are enough for so many stages: then none may be suggested.
        {"mode": "pipeline", "model": "gpt", "layers": "100", "devices": "102", "microbatches": "100"},
        "batch_by_microbatches",
        "microbatches",
    ),
    ({"mode": "pipeline", "devices": "4", "microbatches": "2"}, "too_few_microbatches", "microbatches"),
    ({"mode": "pipeline", "devices": "3", "microbatches": "1"}, "too_few_microbatches", "microbatches"),
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
    ({"mode": "pipeline", "schedule": "zbv", "split": "2,2"}, "split_sum", "split"),
    ({"mode": "pipeline", "split": "1,1"}, "split_sum", "split"),
    ({"mode": "pipeline", "split": "4"}, "split_sum", "split"),
    ({"mode": "layer_split", "split": "0,4"}, "split_sum", "split"),
    ({"mode": "layer_split", "split": "5,-1"}, "split_sum", "split"),
    ({"mode": "layer_split", "devices": "3", "split": "2,2"}, "split_sum", "split"),
    ({"model": "gpt", "heads": "5"}, "heads_divide", "heads"),
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
    ({"mode": "sequence", "model": "cnn"}, "model_of_mode", "model"),
    ({"mode": "context", "model": "mlp"}, "model_of_mode", "model"),
    ({"mode": "context", "model": "gpt", "devices": "3"}, "context_divides", "devices"),
    ({"mode": "context", "model": "gpt", "devices": "64"}, "context_divides", "devices"),
    ({"mode": "context", "model": "gpt", "devices": "256", "context": "512"}, "ring_too_long", "devices"),
    ({"mode": "context", "model": "gpt", "devices": "8", "attention": "ulysses"}, "heads_of_ulysses", "devices"),
    ({"mode": "context", "model": "gpt", "attention": "ulysses", "balance": "head_tail"}, "does_not_apply", "balance"),
    ({"mode": "sequence", "model": "gpt", "attention": "ring"}, "does_not_apply", "attention"),
    ({"mode": "expert", "model": "gpt"}, "model_of_mode", "model"),
    ({"mode": "tensor", "model": "moe"}, "model_of_mode", "model"),
    ({"mode": "expert", "model": "moe", "devices": "3", "global-batch": "48"}, "devices_divide", "devices"),
    ({"mode": "expert", "model": "moe", "devices": "4", "experts": "6"}, "devices_divide", "devices"),
    ({"model": "moe", "experts": "2", "top-k": "3"}, "top_k_of_experts", "top_k"),
    ({"mode": "single", "devices": "2"}, "devices_of_mode", "devices"),
    ({"steps": "3", "epochs": "2"}, "exclusive", "steps"),
    ({"fault": "raise@2:1"}, "bad_fault", "fault"),
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
    ({"global-batch": "32", "global_batch": "64"}, "exclusive", "global_batch"),
]
BAD_FAULTS = ["raise", "raise@1", "raise@1:x", "raise@-1:3", "hang@1:3", "RAISE@1:3", "@1:3", "raise@1:3:1"]
BAD_FAULTS += ["slow@1:3", "slow@1:3:99", "slow@1:3:-1", "slow@1:3:nan", "slow@1:3:inf"]
MALFORMED += [({"fault": text}, "bad_fault", "fault") for text in BAD_FAULTS]
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
    source = "".join((ROOT / "engine" / name).read_text() for name in ("spec.py", "faults.py", "job.py", "checks.py"))
    raised = set(re.findall(r'SpecError\(\s*"(\w+)"', source)) | SENTENCES.keys()
    elsewhere = {"not_json", "no_file", "no_gpu", "more_ranks_than_gpus", "cannot_run_here", "planned_only"}  # below
    assert raised - elsewhere == {code for _, code, _ in CASES}
    assert raised <= RULES.keys()


# Settings that do not apply


def settings_that_do_not_apply() -> list[tuple[str, str, str]]:
    values = {"layers": "3", "hidden": "64", "heads": "4", "context": "32", "bucket-mb": "1", "split": "2,2"}
    values |= {"microbatches": "4", "schedule": "gpipe", "dp": "1", "fsdp": "1", "stages-per-rank": "4"}
    values |= {"experts": "4", "top-k": "4"}
    return [
        (mode, model, name)
        for mode in MODES
        for model in MODELS
        for name in values
        if not applies(name.replace("-", "_"), mode, model)
    ]


@pytest.mark.parametrize(("mode", "model", "name"), settings_that_do_not_apply())
def test_a_setting_that_means_nothing_here_is_refused_and_not_ignored(mode, model, name):
    value = {"schedule": "gpipe", "split": "2,2"}.get(name, "4")
    error = refusal({"mode": mode, "model": model, "devices": "1", name: value})
    setting = name.replace("-", "_")
    assert (error.code, error.setting) == ("does_not_apply", setting)
    whose = f"the model {model}" if setting in MODEL_DEFAULTS["moe"] else f"the mode {mode}"
    assert str(error).startswith(f"{name} does not apply to {whose}; it is ")


def test_what_applies_is_told_for_each_mode_and_model():
    assert applies("schedule", "pipeline", "cnn") and not applies("schedule", "layer_split", "cnn")
    assert applies("heads", "ddp", "gpt") and not applies("heads", "ddp", "mlp")
    assert applies("hidden", "ddp", "mlp") and applies("lr", "ddp", "cnn")
    assert not applies("bucket_mb", "pipeline", "cnn")


def test_of_two_settings_that_do_not_apply_the_same_one_is_named_every_time():
    code = "from engine import job, spec\ntry: job.prepare(spec.Spec(heads=2, hidden=8, context=9, layers=3))\n"
    code += "except spec.SpecError as error: print(error.setting)"
    said = set()
    for seed in ("1", "2", "3"):
        environment = {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        said.add(done.stdout)
    assert said == {"layers\n"}


# JSON


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("devices", True),
        ("devices", "4"),
        ("devices", 4.0),
        ("devices", None),
        ("devices", [4]),
        ("devices", {}),
        ("steps", False),
        ("lr", "0.1"),
        ("lr", True),
        ("record", 1),
        ("record", "true"),
        ("mode", 3),
        ("mode", ["ddp"]),
        ("model", None),
        ("data_dir", 7),
        ("split", "2,2"),
        ("split", 4),
        ("split", [2, 2.0]),
        ("split", [2, True]),
        ("split", [[2, 2]]),
        ("fault", 3),
    ],
)
def test_json_must_have_the_right_type(name, value):
    """True is no whole number, "4" is none, and neither is 4.0: whoever wrote it may have meant something else."""
    with pytest.raises(SpecError) as refused:
        Spec.from_dict({name: value})
    assert (refused.value.code, refused.value.setting) == ("wrong_type", name)
    with pytest.raises(SpecError):
        Spec(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("lr", 1), ("lr", 0), ("bucket_mb", 3)])
def test_a_whole_number_is_a_number(name, value):
    assert getattr(Spec.from_dict({name: value}), name) == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_number_is_finite(value):
    with pytest.raises(SpecError) as refused:
        Spec.from_dict({"lr": value})
    assert refused.value.code == "not_finite"


@pytest.mark.parametrize("values", [[], [1], "ddp", 4, None, True])
def test_a_spec_is_a_json_object(values):
    with pytest.raises(SpecError) as refused:
        Spec.from_dict(values)
    assert refused.value.code == "not_json"


def test_names_may_have_dashes_or_underscores_but_not_both():
    assert Spec.from_dict({"global-batch": 32}) == Spec.from_dict({"global_batch": 32}) == Spec(global_batch=32)
    assert Spec.from_params({"global_batch": "32"}) == Spec(global_batch=32)
    with pytest.raises(SpecError) as refused:
        Spec.from_dict({"global-batch": 32, "global_batch": 64})
    assert refused.value.code == "exclusive"


def test_an_unknown_key_is_refused_with_those_that_are_like_it():
    with pytest.raises(SpecError) as refused:
        Spec.from_dict({"mode": "ddp", "learning-rate": 0.1, "device_count": 4})
    assert refused.value.code == "unknown_setting"
    with pytest.raises(SpecError) as refused:
        Spec.from_dict({"micro_batches": 4})
    assert refused.value.suggest[0] == "microbatches"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "not_json"),
        (b"{", "not_json"),
        (b"[]", "not_json"),
        (b'"ddp"', "not_json"),
        (b"{'mode': 'ddp'}", "not_json"),
        (b'{"mode": "ddp",}', "not_json"),
        (b"[" * 100_000, "not_json"),
        (b'{"devices": 1' + b"0" * 5000 + b"}", "not_json"),
        (b"\xff\xfe\x00", "no_file"),
        (b'{"lr": NaN}', "not_finite"),
        (b'{"devices": 1e3}', "wrong_type"),
        (b'{"device": 4}', "wrong_type"),
        (b'{"devices": 0}', "out_of_range"),
        (b'{"divices": 4}', "unknown_setting"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_spec_file_that_is_none_is_refused_in_a_sentence(tmp_path, content, code):
    path = tmp_path / "spec.json"
    path.write_bytes(content)
    with pytest.raises(SpecError) as refused:
        Spec.from_file(path)
    assert refused.value.code == code
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("path", ["missing.json", ".", "a\0b", "x" * 5000])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, path):
    with pytest.raises(SpecError) as refused:
        Spec.from_file(f"{tmp_path}/{path}")
    assert refused.value.code == "no_file"


# There and back


def random_spec(draw: random.Random) -> Spec:
    """Any values that a Spec by itself takes."""
    values = {}
    for field in dataclasses.fields(Spec):
        limits = field.metadata
        if draw.random() < 0.5:
            continue
        if limits["choices"]:
            values[field.name] = draw.choice(limits["choices"])
        elif field.name == "split":
            values[field.name] = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 5)))
        elif field.name == "fault":
            values[field.name] = draw.choice(("raise@1:3", "slow@0:2:0.25", "gradient@3:0"))
        elif field.name == "data_dir":
            values[field.name] = draw.choice(("data", "a b", "数据/mnist", "x&y=z", "None"))
        elif field.name == "machine":
            values[field.name] = draw.choice(list(MACHINES))
        elif type_of(field)[0] is bool:
            values[field.name] = draw.random() < 0.5
        elif type_of(field)[0] is float:
            values[field.name] = draw.choice((limits["low"], limits["high"], draw.uniform(0.001, 1.0), 0.1, 1e-5))
        else:
            values[field.name] = draw.choice((limits["low"], limits["high"], limits["low"] + 1))
    return Spec(**values)


@pytest.mark.parametrize("seed", range(100))
def test_a_spec_comes_back_equal_from_its_url_and_from_its_json(seed):
    spec = random_spec(random.Random(seed))
    params = spec.to_params()
    assert Spec.from_params(params) == spec
    assert all(isinstance(text, str) and "_" not in name for name, text in params.items())
    assert Spec.from_dict(json.loads(json.dumps(spec.to_dict(), allow_nan=False))) == spec


def test_a_url_holds_only_what_differs_from_the_default():
    assert Spec().to_params() == {}
    spec = Spec(mode="pipeline", split=(2, 1, 1), lr=0.1, record=False, devices=2)
    assert spec.to_params() == {"mode": "pipeline", "split": "2,1,1", "lr": "0.1", "record": "false"}
    assert set(spec.to_dict()) == {field.name for field in dataclasses.fields(Spec)}


def test_a_spec_file_is_read_as_written(tmp_path):
    spec = Spec(mode="pipeline", devices=3, split=(2, 1, 1), data_dir="数据")
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.to_dict()), encoding="utf-8")
    assert Spec.from_file(path) == spec
    assert Spec.from_file(str(path)) != spec.with_(seed=1)


def test_an_empty_parameter_is_one_that_is_not_set():
    assert Spec.from_params({"steps": "", "data-dir": "", "split": ""}) == Spec()


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "on"])
def test_true_has_many_names(text):
    assert Spec.from_params({"record": text}).record is True
    assert Spec.from_params({"record": {"1": "0", "yes": "no", "on": "off"}.get(text, "False")}).record is False


def test_a_spec_cannot_be_changed_and_a_changed_copy_is_checked():
    spec = Spec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.devices = 4
    assert spec.with_(devices=4).devices == 4 and spec.devices == 2
    with pytest.raises(SpecError):
        spec.with_(devices=0)


# Jobs


@pytest.mark.parametrize(
    ("mode", "model"), [(mode, model) for mode in MODES for model in MODE_MODELS.get(mode, MODELS)]
)
def test_a_job_has_every_setting_that_applies_and_no_other(mode, model):
    devices = 1 if mode == "single" else 2
    resolved = prepare(Spec(mode=mode, model=model, devices=devices)).spec
    for settings, own in ((MODEL_DEFAULTS, model), (MODE_SETTINGS, mode)):
        for name in {name for of in settings.values() for name in of}:
            asked_for = ("clip", "compress_rank")  # these are nothing unless they are
            given = name in settings[own] and name not in asked_for
            assert (getattr(resolved, name) is not None) == given, name
    assert resolved.dataset is not None
    # So it can be stored, read and prepared again, and is the same.
    assert prepare(Spec.from_dict(json.loads(json.dumps(resolved.to_dict())))).spec == resolved


def test_a_batch_is_shared_over_replicas_and_not_over_stages():
    assert prepare(Spec(mode="ddp", devices=4)).local_batch == 16
    assert prepare(Spec(mode="data_parallel", devices=4)).local_batch == 16
    assert prepare(Spec(mode="pipeline", devices=4)).local_batch == 64
    assert prepare(Spec(mode="single", devices=1)).local_batch == 64


def test_epochs_are_as_many_steps_as_full_batches():
    """1,437 digits make 22 batches of 64 and one of 29, which is left out."""
    assert prepare(Spec(epochs=3)).steps == 66
    assert prepare(Spec(steps=7)).steps == 7
    assert prepare(Spec(epochs=3)).batches_per_epoch == 22


def test_stages_are_the_split_and_whole_without_one():
    names = [[layer.name for layer in stage] for stage in prepare(Spec(mode="pipeline", split=(1, 3))).stages]
    assert names == [["conv1"], ["conv2", "fc1", "fc2"]]
    assert len(prepare(Spec(mode="ddp")).stages) == 1


@pytest.mark.parametrize(("devices", "schedule", "expected"), [(2, "1f1b", 4), (4, "1f1b", 8), (3, "gpipe", 8)])
def test_without_microbatches_there_are_twice_as_many_as_stages_or_the_next_that_divides(devices, schedule, expected):
    assert prepare(Spec(mode="pipeline", devices=devices, schedule=schedule)).spec.microbatches == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", 1), ("zb_h2", 1), ("looped_bfs", 2), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipe", 2)],
)
def test_a_device_has_as_many_stages_as_its_schedule_is_for(schedule, expected):
    spec = Spec(mode="pipeline", schedule=schedule, model="mlp", layers=7)
    job = prepare(spec)
    assert job.spec.stages_per_rank == expected
    # DualPipe's two stages a device are of two copies of the model: two stages in each.
    assert len(job.stages) == 2 * expected
    assert len(job.spec.split) == (2 if schedule == "dualpipe" else 2 * expected)


def test_the_stages_of_dualpipe_are_two_copies_of_the_model():
    stages = prepare(Spec(mode="pipeline", schedule="dualpipe", split=(1, 3))).stages
    names = [[layer.name for layer in stage] for stage in stages]
    assert names == [["conv1"], ["conv2", "fc1", "fc2"]] * 2


def test_what_runs_in_one_process_says_so():
    assert prepare(Spec(mode="data_parallel", devices=4)).processes == 1
    assert prepare(Spec(mode="ddp", devices=4)).processes == 4


# Real runs


@pytest.mark.parametrize(
    ("settings", "gpus", "code", "suggest"),
    [
        ({"device": "cuda"}, 0, "no_gpu", ("cpu",)),
        ({"devices": 4, "device": "cuda"}, 2, "more_ranks_than_gpus", (2,)),
        ({"devices": 4}, 2, "more_ranks_than_gpus", (2,)),
        ({"devices": 8}, 3, "more_ranks_than_gpus", (2,)),  # 64 samples cannot be shared by 3
        ({"devices": 4, "mode": "pipeline"}, 3, "more_ranks_than_gpus", (3,)),
        # 12 samples can be shared by 3, and 8 experts cannot.
        ({"devices": 4, "mode": "expert", "model": "moe", "global_batch": 12}, 3, "more_ranks_than_gpus", (2,)),
        ({"devices": 128, "global_batch": 128}, 0, "cannot_run_here", (64,)),
        ({"devices": 100, "global_batch": 100}, 0, "cannot_run_here", (50,)),
    ],
)
def test_what_this_machine_cannot_run_is_refused_with_what_it_can(monkeypatch, settings, gpus, code, suggest):
    monkeypatch.setattr(jobs, "count_gpus", lambda: gpus)
    with pytest.raises(SpecError) as refused:
        prepare_real(Spec(**settings))
    assert (refused.value.code, refused.value.suggest) == (code, suggest)
    for value in suggest:
        prepare_real(Spec(**(settings | {refused.value.setting: value})))


REAL = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


@pytest.mark.parametrize(
    ("settings", "suggest"),
    [
        ({"schedule": "zb_h2"}, REAL),
        ({"schedule": "dualpipe"}, REAL),
        ({"schedule": "zb_h2", "devices": 4}, ("gpipe", "1f1b")),  # the cnn has four layers
        ({"schedule": "dualpipe", "microbatches": 4, "devices": 2, "stages_per_rank": 2}, REAL[2:]),
        ({"schedule": "zb_h2", "microbatches": 1}, ("gpipe", *REAL[2:6])),  # 1f1b and dualpipev need more
    ],
)
def test_a_schedule_that_pytorch_lacks_is_planned_and_not_run(settings, suggest):
    spec = Spec(mode="pipeline", **settings)
    prepare(spec)
    with pytest.raises(SpecError) as refused:
        prepare_real(spec)
    assert (refused.value.code, refused.value.setting, refused.value.suggest) == ("planned_only", "schedule", suggest)
    assert settings["schedule"] in str(refused.value)
    for name in suggest:
        prepare_real(spec.with_(schedule=name))


@pytest.mark.parametrize(
    ("asked", "gpus", "given"), [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")]
)
def test_a_real_run_is_on_gpus_where_there_are_any_unless_asked_otherwise(monkeypatch, asked, gpus, given):
    monkeypatch.setattr(jobs, "count_gpus", lambda: gpus)
    assert prepare_real(Spec(device=asked)).spec.device == given


def test_gpus_are_counted_without_those_that_are_hidden(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0"), Path("/dev/nvidia1"), Path("/dev/nvidiactl")])
    for visible, count in ((None, 2), ("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 2)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert jobs.count_gpus() == count


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
    assert closest("zzz", [str(i) for i in range(13)]) == []


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
