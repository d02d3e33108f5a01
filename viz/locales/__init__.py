"""A language -> its catalogue: a key and the values in it go in, the sentence to show comes out.

A catalogue is the union of the JSON files of its language in this folder: `en.json` and `zh.json` for the pages,
`figures.en.json` and `figures.zh.json` for what is drawn. Lessons, rules and help are English in the engine itself;
`engine.zh.json` has them in Chinese (`viz.locales.engine`). Tests hold that no language lacks a key.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

LANGUAGES = {"en": "English", "zh": "中文"}
DEFAULT = "en"
FOLDER = Path(__file__).parent


class Catalogue:
    """Called with a key, it returns the sentence: `text("run.progress", step=3, total=20)`. KeyError for an unknown key."""

    def __init__(self, language: str, entries: dict[str, str]):
        self.language, self.entries = language, entries

    def __call__(self, key: str, **values: Any) -> str:
        return self.entries[key].format_map(values)

    def name(self, setting: str, value: str) -> str:
        """What a choice is called; a machine that somebody calibrated has no other name than its own."""
        key = f"{setting}.{value}"
        return self(key) if key in self else value

    def __contains__(self, key: str) -> bool:
        return key in self.entries


@functools.cache
def text(language: str) -> Catalogue:
    """The catalogue of a language in LANGUAGES; that of English for any other."""
    language = language if language in LANGUAGES else DEFAULT
    return Catalogue(language, read(language) | read(f"figures.{language}"))


def read(name: str) -> dict[str, Any]:
    """One file of this folder."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
