"""The run folder: what is written is read back, while it is being written too, and no id leads out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import archive
from engine.asking.rules import SpecError
from engine.job import prepare
from engine.spec import Spec

JOB = prepare(Spec(mode="ddp", devices=2, model="mlp", steps=4))

BAD_IDS = ["../../etc", "..", ".", "", "a/b", "a\\b", "/etc", "a\n", "a b", "日本", "a.b", "x" * 101, None, 7]


def set_status(run_dir: Path, **changes: object) -> None:
    status = json.loads((run_dir / "status.json").read_text())
    archive.write_json(run_dir / "status.json", status | changes)


def code_of(action, *args) -> str:
    with pytest.raises(SpecError) as caught:
        action(*args)
    return caught.value.code


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_new_run_is_found_by_its_id_and_holds_its_spec(runs_dir):
    run_dir = archive.new_run(runs_dir, JOB)
    status = archive.read_status(run_dir)
    assert archive.open_run(runs_dir, run_dir.name) == run_dir
    assert archive.read_spec(run_dir) == JOB.spec
    assert (status["run_id"], status["state"], status["mode"]) == (run_dir.name, "starting", "ddp")
    assert (status["devices"], status["processes"], status["total_steps"], status["error"]) == (2, 2, 4, None)


def test_ids_are_fresh_even_within_one_second(runs_dir):
    assert len({archive.new_run(runs_dir, JOB).name for _ in range(50)}) == 50


def test_one_process_drives_all_devices_of_data_parallel(runs_dir):
    job = prepare(Spec(mode="data_parallel", devices=2, model="mlp"))
    status = archive.read_status(archive.new_run(runs_dir, job))
    assert (status["devices"], status["processes"]) == (2, 1)


def test_a_reader_never_sees_a_part_of_a_json_file(tmp_path):
    path = tmp_path / "status.json"
    values = [{"n": n, "padding": "x" * 100_000} for n in range(2)]
    archive.write_json(path, values[0])
    done = threading.Event()

    def write() -> None:
        for n in range(200):
            archive.write_json(path, values[n % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert json.loads(path.read_text()) in values
    writer.join()
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path):
    archive.write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        archive.write_json(tmp_path / "a.json", {"new": object()})
    assert archive.read_json(tmp_path / "a.json") == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", BAD_IDS)
def test_an_id_that_could_lead_elsewhere_is_refused(tmp_path, run_id):
    runs_dir = tmp_path / "a" / "runs"
    runs_dir.mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    assert code_of(archive.open_run, runs_dir, run_id) == "bad_run_id"
    assert code_of(archive.delete_run, runs_dir, run_id) == "bad_run_id"
    assert (tmp_path / "etc").is_dir()


def test_an_unknown_id_is_no_run(runs_dir):
    (runs_dir / "file").write_text("")
    (runs_dir / "gallery").mkdir()
    for run_id in ("unknown", "file", "gallery"):
        assert code_of(archive.open_run, runs_dir, run_id) == "no_run"
        assert code_of(archive.delete_run, runs_dir, run_id) == "no_run"
    assert (runs_dir / "gallery").is_dir()


# --- the state --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gone() -> int:
    """The pid of a process that ended just now and was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("state", ["starting", "running", "finishing"])
def test_a_run_whose_launcher_died_has_failed(runs_dir, gone, state):
    run_dir = archive.new_run(runs_dir, JOB, launcher_pid=os.getpid())
    set_status(run_dir, state=state)
    assert archive.read_status(run_dir)["state"] == state
    set_status(run_dir, launcher_pid=gone)
    status = archive.read_status(run_dir)
    assert (status["state"], status["error"]["message"]) == ("failed", "the launcher process ended")


def test_a_run_whose_launchers_pid_was_given_to_another_process_has_failed(runs_dir):
    run_dir = archive.new_run(runs_dir, JOB, launcher_pid=os.getpid())
    set_status(run_dir, launcher_start=archive.process_start(os.getpid()) - 1)
    assert archive.read_status(run_dir)["state"] == "failed"


