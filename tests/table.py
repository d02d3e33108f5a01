"""What the tests have recorded of each mode -> the table of the README, between its markers.

    python -m tests.table            # write it, from the records of the last test session
    python -m tests.table --check    # only compare: exit status 1 where the README says something else

`tests.engine.proof` makes the records; a session begins without any. `make table` runs the tests that prove something
of a mode, then this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.spec import MODES

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "test-results" / "proof.jsonl"
README = ROOT / "README.md"
BEGIN, END = "<!-- table of the modes: made by `make table` -->", "<!-- end of the table -->"
HEAD = ("mode", "planned on", "run for real on", "models", "ops as planned", "equal to one device")


def record(**values: Any) -> None:
    """Keep one finding. A line is written at once, so that tests that run side by side do not mix theirs."""
    RECORDS.parent.mkdir(exist_ok=True)
    with RECORDS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()] if RECORDS.exists() else []


def table(records: Iterable[dict[str, Any]]) -> str:
    """A row a mode, whether anything was recorded of it or not."""
    records = list(records)
    lines = [_row(HEAD), _row("---" for _ in HEAD)]
    for mode in MODES:
        planned = [r for r in records if r["mode"] == mode and r["what"] == "plan"]
        runs = [r for r in records if r["mode"] == mode and r["what"] == "run"]
        models = ", ".join(f"`{model}`" for model in sorted({r["model"] for r in runs}))
        verdicts = [_of(runs, name) for name in ("conformance", "parity")]
        lines.append(_row((f"`{mode}`", _counts(planned), _counts(runs), models or "-", *verdicts)))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _counts(records: list[dict[str, Any]]) -> str:
    """`1-4, 8 ranks`"""
    numbers = sorted({r["devices"] for r in records})
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    shown = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{', '.join(shown)} rank{'' if numbers == [1] else 's'}" if numbers else "-"


def _of(runs: list[dict[str, Any]], name: str) -> str:
    """`7 of 7 runs`; a mode that differs by design may equal a simulation of that design."""
    design = sum(r[name] == "by design" for r in runs)
    if design:
        return f"no, by design; {design} of {len(runs)} runs equal to its simulation"
    return f"{sum(r[name] is True for r in runs)} of {len(runs)} runs" if runs else "-"


def in_readme() -> str:
    return README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def main() -> int:
    made = table(read())
    if "--check" in sys.argv[1:]:
        if made == in_readme():
            return 0
        print(f"The README's table of the modes is not what the last test session recorded:\n{made}\nRun: make table")
        return 1
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
