"""A spec in its other forms (JSON, a file, a URL): read as meant or refused, and equal when it comes back."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from engine.asking.rules import SpecError
from engine.asking.values import type_of
from engine.cost.machine import MACHINES
from engine.spec import Spec


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
        ("machine", None),
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
    assert refused.value.code == "given_twice"


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


EXAMPLES = {
    "slow_rank": ("0:2", "5:2,9:1.5"),
    "slow_link": ("3-4:10", "0-1:1.5,2-3:4"),
    "paced": ("h100", "unit"),
    "freeze": ("embed", "embed,block1"),
    "leave_out": ("0:block1", "0:block1,1:block2"),
}


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
        elif field.name in EXAMPLES:
            values[field.name] = draw.choice(EXAMPLES[field.name])
        elif field.name == "resume":
            values[field.name] = draw.choice(("20260101-120000-ddp2-abcd", "run:6", "last"))
        elif field.name == "schedule_file":
            values[field.name] = draw.choice(("0F0,0B0\n", "0F0,0B0\n1F0,1B0\n"))
        elif field.name == "data_dir":
            values[field.name] = draw.choice(("data", "a b", "数据/mnist", "x&y=z", "None"))
        elif field.name in ("machine", "paced"):
            values[field.name] = draw.choice(list(MACHINES))
        elif field.name in ("slow_rank", "slow_link"):
            values[field.name] = {"slow_rank": "5:2,9:1.5", "slow_link": "3-4:10"}[field.name]
        elif type_of(field)[0] is bool:
            values[field.name] = draw.random() < 0.5
        elif type_of(field)[0] is float:
            low, high = limits["low"], limits["high"]
            values[field.name] = draw.choice(
                (low, high, *(min(high, low + part) for part in (draw.uniform(0.001, 1.0), 0.1, 1e-5)))
            )
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
