"""Text -> a Fault: something that a run breaks on purpose, to show or to test what happens then."""

from __future__ import annotations

from dataclasses import dataclass

from engine.asking.rules import SpecError

# What a rank does. Those of AT_START it does before the first step, LASTING ones from the step on, the rest in it.
KINDS = {
    "raise": "raises an exception",
    "exit": "exits without a word",
    "kill": "is killed by a signal",
    "leave": "ends its training, as one that has no more batches does",
    "hang": "lives on and says nothing",
    "slow": "sleeps so many seconds in each step",
    "gradient": "has gradients that are 1.5 times too large",
    "mean": "takes the mean of its loss over its own targets, of which some are masked, and not over those of all",
    "skip": "leaves its first layer out of the loss, so that this has no gradients",
    "alone": "calls a collective that the others do not call",
    "size": "gives a collective five numbers where the others give three",
    "model": "builds a model with a layer more",
    "shape": "builds a model with a parameter of another shape",
    "weights": "begins with other weights",
    "order": "shuffles every epoch like the first, without set_epoch",
}
FAULTS = tuple(KINDS)
AT_START = ("model", "shape", "weights", "order")
LASTING = ("slow", "gradient", "mean")
WITH_PEERS = ("mean", "skip", "alone", "size", "model", "shape", "weights")  # of one process alone they are no fault


@dataclass(frozen=True, slots=True)
class Fault:
    """Something broken on purpose, on one rank."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0


def parse_fault(text: str | None) -> Fault | None:
    """`raise@1:3` -> Fault("raise", rank 1, step 3); `slow@1:3:0.2` sleeps 0.2 s in each step from 3 on; what is
    wrong from the start is wrong in step 0."""
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
    if kind in AT_START and step:
        raise SpecError("bad_fault", "fault", text, suggest=[f"{kind}@{rank}:0"], kinds=", ".join(FAULTS))
    return Fault(kind, rank, step, seconds)
