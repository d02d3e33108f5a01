"""A setting as it is declared -> its type; a text, or any value -> the value that it may have, or a SpecError."""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from dataclasses import field
from typing import Any

from engine.asking.rules import SpecError, closest

WANTED = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "whole numbers like 2,1,1",
}


def setting(
    default: Any, help: str, *, choices: tuple = (), low: float | None = None, high: float | None = None
) -> Any:
    """A field of `Spec`, whose type is the annotation itself, no text of it."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@functools.cache
def type_of(f: Any) -> tuple[type, bool]:
    """The plain type of a field (int, float, str, bool or tuple), and whether it may be None."""
    optional = isinstance(f.type, types.UnionType)
    hint = next(a for a in typing.get_args(f.type) if a is not type(None)) if optional else f.type
    return (tuple if typing.get_origin(hint) is tuple else hint), optional


def parse_text(f: Any, text: str) -> Any:
    """The value that a text stands for, by the field's type; the range is checked by Spec itself."""
    kind, optional = type_of(f)
    wrong = SpecError("wrong_type", f.name, text, wanted=WANTED[kind])
    if optional and text == "":
        return None
    if kind is bool:
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise wrong
    try:
        if kind is tuple:
            return tuple(int(part) for part in text.split(","))
        return kind(text)
    except ValueError:
        raise wrong from None


def as_text(value: Any) -> str:
    """What `parse_text` makes the value of."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def checked(f: Any, value: Any) -> Any:
    """The value as the field has it: of its type, one of its choices, within its limits."""
    kind, optional = type_of(f)
    if value is None and optional:
        return None
    if kind is tuple and isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return tuple(value)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if kind is tuple or type(value) is not kind:
        shown = json.dumps(value) if isinstance(value, str) else value  # "4" is text, and looks like a number
        raise SpecError("wrong_type", f.name, shown, wanted=WANTED[kind])
    limits = f.metadata
    if kind is float and not math.isfinite(value):
        raise SpecError("not_finite", f.name, str(value), suggest=[] if f.default is None else [f.default])
    if limits["choices"] and value not in limits["choices"]:
        near = closest(value, limits["choices"])
        raise SpecError("unknown_name", f.name, value, suggest=near or limits["choices"])
    if limits["low"] is not None and not limits["low"] <= value <= limits["high"]:
        nearest = limits["low"] if value < limits["low"] else limits["high"]
        raise SpecError("out_of_range", f.name, value, suggest=[nearest], low=limits["low"], high=limits["high"])
    return value
