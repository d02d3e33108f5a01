"""The list of runs without a browser: what it tells of each run, deleting, the recorded ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from engine import archive
from engine.spec import Spec
from tests.app.reading import charts


def page(runs_dir: str) -> None:
    """The app, opened at the list of runs."""
    from pathlib import Path

    import streamlit as st

    from viz.pages import runs

    lab = st.Page(lambda: None, title="Lab", url_path="lab")
    listed = st.Page(lambda: runs.show(Path(runs_dir), lab), title="Runs", url_path="runs", default=True)
    st.navigation([listed, lab]).run()


@pytest.fixture
def listed(runs_dir: Path) -> Callable[..., AppTest]:
    return lambda: AppTest.from_function(page, args=(str(runs_dir),), default_timeout=30).run()


def words(app: AppTest) -> str:
    return "\n".join(part.value for part in [*app.markdown, *app.caption])


def test_an_empty_list_says_so(listed: Callable[..., AppTest]):
    app = listed()
    assert not app.exception
    assert "No runs yet" in words(app)
    assert [link.proto.label for link in app.get("page_link")] == ["Start one in the lab"]


def test_each_run_is_told_with_what_it_proved(listed: Callable[..., AppTest], record: Callable[..., Path]):
    record(Spec(mode="pipeline", devices=4, microbatches=4, machine="unit"))
    record(Spec(model="mlp"), state="failed", error=archive.no_place("boom"), parity={"ok": False})
    app = listed()
    said = words(app)
    assert "Pipeline parallel × 4" in said and "42 s" in said
    assert "Distributed data parallel × 2" in said and "MLP" in said
    assert said.count(":green-badge[:material/check: equal]") == 1
    assert said.count(":green-badge[:material/check: as planned]") == 2
    assert said.count(":red-badge[:material/close: differs]") == 1
    assert ":red-badge[Failed]" in said


def test_ticked_runs_stand_side_by_side_with_the_settings_in_which_they_differ(
    listed: Callable[..., AppTest], record: Callable[..., Path]
):
    spec = Spec(mode="pipeline", devices=4, microbatches=4, machine="unit")
    one, other = record(spec), record(spec.with_(microbatches=8, lr=0.1), parity={"ok": False})
    app = listed()
    assert "Side by side" not in words(app)
    app.checkbox(key=f"choose-{one.name}").check().run()
    assert "Side by side" not in words(app)
    app.checkbox(key=f"choose-{other.name}").check().run()
    said = [part.value for part in app.markdown]
    shown = said[said.index("##### Side by side") :]
    assert shown[1:3] == [f"**{other.name}**", f"**{one.name}**"]  # the newest first
    rows = {shown[i]: shown[i + 1 : i + 3] for i in range(3, len(shown), 3)}
    assert rows[":gray[Microbatches]"] == ["8", "4"]
    assert rows[":gray[Learning rate]"] == ["0.1", "0.05"]
    assert rows[":gray[Step time]"] == ["66 s", "42 s"]  # twice the predicted 3 s x (M + 4 - 1)
    assert [":red" in badge for badge in rows[":gray[Parity]"]] == [True, False]
    assert ":gray[Devices]" not in rows
    (figure,) = charts(app)
    assert [curve["name"] for curve in figure["data"]] == [other.name, one.name]
    assert len({curve["line"]["dash"] for curve in figure["data"]}) == 2


def test_each_run_is_listed_with_its_id_and_a_broken_one_can_be_compared(
    listed: Callable[..., AppTest], record: Callable[..., Path], runs_dir: Path
):
    folder = record(Spec())
    (runs_dir / "odd").mkdir()
    app = listed()
    assert all(f":gray[{name}]" in words(app) for name in (folder.name, "odd"))
    for name in (folder.name, "odd"):
        app.checkbox(key=f"choose-{name}").check().run()
    assert not app.exception
    assert "Side by side" in words(app)


def test_a_run_is_deleted_only_after_it_was_confirmed(
    listed: Callable[..., AppTest], record: Callable[..., Path], runs_dir: Path
):
    kept, gone = record(Spec()), record(Spec(devices=4))
    app = listed()
    assert {run["run_id"] for run in archive.list_runs(runs_dir)} == {kept.name, gone.name}
    app.button(key=f"yes-{gone.name}").click().run()
    assert [run["run_id"] for run in archive.list_runs(runs_dir)] == [kept.name]
    assert "× 4" not in words(app)


def test_recorded_runs_are_listed_apart_and_cannot_be_deleted(
    listed: Callable[..., AppTest], record: Callable[..., Path], runs_dir: Path
):
    folder = record(Spec(mode="single", devices=1))
    (runs_dir / archive.GALLERY).mkdir()
    shutil.move(folder, runs_dir / archive.GALLERY / folder.name)
    app = listed()
    assert "Recorded runs" in words(app) and "Single device × 1" in words(app)
    assert not [button for button in app.button if button.key.startswith("yes-")]


def test_a_broken_folder_is_listed_and_can_be_deleted(listed: Callable[..., AppTest], runs_dir: Path):
    (runs_dir / "odd").mkdir()
    app = listed()
    assert not app.exception
    assert ":red-badge[Broken]" in words(app)
    app.button(key="yes-odd").click().run()
    assert not (runs_dir / "odd").exists()


def test_a_long_list_is_cut_into_pages(listed: Callable[..., AppTest], record: Callable[..., Path]):
    first = record(Spec())
    for number in range(12):
        shutil.copytree(first, first.with_name(f"copy-{number:02}"))
    app = listed()
    assert len([button for button in app.button if button.key.startswith("yes-")]) == 12
    app.pagination[0].set_value(2).run()
    assert len([button for button in app.button if button.key.startswith("yes-")]) == 1
