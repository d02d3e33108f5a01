"""A file -> the settings in it, as plain values: one JSON object, with each name once; or a SpecError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.asking.rules import SpecError


def read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError("no_file", "spec", f"{path}: {error}") from None
    try:
        values = json.loads(text, object_pairs_hook=_each_once)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:  # not JSON; or a number or a nesting beyond what Python reads
        raise SpecError("not_json", str(path), f"{error}") from None
    if not isinstance(values, dict):
        raise SpecError("not_json", str(path), values)
    return values


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in JSON may have a name twice, of which Python would take the last."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise SpecError("given_twice", name, value)
        values[name] = value
    return values
