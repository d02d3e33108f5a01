"""A report with its rows <-> a small file: what predictions were held to, shipped with Lockstep and shown on a page.

It has figures that were measured by others, each with its source, and nothing of the file that they came from besides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

SHIPPED = Path(__file__).parent.parent / "data" / "validated.json"
DIGITS = 5  # of every number that is no whole one


class Row(NamedTuple):
    """One measured result beside its prediction: seconds of a step, bytes of the fullest rank; None: not measured."""

    id: str
    set: str
    source: str
    model: str
    layout: str
    devices: int
    device: str
    precision: str | None
    fitted: bool
    weak: bool
    dense: bool
    measured_seconds: float | None
    predicted_seconds: float
    floor_seconds: float | None
    measured_memory: float | None
    memory_kind: str | None
    predicted_memory: float | None

    @property
    def counts(self) -> bool:
        """Whether it is in the mean of all: of a dense model, read in the source itself, and nothing fitted on it."""
        return self.dense and not self.weak and not self.fitted


class Kept(NamedTuple):
    """`report`: as of `engine.validate.report`, shorter. `made`: when, by which command, from which file. `sample`:
    rows as they were published (`engine.validate.sample`)."""

    made: dict[str, str]
    report: dict[str, Any]
    rows: tuple[Row, ...]
    sample: tuple[dict[str, Any], ...]


def write(report: dict[str, Any], measured: Path, path: Path, command: str, day: str) -> None:
    """`report` has rows; `measured` is the file that it is of. A line of the file is one row, or one set."""
    rows = report["rows"]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    source_of = {row["set"]: row["source"] for row in reversed([*rows, *report["calls"]])}  # its first row's
    known = (row | {"source": sources.index(row["source"])} for row in rows)
    made = {
        "on": day,
        "command": command,
        "file": measured.name,
        "sha256": hashlib.sha256(measured.read_bytes()).hexdigest(),
    }
    short = {name: report[name] for name in ("entries", "used", "not_used", "overall", "overall_experts", "targets")}
    lines = {
        "made": _line(made),
        "report": _line(short),
        "sets": _lines(_short(each) | {"source": source_of.get(each["set"], "")} for each in report["sets"]),
        "sources": _lines(sources),
        "rows": _lines([row[name] for name in Row._fields] for row in known),
        "sample": "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in report["sample"]) + "\n]",
    }
    path.write_text("{\n" + ",\n".join(f'"{name}": {text}' for name, text in lines.items()) + "\n}\n", encoding="utf-8")


def read(path: Path = SHIPPED) -> Kept:
    found = json.loads(path.read_text(encoding="utf-8"))
    sources = found["sources"]
    rows = (Row(*values) for values in found["rows"])
    rows = tuple(row._replace(source=sources[row.source]) for row in rows)
    return Kept(found["made"], found["report"] | {"sets": found["sets"]}, rows, tuple(found["sample"]))


def _short(each: dict[str, Any]) -> dict[str, Any]:
    """A set without what only a terminal shows: reasons keep how many rows they have, families their sums."""
    same = ("set", "rows", "used", "fitted", "fitted_rows", "weak", "dense", "time", "time_of_experts", "memory")
    kept = {name: each[name] for name in (*same, "collectives")}
    kept["not_used"] = [{"reason": why["reason"], "rows": why["rows"]} for why in each["not_used"]]
    kept["layouts"] = (found := each["layouts"]) and {
        **{name: found[name] for name in ("rows", "spearman", "worst_regret")}, "families": len(found["families"]),
    }  # fmt: skip
    kept["schedules"] = (found := each["schedules"]) and {
        **{name: found[name] for name in ("cells_right", "worst_ratio_error")}, "cells": len(found["cells"]),
    }  # fmt: skip
    kept["scaling"] = [
        {name: one[name] for name in ("part", "layout", "from_devices", "to_devices", "points")}
        | {name: one["efficiencies"][-1][name] for name in ("measured", "predicted")}
        for one in (each["scaling"] or {"series": []})["series"]
    ]
    return kept


def _lines(values: Iterable[Any]) -> str:
    return "[\n" + ",\n".join(map(_line, values)) + "\n]"


def _line(value: Any) -> str:
    return json.dumps(rounded(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def rounded(value: Any) -> Any:
    """As it is kept."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
