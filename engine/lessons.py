"""A mode's lesson: what a learner reads, and for each of its steps the ops of a plan or a timeline where it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan import AXES, COMPUTE, FLAT, KINDS, PAYLOADS, Op
from engine.timeline import Span

FORWARD = ("forward",)
BACKWARD = ("recompute", "backward", "backward_input", "backward_weight")
PASSES = FORWARD + BACKWARD


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a lesson: its name, a sentence, and which ops it happens in.

    Ops of `kinds`; of those that communicate, only the ones that move `payload` on `axis` (one or several of each), and
    only those whose part computes a `before` pass next: so a gather for forward is told from one for backward. Of all
    of them, only those whose part has a name that ends with `part` (one or several). A step without kinds happened
    earlier: it is seen in what the devices hold at the start, or with `payload="batch"` in the parts of the batch that
    wait before them.
    """

    title: str
    text: str
    kinds: tuple[str, ...] = ()
    payload: str | tuple[str, ...] = ()
    axis: str | tuple[str, ...] = ()
    before: str = ""
    part: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        for name in ("payload", "axis"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        unknown = ({*self.kinds} - {*KINDS}) | ({*self.payload} - {*PAYLOADS}) | ({*self.axis} - {*AXES, *FLAT})
        if unknown or self.before not in ("", "forward", "backward"):
            raise ValueError(f"{self.title}: no op has {', '.join(sorted(unknown)) or self.before}")

    def __str__(self) -> str:
        return f"{self.title}: {self.text}" if self.title else self.text

    def indices(self, ops: Sequence[Op | Span]) -> list[int]:
        """Where it happens in the ops or spans of one rank, given in their order."""
        found, following = [], {}
        for i in range(len(ops) - 1, -1, -1):
            op = ops[i]
            if op.kind in COMPUTE:
                following[op.part] = "backward" if op.kind in BACKWARD else op.kind
            if (
                op.kind in self.kinds
                and op.part.endswith(self.part)
                and (op.kind in COMPUTE or self._moves(op, following))
            ):
                found.append(i)
        return found[::-1]

    def _moves(self, op: Op | Span, following: dict[str, str]) -> bool:
        axis = op.axis if isinstance(op, Op) else op.group
        return (
            (not self.payload or op.payload in self.payload)
            and (not self.axis or axis in self.axis)
            and self.before in ("", following.get(op.part))
        )


OWN_BATCH = Step("Data assignment", "Each rank loads its own part of the batch.", kinds=("load",))


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a learner reads: the idea, the steps in order, when to use it, and where it ends."""

    title: str
    idea: str
    steps: tuple[Step, ...]
    use: str
    limits: str

    def __post_init__(self) -> None:
        steps = tuple(Step("", step) if isinstance(step, str) else step for step in self.steps)
        object.__setattr__(self, "steps", steps)
