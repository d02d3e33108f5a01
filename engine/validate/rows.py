"""A file of published measurements -> its rows, as they were published; what cannot be a row is named, not dropped.

The file is one JSON object with `entries`, each an object with an id, the set it belongs to (`group`), the model,
layout, batch and hardware it was measured with, and `metrics`: a list of {name, value, unit}. `meta` may hold the
conventions of the collection, and the error of a one-constant model to compare with.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.asking.rules import SpecError

VERIFIED = "read from source text"  # the confidence of figures that were read in the source itself
MEASURED = "measured"


class Unusable(Exception):
    """Why a row cannot be compared. `reason` is said alike of all rows of its kind; `detail` is this row's own part."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    value: float | bool
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured result as published: nothing filled in, nothing converted."""

    id: str
    group: str
    confidence: str = ""
    kind: str = MEASURED
    source: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    precision: str | None = None
    recompute: str | None = None
    notes: str = ""
    metrics: tuple[Metric, ...] = ()

    def metric(self, *names: str) -> Metric | None:
        """The first of these that the row has."""
        by_name = {metric.name: metric for metric in self.metrics}
        return next((by_name[name] for name in names if name in by_name), None)


@dataclass(frozen=True, slots=True)
class Published:
    rows: tuple[Row, ...]
    broken: tuple[tuple[str, str, Unusable], ...]  # (id, set, why), of entries that are no rows
    meta: dict[str, Any]


def read(path: str | Path) -> Published:
    """SpecError where the file cannot be read, is not JSON or has no entries."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError("no_file", "file", f"{path}: {error}") from None
    try:
        document = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise SpecError("no_measurements", str(path), f"it is not JSON ({error})") from None
    return parse(document, str(path))


def _finite(text: str) -> float | None:
    """NaN and what is too large for a float are no measurements, and rows are printed as JSON, which has neither."""
    return value if math.isfinite(value := float(text)) else None


def parse(document: Any, name: str) -> Published:
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise SpecError("no_measurements", name, "it is not an object with a list of entries")
    meta = document.get("meta")
    rows, broken, seen = [], [], set()
    for place, entry in enumerate(entries):
        named, group = f"entry {place + 1}", "(no set)"
        if isinstance(entry, dict):
            named, group = str(entry.get("id") or named), str(entry.get("group") or group)
        try:
            if named in seen:
                raise Unusable("an entry of this id came before")
            seen.add(named)
            rows.append(_row(entry, named, group))
        except Unusable as why:
            broken.append((named, group, why))
    return Published(tuple(rows), tuple(broken), meta if isinstance(meta, dict) else {})


def _row(entry: Any, named: str, group: str) -> Row:
    if not isinstance(entry, dict):
        raise Unusable("the entry is not an object", type(entry).__name__)
    parts = {}
    for name in ("model", "parallel", "batch", "hardware"):
        value = entry.get(name)
        if value is not None and not isinstance(value, dict):
            raise Unusable("a part of the entry is not an object", name)
        parts[name] = value or {}
    for name in ("schedule", "precision", "recompute"):
        value = entry.get(name)
        parts[name] = None if value is None else str(value)
    metrics = entry.get("metrics")
    if not isinstance(metrics, list):
        raise Unusable("the entry has no list of metrics")
    source = entry.get("source")
    return Row(
        id=named,
        group=group,
        confidence=str(entry.get("confidence") or ""),
        kind=str(entry.get("kind") or MEASURED),
        source=_source(source),
        notes=str(entry.get("notes") or ""),
        metrics=tuple(_metric(metric) for metric in metrics),
        **parts,
    )


def _source(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(str(value[key]) for key in ("paper", "repo", "commit", "file", "where") if value.get(key))
    return str(value or "")


def _metric(value: Any) -> Metric:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unusable("a metric has no name")
    number = value.get("value")
    if isinstance(number, bool):
        return Metric(value["name"], number, str(value.get("unit") or ""))
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise Unusable("a metric is not a finite number", value["name"])
    return Metric(value["name"], float(number), str(value.get("unit") or ""))
