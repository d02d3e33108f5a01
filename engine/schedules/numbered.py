"""The steps of a rank with two stages, as words -> its actions, with microbatches counted up.

`F0` is the forward of the rank's first stage, `B1` the backward of its second, `I` and `W` the backward's halves. A
bare `W` is the oldest half that has not been done, of either stage. `F0&B1` are two that run as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine.schedules import Action

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def actions(words: Iterable[str], stages: Sequence[int], first: Sequence[int] = (0, 0)) -> list[Action]:
    """`first` has the microbatch that each of the two stages begins with."""
    out: list[Action] = []
    forward, backward = list(first), list(first)  # the next microbatch of each stage
    pending: deque[tuple[int, int]] = deque()  # (stage, microbatch) whose weights' half is to come
    for word in words:
        parts = word.split("&")
        for i, part in enumerate(parts):
            if part[0] == "W":
                chunk, microbatch = next(p for p in pending if part == "W" or p[0] == int(part[1]))
                pending.remove((chunk, microbatch))
            else:
                chunk, counter = int(part[1]), forward if part[0] == "F" else backward
                microbatch = counter[chunk]
                counter[chunk] += 1
                if part[0] == "I":
                    pending.append((chunk, microbatch))
            out.append(Action(KINDS[part[0]], stages[chunk], microbatch, i < len(parts) - 1))
    return out
