"""Every mode can be planned at many sizes, which is recorded; and the README's table has what tests record, no more."""

from __future__ import annotations

import pytest

from engine.asking.rules import SpecError
from engine.asking.settings import MODE_MODELS
from engine.predict import predict
from engine.spec import MODES, Spec
from tests import table
from tests.engine.proof import planned

SIZES = (1, 2, 4, 8, 64)
# A model that can be cut into that many stages, heads, parts of a context and rows.
LARGE = {"model": "gpt", "layers": 64, "hidden": 128, "heads": 64, "context": 64, "dataset": "synthetic"}


@pytest.mark.proof
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_planned_for_many_ranks(mode):
    """Planned, matched (every message has its other end) and simulated, which finds a deadlock."""
    found = []
    large = LARGE if "gpt" in MODE_MODELS.get(mode, ("gpt",)) else LARGE | {"model": "moe", "experts": 64}
    for devices in SIZES:
        try:
            prediction = predict(Spec(mode=mode, devices=devices, global_batch=128, machine="h100", **large))
        except SpecError as refused:
            assert refused.setting in ("devices", "dp", "fsdp", "tp", "cp", "pp", "ep"), refused
            continue
        planned(prediction)
        found.append(devices)
    assert found == [1] if mode == "single" else len(found) > 1


def test_the_readme_has_a_row_for_every_mode_and_each_claims_all_or_says_how_many():
    head, line, *rows = table.in_readme().splitlines()
    assert head == table._row(table.HEAD)
    assert [row.split("|")[1].strip() for row in rows] == [f"`{mode}`" for mode in MODES]
    assert all(row.count("|") == line.count("|") for row in rows)


def test_a_table_counts_what_was_recorded_and_nothing_else():
    run = {"what": "run", "mode": "ddp", "model": "mlp", "conformance": True, "parity": True}
    records = [run | {"devices": n} for n in (8, 1, 2, 3)] + [run | {"devices": 3, "parity": False, "model": "cnn"}]
    records += [{"what": "plan", "mode": "fsdp", "devices": 1024}, run | {"devices": 2, "conformance": None}]
    rows = {row.split("|")[1].strip("` "): row for row in table.table(records).splitlines()[2:]}
    assert list(rows) == list(MODES)
    assert rows["ddp"] == "| `ddp` | - | 1-3, 8 ranks | `cnn`, `mlp` | 5 of 6 runs | 5 of 6 runs |"
    assert rows["fsdp"] == "| `fsdp` | 1024 ranks | - | - | - | - |"
    assert rows["single"] == "| `single` | - | - | - | - | - |"
