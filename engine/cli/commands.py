"""Parsed arguments -> the work of one subcommand, printed as a table or as JSON; the exit status."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import engine
import engine.search
import engine.validate.report
import engine.validate.tables
from engine import archive, checkpoints, export, modes
from engine.analysis import stragglers, traces
from engine.asking import spec_file
from engine.asking.here import count_gpus, lacks_compiler
from engine.asking.rules import SpecError
from engine.asking.values import WANTED
from engine.calibration.calibrate import QUICK, CalibrationError, Effort, Measuring
from engine.cli import calibration_table, doctor_table, search_table, stragglers_table, tables
from engine.cost import calibration
from engine.data import sampling
from engine.graph import notation
from engine.job import prepare
from engine.launch import LauncherError, open_handle, start
from engine.search import Search
from engine.search.fits import fits
from engine.spec import MODES, Spec
from engine.timeline import Timeline
from engine.validate import kept

LANGUAGES = ("en", "zh")
MAX_TOP = 1000  # layouts that `search` shows
MAX_DEALT = 100_000  # samples that `deal` lists
FORMATS = {"perfetto": ".trace.json", "html": ".html", "csv": ".csv"}


def spec_of(arguments: argparse.Namespace) -> Spec:
    """The spec file's settings, if there is one, under those given as options."""
    base = Spec.from_file(arguments.spec) if arguments.spec else Spec()
    names = [f.name for f in dataclasses.fields(Spec)]
    given = {name: value for name in names if (value := getattr(arguments, "set_" + name)) is not None}
    if "schedule_file" in given:  # on the command line a file, everywhere else its text
        given["schedule_file"] = _text_of("schedule_file", given["schedule_file"])
        if "devices" not in given and not arguments.spec:
            given["devices"] = str(len(given["schedule_file"].strip().splitlines()))
    asked = Spec.from_params(given)
    if asked.resume is not None and not arguments.spec:  # then what must be as it was is so by itself
        base = base.with_(**checkpoints.settings(asked.resume, _runs_dir(arguments)))
    return base.with_(**{name: getattr(asked, name) for name in given})


