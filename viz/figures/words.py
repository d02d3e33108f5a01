"""An op, a number of seconds or bytes -> the words that a figure has for it, in the viewer's language.

A figure gets a `text(key, **values)` and has no prose of its own. All keys are in `KEYS`, for the catalogues' test.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.plan import COLLECTIVES, COMPUTE, KINDS, MESSAGES, PAYLOADS
from engine.timeline import NONE, Span
from viz.figures.flights import bucket_of

Text = Callable[..., str]

OP_KEYS = {kind: f"figure.op.{kind}" for kind in KINDS}
PAYLOAD_KEYS = {payload: f"figure.payload.{payload}" for payload in PAYLOADS}
LOOK_KEYS = {kind: OP_KEYS[kind] for kind in COMPUTE} | PAYLOAD_KEYS | {"other": "figure.payload.other"}
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def op_name(text: Text, kind: str) -> str:
    return text(OP_KEYS[kind]) if kind in OP_KEYS else kind


def look_name(text: Text, look: str) -> str:
    return text(LOOK_KEYS[look])


def describe(text: Text, span: Span, *, numbered: bool) -> str:
    """`forward · microbatch 3`, `all-reduce · gradients · bucket 0`. `numbered`: there are several microbatches."""
    words = [op_name(text, span.kind)]
    if span.lane != "compute" and span.payload:
        words.append(text(PAYLOAD_KEYS[span.payload]) if span.payload in PAYLOAD_KEYS else span.payload)
    if bucket_of(span.part) != NONE:
        words.append(text("figure.bucket", bucket=bucket_of(span.part)))
    elif span.part:
        words += [] if span.part == f"{span.payload}s" else [span.part]  # gradients once
    elif numbered and span.microbatch != NONE:
        words.append(text("figure.microbatch", microbatch=span.microbatch))
    return " · ".join(words)


def labels(text: Text, span: Span, *, numbered: bool) -> tuple[str, ...]:
    """What may stand in a span, the longest first. `numbered`: there are several microbatches to tell apart."""
    name, bucket = op_name(text, span.kind), bucket_of(span.part)
    if span.kind in MESSAGES or span.kind in COLLECTIVES:
        if bucket != NONE:
            return (f"{name} {bucket}", str(bucket))
        return (f"{name} {span.microbatch}", str(span.microbatch)) if numbered and span.microbatch != NONE else (name,)
    if span.part:
        piece = span.part.rpartition(".")[2]  # of block1.attention
        return tuple(dict.fromkeys((f"{name} {span.part}", span.part, piece)))
    if not numbered or span.microbatch == NONE:
        return (name,)
    return f"{name} {span.microbatch}", str(span.microbatch)  # which kind it is its colour says


def ranks_alike(text: Text, rank: int, count: int, total: int) -> str:
    """`count` of all ranks that do the same, by the first of them."""
    if count == 1:
        return text("figure.rank", rank=rank)
    return text("figure.all_ranks") if count == total else text("figure.alike", rank=rank, more=f"{count - 1:,}")


def rank_and_stage(text: Text, rank: int, stages: tuple[int, ...]) -> str:
    """`rank 1`, `rank 1 · stage 1`, `rank 0 · stages 0, 7`."""
    words = [text("figure.rank", rank=rank)]
    if len(stages) > 1:
        words.append(text("figure.stages", stages=", ".join(map(str, stages))))
    elif stages:
        words.append(text("figure.stage", stage=stages[0]))
    return " · ".join(words)


def unit_of(seconds: float) -> tuple[float, str]:
    """(seconds in one unit, its name) in which a length of time reads well."""
    return next((unit for unit in UNITS if abs(seconds) >= unit[0]), UNITS[-1] if seconds else UNITS[0])


def show_seconds(seconds: float) -> str:
    size, name = unit_of(seconds)
    return f"{seconds / size:.3g} {name}" if abs(seconds / size) < 999.5 else f"{seconds / size:.0f} {name}"


def show_error(error: float, digits: int = 0) -> str:
    """+12 %, −4 %, ±0 %: with a minus as wide as the plus, and not broken over two lines."""
    shown = f"{100 * error:+.{digits}f}"
    sign = "±" if not float(shown) else "+" if error > 0 else "\u2212"
    return f"{sign}{shown[1:]}\u00a0%"


def size_unit(most: float) -> tuple[float, str]:
    """(bytes in one unit, its name) of an axis that goes up to so many bytes."""
    return next(((1000.0**i, name) for i, name in reversed([*enumerate(SIZES)]) if most >= 1000.0**i), (1.0, SIZES[0]))


def show_bytes(size: int) -> str:
    """1,000 bytes are a kB, as on a data sheet."""
    value, power = float(size), 0
    while value >= 999.5 and power < len(SIZES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {SIZES[power]}"
