"""The recorded runs that come with Lockstep: small, free of their machine, still what would be planned, and shown."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from bench.gallery import KEPT, SPECS
from engine import archive, modes
from engine.job import prepare
from engine.outcome.conform import conform
from engine.timeline import Timeline
from tests.app.reading import query, words

GALLERY = archive.RUNS / archive.GALLERY


def test_the_gallery_has_the_runs_that_are_meant_to_be_in_it():
    assert {run["run_id"] for run in archive.list_runs(GALLERY)} == SPECS.keys()
    assert [archive.read_spec(GALLERY / name).mode for name in SPECS] == ["ddp", "pipeline", "fsdp"]


@pytest.mark.parametrize("name", SPECS)
def test_a_recorded_run_is_small_and_names_no_place_of_the_machine_that_ran_it(name: str):
    files = list((GALLERY / name).iterdir())
    assert {file.name for file in files} == {*KEPT}
    assert sum(file.stat().st_size for file in files) < 200_000
    for file in files:
        assert not re.search(rb"/(?:work|home|root|tmp|Users|var)/", file.read_bytes()), file.name


@pytest.mark.parametrize("name", SPECS)
def test_a_recorded_run_proved_itself_and_is_what_would_be_planned_today(name: str):
    """If this fails, what a mode plans or a run writes has changed: `python -m bench.gallery` records it again."""
    job, timeline = prepare(archive.read_spec(GALLERY / name)), Timeline.load(GALLERY / name / "timeline.parquet")
    result = archive.read_result(GALLERY / name)
    assert result["status"] == "finished" and result["parity"]["ok"] and result["conformance"]["ok"]
    report, _ = conform(timeline.spans(), lambda step: modes.plan(job, step), timeline.steps)
    assert report["ok"], report["first_difference"]
    assert report["planned"] == result["conformance"]["planned"]


@pytest.mark.parametrize("name", SPECS)
def test_the_lab_leads_to_the_recorded_run_of_a_mode_and_shows_it(
    lab: Callable[..., AppTest], runs_dir: Path, name: str
):
    shutil.copytree(GALLERY, runs_dir / archive.GALLERY)
    app = lab(f"mode={SPECS[name].mode}")
    app.button(key="recorded").click().run()
    assert not app.exception
    assert query(app)["run"] == name
    said = words(app)
    assert ":green-badge[:material/check: equal]" in said and ":green-badge[:material/check: as planned]" in said
    assert app.segmented_control(key="view").value == "measured"
    # No word on how well this machine's prediction fits another machine's times.
    assert "Time by kind of op" not in said
    assert "Recorded on another machine" in said and "badge[prediction" not in said and "oversubscribed" not in said
    assert "recorded" not in [button.key for button in app.button]


def test_a_mode_without_a_recorded_run_offers_none(lab: Callable[..., AppTest], runs_dir: Path):
    shutil.copytree(GALLERY, runs_dir / archive.GALLERY)
    assert "recorded" not in [button.key for button in lab("mode=tensor").button]
