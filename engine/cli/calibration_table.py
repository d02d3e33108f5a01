"""A calibration -> a table of it, and a progress bar while it is made, for people at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.cli.tables import BAR, rows, seconds
from engine.cost.calibration import ON_GPU, Calibration


def calibration(made: Calibration, path: Path) -> str:
    """A few of its numbers, and where it is."""
    lines = []
    for name, value in made.rates.items():
        product = name.removeprefix(ON_GPU).startswith(("fp32", "bf16"))
        told = seconds(value) if name.endswith("latency") else f"{value / 1e9:.3g} {'GFLOP/s' if product else 'GB/s'}"
        lines.append((name.replace("_", " "), told))
    others = f"{made.disturbed:.2g} of {made.identity.cores} cores"
    if made.was_disturbed:
        others += ": measure again when they do not"
    lines += [
        ("other programs kept busy", others),
        ("classes of ops", str(len(made.ops))),
        ("took", seconds(made.seconds)),
        ("stored in", str(path)),
    ]
    return f"{made.identity.cpu}, {made.identity.cores} cores, torch {made.identity.torch}\n{rows(lines)}"


@contextmanager
def progress(*, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, on a terminal."""
    show = show and sys.stderr.isatty()

    def tell(done: int, of: int) -> None:
        if show:
            full = BAR * done // max(1, of)
            print(
                f"\r[{'#' * full}{'.' * (BAR - full)}] {done} of {of} measured\x1b[K",
                end="",
                file=sys.stderr,
                flush=True,
            )

    try:
        yield tell
    finally:
        if show:
            print(file=sys.stderr)
