"""What README and docs name is there: files by their path, and where links lead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
NAMED = re.compile(r"`((?:engine|viz|tests|bench|docs|runs|\.ci)/[\w./-]+)`|\]\(([^)#]+)\)")


def missing(document: Path) -> list[str]:
    paths = [path or link for path, link in NAMED.findall(document.read_text()) if not link.startswith("http")]
    return [path for path in paths if not (ROOT / path).exists() and not (document.parent / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_a_document_names_are_there(document):
    assert missing(document) == []


def test_a_name_of_no_file_is_found(tmp_path):
    (tmp_path / "page.md").write_text(
        "See `engine/nothing.py` and [this](nowhere.md), `engine/spec.py`, [that](page.md)."
    )
    assert missing(tmp_path / "page.md") == ["engine/nothing.py", "nowhere.md"]