def test_a_run_that_had_ended_keeps_its_state_when_the_launcher_is_gone(runs_dir, gone):
    run_dir = archive.new_run(runs_dir, JOB)
    for state in ("finished", "stopped", "failed"):
        set_status(run_dir, state=state, launcher_pid=gone, launcher_start=1)
        assert (archive.read_status(run_dir)["state"], archive.read_status(run_dir)["error"]) == (state, None)


def test_a_zombie_has_ended():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it exits
    process.stdout.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert archive.process_start(process.pid) is None
    process.wait()


def test_start_ticks_are_read_whatever_a_process_is_called(tmp_path):
    """proc(5): the name may hold spaces and parentheses. The start is compared with this process's: no earlier."""
    program = tmp_path / "a) Z (b"
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert archive.process_start(process.pid) >= archive.process_start(os.getpid())
        process.stdin.close()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"state": "running"}', '{"state": "magic", "created": 1}', '{"created": "now"}', "\xff"],
)
def test_a_damaged_status_is_shown_as_broken(runs_dir, text):
    run_dir = archive.new_run(runs_dir, JOB)
    (run_dir / "status.json").write_bytes(text.encode("latin-1"))
    status = archive.read_status(run_dir)
    assert (status["state"], status["run_id"]) == ("broken", run_dir.name)
    assert "status.json" in status["error"]["message"]


def test_asking_a_run_to_stop_leaves_a_file_only_while_it_goes_on(runs_dir):
    run_dir = archive.new_run(runs_dir, JOB)
    set_status(run_dir, state="finished")
    archive.ask_to_stop(run_dir)
    assert not (run_dir / "stop").exists()
    set_status(run_dir, state="running")
    archive.ask_to_stop(run_dir)
    assert (run_dir / "stop").exists()


# --- lists ------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_and_broken_folders_last(runs_dir):
    old, new, broken = (archive.new_run(runs_dir, JOB) for _ in range(3))
    set_status(old, created=1000.0)
    set_status(new, created=2000.0)
    (broken / "status.json").write_text("{")
    (runs_dir / "empty").mkdir()
    (runs_dir / "a file").write_text("")
    (runs_dir / ".hidden").mkdir()
    (runs_dir / "gallery").mkdir()
    listed = [(s["run_id"], s["state"]) for s in archive.list_runs(runs_dir)]
    assert listed[:2] == [(new.name, "starting"), (old.name, "starting")]
    assert sorted(listed[2:]) == sorted([(broken.name, "broken"), ("empty", "broken")])


def test_without_a_folder_there_are_no_runs(tmp_path):
    assert archive.list_runs(tmp_path / "none") == []


def test_recorded_runs_are_opened_and_listed_but_not_deleted(runs_dir):
    recorded = archive.new_run(runs_dir / archive.GALLERY, JOB)
    assert archive.open_run(runs_dir, recorded.name) == recorded
    assert [s["run_id"] for s in archive.list_runs(runs_dir / archive.GALLERY)] == [recorded.name]
    assert archive.list_runs(runs_dir) == []
    assert code_of(archive.delete_run, runs_dir, recorded.name) == "no_run"
    assert recorded.is_dir()


def test_a_deleted_run_is_gone_and_only_that_run(runs_dir):
    kept, deleted = archive.new_run(runs_dir, JOB), archive.new_run(runs_dir, JOB)
    archive.delete_run(runs_dir, deleted.name)
    assert os.listdir(runs_dir) == [kept.name]


def test_deleting_a_link_keeps_what_it_points_to(runs_dir, tmp_path):
    (tmp_path / "precious").mkdir()
    (runs_dir / "link").symlink_to(tmp_path / "precious")
    archive.delete_run(runs_dir, "link")
    assert (tmp_path / "precious").is_dir() and os.listdir(runs_dir) == []


# --- what the workers write -------------------------------------------------------------------------------------------