def _text_of(setting: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError("no_file", setting, f"{path}: {error}") from None


def _runs_dir(arguments: argparse.Namespace) -> Path:
    folder = Path(getattr(arguments, "runs_dir", None) or archive.RUNS)
    if folder.exists() and not folder.is_dir():
        raise SpecError("no_place_for_runs", "runs_dir", f"{folder}: {os.strerror(errno.ENOTDIR)}")
    return folder


def show_modes(arguments: argparse.Namespace) -> int:
    """List the parallelisms, what each does and where it ends"""
    lessons = {mode: modes.lesson(mode) for mode in MODES}
    if arguments.json:
        return _print_json({"modes": {mode: dataclasses.asdict(lesson) for mode, lesson in lessons.items()}})
    for mode, lesson in lessons.items():
        print(tables.lesson(mode, lesson))
    return 0


def simulate(arguments: argparse.Namespace) -> int:
    """Predict one step: time, bubble, communication, memory"""
    prediction = engine.simulate(spec_of(arguments))
    if arguments.plan:
        print(notation.format_plan(prediction.plan))
        return 0
    summary = prediction.summary() | {"fits": fits(prediction)}
    if arguments.json:
        return _print_json(summary | {"spec": prediction.job.spec.to_dict()})
    print(tables.prediction(summary))
    return 0


def search(arguments: argparse.Namespace) -> int:
    """Find the fastest layouts that fit: settings that are given are held, the others searched"""
    spec, held = spec_of(arguments), given_in(arguments)
    looking = Search(spec, held, top=_whole("top", arguments.top, high=MAX_TOP))
    tell = search_table.Progress(show=sys.stderr.isatty())
    try:
        for _ in looking.steps():
            tell(looking)
    except KeyboardInterrupt:
        pass  # the fastest so far are told, and that others are left
    tell(looking, last=True)
    report = engine.search.report(looking)
    if arguments.json:
        return _print_json(report) if report["best"] else _print_json(report) or 1
    print(search_table.found(report))
    return 0 if report["best"] else 1


def given_in(arguments: argparse.Namespace) -> set[str]:
    """The settings that somebody gave, as options or in a spec file, whatever their values."""
    names = {f.name for f in dataclasses.fields(Spec)}
    in_file = spec_file.read(arguments.spec) if arguments.spec else {}
    named = {name.replace("-", "_") for name, value in in_file.items() if value is not None}
    return named | {name for name in names if getattr(arguments, "set_" + name) is not None}


def run(arguments: argparse.Namespace) -> int:
    """Train for real, in one process a device, and compare with the prediction"""
    handle = start(spec_of(arguments), runs_dir=_runs_dir(arguments))
    signal.signal(signal.SIGTERM, lambda *_: handle.stop())
    try:
        tables.follow(handle, show=not arguments.json)
    except KeyboardInterrupt:
        handle.stop()
    try:
        result = handle.result()
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        _print_json(result)
    else:
        print(tables.result(result, handle.run_dir))
    return 0 if result.get("status") == "finished" else 1


def deal(arguments: argparse.Namespace) -> int:
    """Show which samples each rank sees, where their number does not divide"""
    numbers = [_whole(name, getattr(arguments, name)) for name in ("samples", "devices", "batch")]
    wrong = [_whole("wrong", one, 0, numbers[0] - 1) for one in arguments.wrong.split(",") if one]
    found = sampling.report(*numbers, wrong)
    print(json.dumps(found)) if arguments.json else print(tables.dealt(found))
    return 0


def _whole(setting: str, text: str, low: int = 1, high: int = MAX_DEALT) -> int:
    try:
        value = int(text)
    except ValueError:
        raise SpecError("wrong_type", setting, text, wanted=WANTED[int]) from None
    if not low <= value <= high:
        raise SpecError("out_of_range", setting, value, suggest=[low if value < low else high], low=low, high=high)
    return value


def validate(arguments: argparse.Namespace) -> int:
    """Predict published measurements, and show how far off that is, set by set"""
    tell = engine.validate.tables.tell if sys.stderr.isatty() else None
    found = engine.validate.report.of_file(arguments.file, rows=arguments.rows or bool(arguments.save), tell=tell)
    if arguments.save:
        _save(found, arguments)
    print(json.dumps(found, allow_nan=False)) if arguments.json else print(engine.validate.tables.report(found))
    return 0


def _save(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The report for the page; and whole on the way out only where it was asked for."""
    save = path.name if (path := Path(arguments.save)).is_absolute() else arguments.save
    command = f"python -m engine validate {Path(arguments.file).name} --save {save}"
    try:
        kept.write(found, Path(arguments.file), Path(arguments.save), command, time.strftime("%Y-%m-%d", time.gmtime()))
    except OSError as error:
        raise SpecError("no_file", "save", f"{arguments.save}: {error}") from None
    if not arguments.rows:
        for name in ("rows", "sample", "calls", "rows_not_used"):
            del found[name]


def list_runs(arguments: argparse.Namespace) -> int:
    """List the runs there are, newest first"""
    runs = archive.list_runs(_runs_dir(arguments))
    if arguments.json:
        return _print_json({"runs": runs})
    print(tables.runs(runs))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show one run: its state, its numbers, its proof"""
    handle = open_handle(_run_id(arguments), _runs_dir(arguments))
    if arguments.plan:
        print(notation.format_plan(modes.plan(prepare(archive.read_spec(handle.run_dir)))))
        return 0
    result = archive.read_whole_result(handle.run_dir)
    if result is None:
        status = archive.read_status(handle.run_dir)
        if status["state"] == "finished":
            raise SpecError("bad_result", "run_id", status["run_id"])
        return _print_json(status) if arguments.json else print(tables.status(status)) or 0
    if arguments.json:
        return _print_json(result)
    print(tables.result(result, handle.run_dir))
    return 0


def export_run(arguments: argparse.Namespace) -> int:
    """Write a run as a Perfetto trace, a page that plays offline, or a CSV of its spans"""
    folder = open_handle(_run_id(arguments), _runs_dir(arguments)).run_dir
    if arguments.format not in FORMATS:
        raise SpecError("unknown_name", "format", arguments.format, suggest=FORMATS)
    if arguments.language not in LANGUAGES:
        raise SpecError("unknown_name", "language", arguments.language, suggest=LANGUAGES)
    output = Path(arguments.output or folder.name + FORMATS[arguments.format]).absolute()
    if not (folder / "timeline.parquet").exists():
        raise SpecError("not_recorded", "run_id", folder.name)
    try:
        if arguments.format == "html":
            # The picture is drawn by viz, which stands above the engine: so it is asked from outside.
            words = [sys.executable, "-m", "viz.export", str(folder.absolute()), "--output", str(output)]
            words += ["--language", arguments.language]
            subprocess.run(words, check=True, cwd=archive.RUNS.parent, stdout=subprocess.DEVNULL)
        else:
            timeline = Timeline.load(folder / "timeline.parquet")
            write = {"perfetto": export.to_perfetto, "csv": export.to_csv}[arguments.format]
            output.write_text(write(timeline), encoding="utf-8")
    except OSError as error:
        raise SpecError("cannot_write", "output", f"{output}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        return error.returncode
    size = output.stat().st_size
    if arguments.json:
        return _print_json({"run_id": folder.name, "format": arguments.format, "output": str(output), "bytes": size})
    print(f"{output}  {tables.size(size)}")
    return 0


def find_stragglers(arguments: argparse.Namespace) -> int:
    """Say who comes last to each collective and message, from the profiler traces of all ranks"""
    seen = traces.communications(arguments.traces)
    found = stragglers.late(seen.calls)
    columns = zip(seen.names, seen.ends, *(c.tolist() for c in (found.last, found.waited, found.longest)), strict=True)
    each = [
        {
            "call": i,
            "name": name,
            "ends": ends,
            "last": None if last < 0 else last,
            "waited": waited,
            "longest": longest,
        }
        for i, (name, ends, last, waited, longest) in enumerate(columns)
    ]
    report = {
        "collectives": each,
        "ranks": [one._asdict() for one in stragglers.stragglers(seen.calls)],
        "inside": [one._asdict() for one in stragglers.inside(seen.calls)],
        "unmatched": seen.unmatched,
    }
    print(json.dumps(report)) if arguments.json else print(stragglers_table.late(report))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Check that this machine can run trainings, by running one"""
    wanted = ("torch", "streamlit", "plotly", "networkx", "numpy", "pyarrow", "pytest")
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in wanted},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": count_gpus(),
        "torch_compile_lacks": lacks_compiler(),
        "calibration": calibration.told(),
    }
    try:
        spec = Spec(mode="ddp", devices=2, model="mlp", dataset="synthetic", steps=3, device="cpu")
        result = start(spec, runs_dir=archive.RUNS).result(timeout=120)
        archive.delete_run(archive.RUNS, result["run_id"])
        checks = {"run": result["status"] == "finished", "parity": result["parity"]["ok"]}
        report["checks"] = checks | {"conformance": result["conformance"]["ok"]}
        report["error"] = result["error"]
    except (LauncherError, TimeoutError) as error:
        report |= {"checks": {"run": False}, "error": {"message": str(error)}}
    report["ok"] = all(report["checks"].values())
    print(json.dumps(report)) if arguments.json else print(doctor_table.doctor(report))
    return 0 if report["ok"] else 1


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine (about 25 s), for predictions on the machine `local`"""
    path = calibration.place()
    if path is None:
        raise SpecError("cannot_write", calibration.VARIABLE, "none")
    effort = Effort() if not arguments.quick else QUICK
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with calibration_table.progress(show=not arguments.json) as tell:
            made = Measuring(effort, tell).run()
    except KeyboardInterrupt:
        print("error: stopped; nothing was stored, and what was stored before still holds", file=sys.stderr)
        return 1
    except (CalibrationError, LauncherError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    calibration.store(made, path)
    if arguments.json:
        return _print_json(made.to_dict() | {"path": str(path)})
    print(calibration_table.calibration(made, path))
    return 0


COMMANDS = {
    "modes": show_modes,
    "simulate": simulate,
    "search": search,
    "run": run,
    "deal": deal,
    "validate": validate,
    "runs": list_runs,
    "show": show,
    "export": export_run,
    "stragglers": find_stragglers,
    "calibrate": calibrate,
    "doctor": doctor,
}


def _run_id(arguments: argparse.Namespace) -> str:
    if arguments.run_id != "last":
        return arguments.run_id
    runs = archive.list_runs(_runs_dir(arguments))
    if not runs:
        raise SpecError("no_run", "run_id", "last")
    return runs[0]["run_id"]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print_json(value: dict) -> int:
    """One object, always valid JSON: a number that is not finite would be an error here, not a NaN there."""
    print(json.dumps(value, allow_nan=False))
    return 0
