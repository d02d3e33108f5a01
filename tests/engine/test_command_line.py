"""The command line, as a person or a program uses it: real processes, exit status, one JSON object, one-line errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from engine import __main__ as command_line
from engine import archive
from engine.cli import commands
from engine.job import prepare
from engine.spec import MODES, Spec

ROOT = Path(__file__).resolve().parents[2]

RUN_KEYS = {
    "run_id", "status", "mode", "devices", "device_kind", "step_time", "predicted_step_time", "samples_per_second",
    "losses", "validation_accuracy", "parity", "conformance", "memory", "peak_memory", "bubble_fraction",
    "exposed_communication_fraction", "error",
}  # fmt: skip
SIMULATE_KEYS = {
    "step_time", "bubble_fraction", "exposed_communication_fraction", "num_ops", "memory", "peak_memory",
    "peak_in_flight", "bytes_sent",
}  # fmt: skip


def call(capsys, *words: str) -> tuple[int, str, str]:
    status = command_line.main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


@contextmanager
def engine_process(*words: str, program: tuple[str, ...] = ("-m", "engine"), **options) -> Iterator[subprocess.Popen]:
    """As from a terminal: where tests themselves run in the background, Ctrl-C is ignored by all that they start."""
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command, piped = [sys.executable, *program, *words], dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, **piped, text=True, preexec_fn=heeds, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_simulate_prints_one_object_with_the_numbers(capsys):
    status, out, _ = call(
        capsys,
        *"simulate --mode pipeline --devices 4 --machine unit --microbatches 8 --json".split(),
    )
    summary = json.loads(out)
    assert status == 0
    assert summary.keys() >= SIMULATE_KEYS
    assert summary["step_time"] == (8 + 4 - 1) * 3
    assert summary["bubble_fraction"] == pytest.approx(3 / 11)
    assert summary["peak_in_flight"] == [4, 3, 2, 1]
    assert len(summary["peak_memory"]) == len(summary["bytes_sent"]) == 4


def test_ring_bytes_of_ddp(capsys):
    """2(n-1)/n of the model's 431,080 parameters of 4 bytes on each of 4 ranks."""
    summary = json.loads(call(capsys, *"simulate --mode ddp --devices 4 --json".split())[1])
    assert summary["bytes_sent"] == [2 * 3 * 431_080 * 4 // 4] * 4


def test_modes_lists_every_lesson(capsys):
    status, out, _ = call(capsys, "modes", "--json")
    lessons = json.loads(out)["modes"]
    assert status == 0
    assert tuple(lessons) == MODES
    assert all(lesson["title"] and lesson["steps"] and lesson["limits"] for lesson in lessons.values())


@pytest.mark.parametrize("command", ["modes", "simulate", "runs"])
def test_people_get_text_and_not_json(command, capsys, runs_dir):
    words = [command, *(["--runs-dir", str(runs_dir)] if command == "runs" else [])]
    status, out, _ = call(capsys, *words)
    assert status == 0
    assert out.strip()
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)


# What is wrong, and what the one line must say.
WRONG = [
    ("simulate --devices 0", "1 and 16384; it is 0. Try: 1."),
    ("simulate --devices 1000000000", "Try: 16384."),
    ("simulate --devices two", "whole number"),
    ("simulate --lr nan", "finite"),
    ("simulate --mode dpd", "Try: ddp"),
    ("simulate --modle ddp", "Try: --mode"),
    ("simulate --devices 3", "Try: 63, 66."),
    ("simulate --mode pipeline --devices 2 --microbatches 5", "Try: 2, 4, 8."),
    ("simulate --mode layer_split --devices 9", "Try: 4."),
    (
        "simulate --mode tensor --model gpt --hidden 56 --heads 28 --devices 8",
        "vocabulary 144), so devices must divide it; devices is 8. Try: 1, 2, 4.",
    ),
    ("simulate --mode sequence --model cnn", "Try: gpt,"),
    ("simulate --mode ddp --schedule gpipe", "does not apply to the mode ddp"),
    ("simulate --machine abacus", "local"),
    ("run --device cuda --devices 2", "cuda"),
    ("run --devices 100 --global-batch 100", "simulated. Try: 50."),
    ("show ../../etc", "run id"),
    ("show nothing", "no run"),
    ("export nothing", "no run"),
    ("simulate --spec /does/not/exist", "cannot be read"),
    ("frobnicate", "invalid choice"),
    ("simulate --devices", "expected one argument"),
    ("simulate stray", "stray"),
    ("simulate --model gpt3_175b --mode fsdp", "fp32, bf16"),
    ("simulate --model gpt --precision fp8", "measured there"),
    ("run --runs-dir /dev/null", "runs-dir"),
    ("runs --runs-dir /dev/null", "runs-dir"),
    ("show last --runs-dir /dev/null", "runs-dir"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_input_is_one_line_and_status_2(words, says, capsys):
    status, out, err = call(capsys, *words.split())
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert says in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"devices": "4"}', 'devices must be a whole number; "4" is not'),
        ('{"devices": true}', "devices"),
        ('{"lr": NaN}', "lr"),
        ("[1]", "spec.json"),
        ("{", "spec.json"),
        ("", "spec.json"),
        ('{"colour": 1}', "colour"),
        ('{"split": [1, "a"]}', "split"),
        ('{"devices": 2, "devices": 4}', "devices is given twice, the second time as 4"),
        ('{"global-batch": 8, "global_batch": 4}', "global-batch is given twice"),
    ],
)
def test_a_wrong_spec_file_is_one_line_and_status_2(text, says, tmp_path, capsys):
    path = tmp_path / "spec.json"
    path.write_text(text)
    status, _, err = call(capsys, "simulate", "--spec", str(path))
    assert (status, err.count("\n")) == (2, 1)
    assert says in err


