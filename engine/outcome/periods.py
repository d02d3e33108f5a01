"""Steps of which only every k-th has ranks meet (local SGD) -> whole periods, each as the mean step of its k.

Between two meetings no rank waits for another, and on shared cores they take turns as the kernel likes: how long one
step took by itself says little. From meeting to meeting all of them have done k steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine import modes
from engine.predict import Prediction
from engine.timeline import Span, Timeline

TIMES = ("start", "end")


def whole(steady: range, period: int) -> list[range]:
    """The periods all of whose steps are among these; where there is none, single steps."""
    first = -(-steady.start // period)
    found = [range(i * period, (i + 1) * period) for i in range(first, steady.stop // period)]
    return found or [range(step, step + 1) for step in steady]


def seconds(steps: list[list[dict]], period: range) -> float:
    """Of a mean step. Ranks begin and end a period together, so each is in its steps for as long as it takes; but where
    one did something else between two steps (it compares with one device, say) its peers waited for it in theirs. A
    single step is from the first rank's start, or if that is later the last rank's end of the one before, to its
    end."""
    if len(period) > 1:
        each = (sum(rows[step]["end"] - rows[step]["start"] for step in period) for rows in steps)
        return min(each) / len(period)
    (step,) = period
    begin = min(rows[step]["start"] for rows in steps)
    if step:
        begin = max(begin, max(rows[step - 1]["end"] for rows in steps))
    return max(rows[step]["end"] for rows in steps) - begin


def measured(timeline: Timeline, periods: Sequence[range]) -> Timeline:
    """The mean step of each of these periods, under the number of its last step."""
    if all(len(period) == 1 for period in periods):
        return timeline.where(np.isin(timeline["step"], [period.start for period in periods]))
    last = {step: period[-1] for period in periods for step in period}
    kept = timeline.where(np.isin(timeline["step"], list(last)))
    columns = {name: kept[name] / len(periods[0]) for name in TIMES}
    columns["step"] = np.array([last[step] for step in kept["step"].tolist()], dtype=np.int64)
    return replace(kept, columns=kept.columns | columns)


def predicted(prediction: Prediction) -> Timeline:
    """The mean step of a period, as `measured` has it."""
    if prediction.between is None:
        return prediction.timeline
    count, one = modes.period(prediction.job), prediction.between
    each = [*([one.timeline] * (count - 1)), prediction.timeline]
    begins = one.makespan * np.arange(count)
    columns = {name: np.concatenate([part[name] for part in each]) for name in Span._fields}
    columns["step"] = np.zeros_like(columns["step"])
    for name in TIMES:
        moved = [part[name] + begin for part, begin in zip(each, begins, strict=True)]
        columns[name] = np.concatenate(moved) / count
    return replace(prediction.timeline, columns=columns)
