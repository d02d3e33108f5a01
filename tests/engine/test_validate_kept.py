"""The report that is shipped: small, from a command, and its errors are those of its own rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from engine.__main__ import main
from engine.cost.catalogue import MACHINES
from engine.validate import kept, spec_of
from engine.validate.sample import again
from engine.validate.targets import AIMS, WHY, explained
from tests.engine.test_validate_reading import entry

ROUNDED = 1e-4  # each number has five digits


def errors(rows: list[kept.Row]) -> list[float]:
    return [row.predicted_seconds / row.measured_seconds - 1 for row in rows]


def timed(rows) -> list[kept.Row]:
    return [row for row in rows if row.measured_seconds is not None]


def held_to_its_rows(found: kept.Kept) -> None:
    for each in [one for one in found.report["sets"] if one["time"]]:
        rows = timed(row for row in found.rows if row.set == each["set"])
        rows = rows if each["fitted"] else [row for row in rows if not row.fitted]
        if routed := each["time_of_experts"]:
            of_experts = [row for row in rows if not row.dense]
            assert len(of_experts) == routed["rows"]
            assert mean(map(abs, errors(of_experts))) == pytest.approx(routed["mape"], abs=ROUNDED)
            rows = [row for row in rows if row.dense]
        assert len(rows) == each["time"]["rows"]
        assert mean(map(abs, errors(rows))) == pytest.approx(each["time"]["mape"], abs=ROUNDED)
        assert mean(errors(rows)) == pytest.approx(each["time"]["bias"], abs=ROUNDED)
        floor = [row.floor_seconds / row.measured_seconds - 1 for row in rows]
        assert mean(map(abs, floor)) == pytest.approx(each["time"]["floor_mape"], abs=ROUNDED)
    for dense, name in ((True, "overall"), (False, "overall_experts")):
        of_all = timed(row for row in found.rows if row.dense == dense and not row.weak and not row.fitted)
        assert len(of_all) == (found.report[name] or {"rows": 0})["rows"]
        if of_all:
            assert mean(map(abs, errors(of_all))) == pytest.approx(found.report[name]["mape"], abs=ROUNDED)


def test_what_is_shipped_is_small_and_says_when_and_how_it_was_made_and_names_no_place():
    text = kept.SHIPPED.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    made = kept.read().made
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["on"]) and re.fullmatch("[0-9a-f]{64}", made["sha256"])
    assert (
        made["command"].startswith("python -m engine validate ")
        and "--save engine/data/validated.json" in made["command"]
    )
    assert not re.search(r"/(?:work|home|root|tmp|Users|var)/", text)


def test_every_error_that_is_shipped_follows_from_the_rows_that_are():
    held_to_its_rows(kept.read())


def now_and_then(found: kept.Kept) -> dict[str, tuple]:
    """Row of the sample -> what the code predicts now, and what is kept."""
    rows = {row.id: row for row in found.rows}
    return {
        name: (
            (kept.rounded(now.seconds), kept.rounded(now.held(rows[name].memory_kind))),
            (rows[name].predicted_seconds, rows[name].predicted_memory),
        )
        for name, now in again(found.sample)
    }


def test_what_is_shipped_is_what_the_code_predicts_now():
    """Else it is older than the cost model, the plans or the reading of rows: run the command that it names again."""
    found = kept.read()
    assert {row.set for row in found.rows} == {entry["group"] for entry in found.sample}
    both = now_and_then(found)
    assert len(both) == len(found.sample)
    assert {name: now for name, (now, _) in both.items()} == {name: then for name, (_, then) in both.items()}


def test_a_machine_that_is_a_thousandth_slower_makes_what_is_shipped_old(monkeypatch):
    slower = {
        name: known if known.unit else replace(known, flop_rate=known.flop_rate * 0.999)
        for name, known in MACHINES.items()
    }
    monkeypatch.setattr(spec_of, "MACHINES", slower)
    found = kept.read()
    cheap = found._replace(sample=found.sample[:8])
    assert all(now[0] != then[0] for now, then in now_and_then(cheap).values())


def test_a_prediction_that_was_changed_by_hand_is_found():
    found = kept.read()
    first, *rest = found.rows
    with pytest.raises(AssertionError):
        held_to_its_rows(found._replace(rows=(first._replace(predicted_seconds=2 * first.predicted_seconds), *rest)))


def test_every_row_that_is_shipped_names_its_source_and_every_count_adds_up():
    found = kept.read()
    assert all(row.source for row in found.rows)
    assert len({row.id for row in found.rows}) == len(found.rows)
    report = found.report
    calls = sum(each["collectives"]["rows"] for each in report["sets"] if each["collectives"])
    assert len(found.rows) + calls == report["used"] == sum(each["used"] for each in report["sets"])
    assert report["used"] + report["not_used"] == report["entries"]
    assert {aim["aim"] for aim in report["targets"]} == AIMS.keys()
    assert all(aim["met"] == (aim["value"] <= aim["limit"]) for aim in report["targets"])
    assert all(aim["because"] is None for aim in report["targets"] if aim["met"])


def test_the_command_keeps_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture):
    measured, saved = tmp_path / "measured.json", tmp_path / "validated.json"
    slow = {"metrics": [{"name": "iteration_time_s", "value": 3.0, "unit": "s"}]}
    measured.write_text(json.dumps({"entries": [entry(), entry(id="b", **slow), entry(id="c", batch={"micro": None})]}))
    assert main(["validate", str(measured), "--save", str(saved), "--json"]) == 0
    printed, found = json.loads(capsys.readouterr().out), kept.read(saved)
    assert "rows" not in printed
    assert found.made["command"] == "python -m engine validate measured.json --save validated.json"
    assert [(row.id, row.measured_seconds, row.source) for row in found.rows] == [
        ("a", 1.5, "a paper"),
        ("b", 3, "a paper"),
    ]
    assert found.report["sets"][0]["not_used"] == [{"reason": "not published: size of a micro-batch", "rows": 1}]
    assert found.report["overall"]["mape"] == pytest.approx(printed["overall"]["mape"], rel=ROUNDED)
    held_to_its_rows(found)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"entries": [entry()]}))
    assert main(["validate", str(measured), "--save", str(tmp_path / "no" / "where.json")]) == 2
    assert "where.json" in capsys.readouterr().err


def test_a_reason_is_said_in_the_words_that_are_given():
    because = {"code": "property", "share": 0.512, "property": "micro-batch", "mean_error": {"1": -0.24, "2": 0.01}}
    expected = "51.2 % of the errors' variance goes with micro-batch (1: -24 %, 2: +1 %)"
    assert explained(because) == expected
    assert explained(because, {"property": "{property}: {parts}"}) == "micro-batch: 1: -24 %, 2: +1 %"
    assert explained({"code": "sets", "points": {"b200": 0.0042}}) == WHY["sets"].format(parts="b200 0.4")