def test_ranks_that_are_as_many_as_can_be_are_dealt_to_at_once(capsys):
    """To look for the longest rank anew for each rank took an hour."""
    words = "deal --samples 100000 --devices 100000 --batch 1 --json".split()
    assert json.loads(call(capsys, *words)[1])["ways"]["keep"]["runs_out"] == []


def test_a_run_folder_that_is_damaged_is_told_in_one_line(runs_dir, tmp_path, capsys):
    folder = archive.new_run(runs_dir, prepare(Spec(devices=2)))
    place = ["--runs-dir", str(runs_dir)]
    for name in ("result.json", "timeline.parquet"):
        (folder / name).write_text("{}")
    shown = [["show", folder.name], ["show", folder.name, "--json"]]
    shown += [["export", folder.name, "--format", one, "--output", str(tmp_path / "x")] for one in ("perfetto", "csv")]
    (folder / "spec.json").write_text("{")
    for words in (*shown, ["show", folder.name, "--plan"]):
        status, out, err = call(capsys, *words, *place)
        assert (status, out, err.count("\n")) == (2, "", 1), words
        assert folder.name in err


def test_a_run_that_finished_and_has_no_result_is_no_run_that_is_shown(runs_dir, capsys):
    folder = archive.new_run(runs_dir, prepare(Spec(devices=2)))
    place = ["--runs-dir", str(runs_dir)]
    assert call(capsys, "show", "last", *place)[0] == 0  # one that has not ended yet has none either
    archive.write_json(folder / "status.json", archive.read_json(folder / "status.json") | {"state": "finished"})
    for words in (["show", "last"], ["show", folder.name, "--json"]):
        status, out, err = call(capsys, *words, *place)
        assert (status, out, err.count("\n")) == (2, "", 1) and f"{folder.name} cannot be read: it is missing" in err


def test_options_win_over_the_spec_file(tmp_path, capsys):
    path = tmp_path / "spec.json"
    path.write_text('{"mode": "pipeline", "devices": 2, "microbatches": 4, "machine": "unit"}')
    out = call(capsys, "simulate", "--spec", str(path), "--devices", "4", "--json")[1]
    assert json.loads(out)["step_time"] == (4 + 4 - 1) * 3


@pytest.fixture
def shared(launcher, monkeypatch):
    """The command line in this process takes the session's launcher, which is warm, for its own."""
    monkeypatch.setattr("engine.launch.default_launcher", lambda: launcher)


@pytest.mark.real
def test_a_run_prints_its_result_and_can_be_shown_and_exported(runs_dir, tmp_path, capsys, shared):
    place = ["--runs-dir", str(runs_dir)]
    words = "run --mode ddp --devices 2 --model mlp --dataset synthetic --steps 4 --device cpu --json".split()
    status, out, _ = call(capsys, *words, *place)
    result = json.loads(out)
    assert status == 0
    assert result.keys() >= RUN_KEYS
    assert result["status"] == "finished"
    assert result["device_kind"] == "cpu"
    assert result["parity"]["ok"] and result["conformance"]["ok"]
    assert len(result["peak_memory"]) == 2
    assert len(result["losses"]) == 4

    status, out, _ = call(capsys, "show", "last", "--json", *place)
    assert (status, json.loads(out)) == (0, result)
    assert result["run_id"] in call(capsys, "runs", *place)[1]
    assert "forward" in call(capsys, "show", result["run_id"], "--plan", *place)[1]

    trace = tmp_path / "trace.json"
    status, out, _ = call(capsys, "export", "last", "--output", str(trace), "--json", *place)
    assert (status, json.loads(out)["bytes"]) == (0, trace.stat().st_size)
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"
             and event["name"] == "process_name"}  # fmt: skip
    assert names == {"rank 0", "rank 1"}
    page = tmp_path / "page.html"
    words = ["export", "last", "--format", "html", "--language", "zh", "--output", str(page), "--json"]
    status, out, _ = call(capsys, *words, *place)
    assert (status, json.loads(out)["bytes"]) == (0, page.stat().st_size)
    assert '<html lang="zh">' in page.read_text(encoding="utf-8")
    assert call(capsys, "export", "last", "--language", "xx", *place)[0] == 2
    table = tmp_path / "spans.csv"
    assert call(capsys, "export", "last", "--format", "csv", "--output", str(table), *place)[0] == 0
    assert len(table.read_text().splitlines()) == 1 + result["conformance"]["measured"]
    status, _, err = call(capsys, "export", "last", "--output", str(tmp_path / "no" / "where"), *place)
    assert (status, err.count("\n")) == (2, 1)