LINES = [{"step": n, "start": n + 0.0, "end": n + 0.5, "loss": 2.0 - n, "samples": 64} for n in range(3)]
TEXT = "".join(json.dumps(line) + "\n" for line in LINES)


def test_steps_are_read_up_to_a_half_written_line_and_go_on_from_there(tmp_path):
    """Cut at every byte: what is read is the whole lines before the cut; then the rest, each line once."""
    for cut in range(len(TEXT) + 1):
        (tmp_path / "rank1.steps.jsonl").write_text(TEXT[:cut])
        file = archive.StepFile(tmp_path, 1)
        assert file.read() == LINES[: TEXT[:cut].count("\n")]
        (tmp_path / "rank1.steps.jsonl").write_text(TEXT)
        assert file.read() == file.read() == archive.read_steps(tmp_path, 1) == LINES
    assert archive.read_steps(tmp_path, 0) == []


@pytest.mark.parametrize("damage", ["{]\n", "7\n", '{"step": 1}\n', "\n", "\x00\xff\n"])
def test_steps_after_a_damaged_line_are_not_believed(tmp_path, damage):
    first, rest = TEXT.split("\n", 1)
    (tmp_path / "rank0.steps.jsonl").write_bytes((first + "\n" + damage + rest).encode("latin-1"))
    assert archive.read_steps(tmp_path, 0) == LINES[:1]


def test_a_log_is_read_from_its_end_without_the_profilers_noise(tmp_path):
    (tmp_path / "rank0.log").write_bytes(b"one\nUSDT: noise\ntwo \xff\nthree\n")
    assert archive.read_log(tmp_path, 0) == "one\ntwo \ufffd\nthree"
    assert archive.read_log(tmp_path, 0, tail=2) == "two \ufffd\nthree"
    assert archive.read_log(tmp_path, 1) == ""


def test_a_huge_log_is_cut_to_its_last_mebibyte(tmp_path):
    (tmp_path / "rank0.log").write_text("first\n" + "x" * (1 << 20) + "\nlast\n")
    text = archive.read_log(tmp_path, 0)
    assert len(text) < 1 << 20 and text.endswith("x\nlast")


def test_over_a_file_that_is_there_a_shorter_text_leaves_nothing_of_it(tmp_path):
    path = tmp_path / "status.json"
    archive.write_json(path, {"state": "starting", "message": "中" * 100})
    archive.write_in_place(path, {"state": "é"})
    assert path.read_text(encoding="utf-8") == '{"state": "é"}'


@pytest.mark.parametrize("place", ["a file", "a link to nowhere", "a full disk"])
def test_where_no_run_can_be_made_it_is_said_and_nothing_is_left(place, tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    if place == "a file":
        folder.write_text("")
    elif place == "a link to nowhere":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(SpecError, match="runs-dir") as wrong:
        archive.new_run(folder, prepare(Spec(devices=1)))
    assert wrong.value.code == "no_place_for_runs"
    assert not folder.is_dir() or not [*folder.iterdir()]


def test_a_result_that_lacks_what_is_shown_of_it_is_refused(tmp_path):
    assert archive.read_whole_result(tmp_path) is None
    whole = dict.fromkeys(archive.RESULT_KEYS)
    archive.write_json(tmp_path / "result.json", whole)
    assert archive.read_whole_result(tmp_path) == whole
    for damaged in ("{", '"text"', "{}", json.dumps({name: None for name in whole if name != "parity"})):
        (tmp_path / "result.json").write_text(damaged)
        with pytest.raises(SpecError, match="damaged"):
            archive.read_whole_result(tmp_path)


@pytest.mark.parametrize("name", ["result.json", "rank0.error.json"])
def test_results_and_errors_are_none_until_they_can_be_read(tmp_path, name):
    read = archive.read_result if name == "result.json" else lambda run_dir: archive.read_error(run_dir, 0)
    assert read(tmp_path) is None
    (tmp_path / name).write_text('{"message": ')
    assert read(tmp_path) is None
    archive.write_json(tmp_path / name, {"message": "m"})
    assert read(tmp_path) == {"message": "m"}
