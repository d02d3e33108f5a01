"""A spec or a run -> one page that plays without a network, or one line that says what is wrong."""

import json
import re
from pathlib import Path

import pytest

from engine import modes
from engine.cost.machine import machine
from engine.job import prepare
from engine.simulation import simulate
from engine.spec import Spec
from viz import export


def test_export_writes_the_picture_of_a_spec(tmp_path):
    spec, page = tmp_path / "spec.json", tmp_path / "page.html"
    spec.write_text(json.dumps(Spec(mode="ddp", devices=3, global_batch=63, machine="h100").to_dict()))
    assert export.main([str(spec), "--output", str(page), "--language", "zh"]) == 0
    assert "<title>Lockstep：ddp，3 个设备</title>" in page.read_text(encoding="utf-8")


def test_export_draws_what_a_run_measured(tmp_path):
    job = prepare(Spec(mode="layer_split", devices=2))
    (tmp_path / "spec.json").write_text(json.dumps(job.spec.to_dict()))
    timeline = simulate(modes.plan(job), machine("unit")).timeline
    timeline.save(tmp_path / "timeline.parquet")
    page = Path(export.export(tmp_path, tmp_path / "page.html")).read_text(encoding="utf-8")
    payload = json.loads(re.search(r'id="payload">(.*?)</script>', page)[1])
    assert payload["end"] * payload["unit"][0] == pytest.approx(timeline.makespan)
    assert not any(payload["spans"]["veiled"])


@pytest.mark.parametrize(("source", "says"), [("missing.json", "cannot be read"), ("spec.json", "cannot be written")])
def test_export_says_in_one_line_what_is_wrong(tmp_path, capsys, source, says):
    (tmp_path / "spec.json").write_text(json.dumps({"mode": "ddp"}))
    assert export.main([str(tmp_path / source), "--output", str(tmp_path / "no" / "page.html")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and says in err and err.count("\n") == 1