@pytest.mark.real
def test_a_run_that_fails_says_so_in_its_status(runs_dir, capsys, shared):
    words = "run --mode ddp --devices 2 --model mlp --steps 4 --device cpu --fault raise@1:2 --json".split()
    status, out, _ = call(capsys, *words, "--runs-dir", str(runs_dir))
    result = json.loads(out)
    assert status == 1
    assert result["status"] == "failed"
    assert result["error"]["rank"] == 1
    assert result["error"]["step"] == 2


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running(runs_dir: Path, process: subprocess.Popen) -> dict:
    """The status of the process's run, once every rank has made a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for folder in runs_dir.iterdir():
            status = archive.read_status(folder)
            if status["state"] == "running" and all(archive.read_steps(folder, rank) for rank in range(2)):
                return status
        time.sleep(0.02)
    raise AssertionError("the run did not begin")


LONG = "run --mode ddp --devices 2 --model mlp --steps 100000 --device cpu --json".split()
# The command itself, with workers that only count: to import torch would take most of these tests' time.
COUNTING = """
import sys
from engine import __main__, launch
from tests.engine.stub_workers import OPTIONS
launcher = launch.Launcher([*OPTIONS[:-1], "engine.outcome.finish:finish"])
launch.default_launcher = lambda: launcher
sys.exit(__main__.main())
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "program"),
    [
        (signal.SIGINT, ("-c", COUNTING)),
        (signal.SIGTERM, ("-c", COUNTING)),
        (signal.SIGKILL, ("-m", "engine")),
    ],
)
def test_however_the_command_ends_no_worker_is_left(number, program, runs_dir, alone):
    with engine_process(*LONG, "--runs-dir", str(runs_dir), program=program) as process:
        status = running(runs_dir, process)
        pids = [status["launcher_pid"], *status["worker_pids"]]
        with alone():
            began = time.monotonic()
            process.send_signal(number)
            out, _ = process.communicate(timeout=30)
            while any(alive(pid) for pid in pids) and time.monotonic() < began + 10:
                time.sleep(0.02)
            took = time.monotonic() - began
    assert not [pid for pid in pids if alive(pid)]
    assert took < 5
    if number != signal.SIGKILL:
        assert json.loads(out)["status"] == "stopped"
        assert process.returncode == 1
    (folder,) = runs_dir.iterdir()
    assert archive.read_status(folder)["state"] in ("stopped", "failed")


def test_help_names_every_setting_once(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for (
        option
    ) in "mode devices model layers hidden heads context dataset steps epochs global-batch microbatches".split():
        assert len(re.findall(rf"^  --{option} ", text, re.M)) == 1


def test_output_for_which_there_is_no_room_is_one_line_and_status_1():
    for words in (["modes"], ["deal", "--json"]):  # more than is kept back, and less
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "engine", *words]
            done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_command_that_is_interrupted_is_one_line_and_status_1(capsys, monkeypatch):
    def interrupted(*_) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.tables, "lesson", interrupted)
    assert call(capsys, "modes") == (1, "", "error: stopped\n")


def test_a_reader_that_leaves_is_no_error():
    """`python -m engine modes | head -1`"""
    with engine_process("modes") as process:
        process.stdout.close()
        assert process.wait(timeout=30) in (0, 1)
        assert "Traceback" not in process.stderr.read()


def test_a_terminal_without_a_sign_still_gets_the_numbers():
    """A prediction of a pipeline has ×, and µ may come; in ASCII they are spelt out, and nothing else is lost."""
    words, env = "simulate --mode pipeline --devices 4 --machine unit".split(), {"PYTHONIOENCODING": "ascii"}
    with engine_process(*words, env=os.environ | env) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "step time" in out and out.isascii()


def test_help_without_docstrings():
    with engine_process("-m", "engine", "--help", program=("-OO",)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "simulate" in out


def test_an_error_does_not_hand_a_terminal_what_it_would_obey(capsys):
    status, _, err = call(capsys, "simulate", "--mode", "\x1b[2J\u202eddp")
    assert (status, err.strip().isprintable()) == (2, True)
    assert "\\x1b[2J\\u202eddp" in err


def test_ctrl_c_while_a_command_is_imported(capsys, monkeypatch):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "engine.cli.arguments":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "engine.cli.arguments", raising=False)
    monkeypatch.delattr("engine.cli.arguments", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert call(capsys, "modes") == (1, "", "error: stopped\n")
