"""What a search found, as plain values -> a table for people; and a line on standard error while it goes on."""

from __future__ import annotations

import sys
import time
from typing import Any

from engine.cli.tables import percent, seconds, size
from engine.search import Search

REFRESH = 0.2  # seconds
TOO_LARGE = {
    "activations": "activations are too large",
    "model": "parameters, gradients and optimizer state are too large by themselves",
}
NAMES = {"compute": "compute", "recompute": "recomputation", "bubble": "bubble"}


class Progress:
    """`n of m`, and the fastest so far."""

    def __init__(self, *, show: bool):
        self.show, self.due = show, 0.0

    def __call__(self, search: Search, *, last: bool = False) -> None:
        now = time.monotonic()
        if not self.show or (now < self.due and not last):
            return
        self.due = now + REFRESH
        best = search.best
        told = f", fastest {seconds(best[0].step_time)}" if best else ""
        words = f"{search.decided:,} of {search.total:,} layouts, {search.simulated:,} simulated{told}"
        print(f"\r{words}\x1b[K", end="\n" if last else "", file=sys.stderr, flush=True)


def found(report: dict[str, Any]) -> str:
    """Rows, each with why it is slower than the first, and the command that gives it."""
    lines = [_counts(report)]
    if not report["best"]:
        return "\n".join([*lines, _nothing(report)])
    lines += [_tied(report), ""]
    for number, row in enumerate(report["best"], 1):
        lines.append(f"{number:>3}{'~' if row['tied'] and number > 1 else ' '} {layout(row)}")
        speed = f", {row['tokens_per_second']:,.0f} tokens/s" if row["tokens_per_second"] else ""
        speed += f", MFU {percent(row['mfu'])}" if row["mfu"] is not None else ""
        room = f" of {size(row['capacity'])}" if row["capacity"] else ""
        lines.append(f"     step {seconds(row['step_time'])}{speed}; memory {size(row['peak_memory'])}{room}")
        idle, exposed = row["bubble_fraction"], row["exposed_communication_fraction"]
        lines.append(f"     bubble {percent(idle)}, exposed communication {percent(exposed)}")
        if number > 1:
            lines.append(f"     {slower(row)}")
        lines.append(f"     {row['command']}")
    return "\n".join(lines)


def layout(row: dict[str, Any]) -> str:
    """`hybrid: pp 4, dp 16, tp 8; interleaved_1f1b, 5 stages a rank, 16 microbatches; recompute selective`."""
    settings = row["settings"]
    mesh = ", ".join(f"{axis} {degree}" for axis, degree in row["mesh"].items())
    words = [f"{row['mode']}: {mesh}" if mesh else row["mode"]]
    if row["schedule"]:
        stages = f", {row['stages_per_rank']} stages a rank" if (row["stages_per_rank"] or 1) > 1 else ""
        words.append(f"{row['schedule']}{stages}")
    if row["microbatches"]:
        words.append(f"{row['microbatches']} microbatches")
    if row["accumulate"] > 1:
        words.append(f"accumulate {row['accumulate']}")
    words += ["sequence parallel"] if settings.get("sequence_parallel") else []
    words += ["whole experts"] if settings.get("expert_tp") == 1 else []
    words += [f"recompute {row['recompute']}"] if row["recompute"] not in (None, "none") else []
    return "; ".join(words)


def slower(row: dict[str, Any]) -> str:
    """`0.31 s slower: tp +0.25 s, bubble +0.1 s, compute -0.04 s`, the largest first."""
    by = row["slower_by"]
    parts = sorted(by["parts"].items(), key=lambda part: -abs(part[1]))
    told = [(name, value) for name, value in parts if abs(value) >= 0.005 * row["step_time"]][:4]
    words = ", ".join(f"{_name(name)} {'+' if value > 0 else '-'}{seconds(abs(value))}" for name, value in told)
    return f"{seconds(by['seconds'])} slower than 1" + (f": {words}" if words else "")


def _name(part: str) -> str:
    return NAMES.get(part, f"exposed {part}")


def _counts(report: dict[str, Any]) -> str:
    number = report["layouts"]
    text = f"{number['total']:,} layouts: {number['refused']:,} refused, {number['too_large']:,} too large, "
    text += f"{number['cut']:,} cut since none of them can be faster, {number['simulated']:,} simulated"
    text += f"; stopped with {number['left']:,} left" if not report["finished"] else ""
    rules = sorted(report["refused"].items(), key=lambda rule: -rule[1]["layouts"])
    return text + "".join(f"\n  refused by {rule}: {one['layouts']:,}, as: {one['first']}" for rule, one in rules)


def _nothing(report: dict[str, Any]) -> str:
    if not report["too_large"]:
        return "There is no layout."
    least = report["smallest"]
    smallest = f" The smallest of those that were looked at by themselves needs {size(least)} or more." if least else ""
    so_far = "" if report["finished"] else " so far"
    why = [f"in {number:,} {TOO_LARGE[name]}" for name, number in sorted(report["too_large"].items())]
    return f"None{so_far} fits into {size(report['capacity'])}: {', '.join(why)}.{smallest}"


def _tied(report: dict[str, Any]) -> str:
    if report["error"] is None:
        return "How far off predictions for this machine are is not known: run the first few."
    tied = sum(row["tied"] for row in report["best"])
    error = f"predictions are off by {percent(report['error'])} on average"
    if tied == 1:
        return f"The first is faster than the others by more than {error}."
    return f"The first {tied} cannot be told apart (~): {error}."
