"""What the engine says in English -> the same in the visitor's language: lessons, rules that were broken, help.

English is the engine's own. Other languages have it in `engine.<language>.json`; where a phrase is missing there, such
as the text of an operating system's error, it stays English rather than being left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from engine import modes
from engine.analysis.words import name_of, object_of, sentence
from engine.asking.rules import UNSET, SpecError
from engine.lessons import Lesson
from engine.outcome.accuracy import REASONS
from engine.spec import Spec
from viz.locales import DEFAULT, Catalogue, read


def lesson(language: str, mode: str) -> Lesson:
    if language == DEFAULT:
        return modes.lesson(mode)
    entry, english = _words(language)["lessons"][mode], modes.lesson(mode)
    told = (("", step) if isinstance(step, str) else step for step in entry["steps"])
    steps = (replace(step, title=title, text=text) for step, (title, text) in zip(english.steps, told, strict=True))
    return Lesson(**(entry | {"steps": tuple(steps)}))


def help_of(language: str, setting: str) -> str:
    """One line on what a setting does."""
    if language == DEFAULT:
        return next(f.metadata["help"] for f in fields(Spec) if f.name == setting)
    return _words(language)["help"][setting]


def explain(language: str, error: SpecError) -> str:
    """The rule that was broken, the value, and what would work."""
    if language == DEFAULT:
        return str(error)
    words = _words(language)
    phrases = {
        name: phrase(language, error.values[name])
        for name, value in error.values.items()
        if name in ("wanted", "to", "reason", "missing") or value == UNSET
    }
    sentence = words["rules"][error.code].format_map(error.values | phrases)
    return sentence + (words["try"].format(suggest=error.values["suggest"]) if error.suggest else "")


def waiting(gap: Mapping[str, Any], time: str, text: Catalogue) -> str:
    """The sentence of a piece of an idle gap (`engine.analysis.words`)."""
    if text.language == DEFAULT:
        return sentence(gap, time)
    told = _words(text.language)["waits"]
    kind, name = gap["kind"] or "", name_of(gap)
    payload = f"figure.payload.{name}"
    values = {
        "kind": text(f"figure.op.{kind}") if kind else "",
        "name": text(payload) if payload in text else text(f"figure.op.{name}") if name else "",
        "microbatch": gap["microbatch"],
        "part": gap["part"],
    }
    what = told["objects"][object_of(gap)].format_map(values)
    values = {"rank": gap["rank"], "other": gap["other"], "time": time, "what": what}
    return told["sentences"][gap["code"]].format_map(values | {"cause": told["names"][gap["cause"]]})


def reasons(language: str) -> dict[str, Any]:
    """Why a step took longer than predicted, or less: by code, both sentences."""
    return REASONS if language == DEFAULT else _words(language)["reasons"]


def phrase(language: str, text: str) -> str:
    """A phrase that the engine puts into sentences, such as "a whole number" or "the mode ddp"."""
    if language == DEFAULT:
        return text
    words = _words(language)
    if text in words["phrases"]:
        return words["phrases"][text]
    for english, translated in words["beginnings"].items():
        if text.startswith(english):
            return translated.format(rest=text.removeprefix(english))
    return text


@functools.cache
def _words(language: str) -> dict[str, Any]:
    return read(f"engine.{language}")
