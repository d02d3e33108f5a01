"""Text -> a Fault: something that a run breaks on purpose, to show or to test what happens then."""

from __future__ import annotations

from dataclasses import dataclass

from engine.rules import SpecError

FAULTS = ("raise", "exit", "kill", "slow", "gradient")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something broken on purpose, on one rank from one step on (`slow`, `gradient`) or at it."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0


def parse_fault(text: str | None) -> Fault | None:
    """`raise@1:3` -> Fault("raise", rank 1, step 3); `slow@1:3:0.2` sleeps 0.2 s in each step from 3 on."""
    if text is None:
        return None
    wrong = SpecError("bad_fault", "fault", text, kinds=", ".join(FAULTS))
    kind, _, place = text.partition("@")
    parts = place.split(":")
    if kind not in FAULTS or len(parts) != (3 if kind == "slow" else 2):
        raise wrong
    try:
        rank, step = int(parts[0]), int(parts[1])
        seconds = float(parts[2]) if kind == "slow" else 0.0
    except ValueError:
        raise wrong from None
    if rank < 0 or step < 0 or not 0 <= seconds <= 60:
        raise wrong
    return Fault(kind, rank, step, seconds)
