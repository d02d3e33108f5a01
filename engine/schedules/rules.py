"""What a schedule asks of its numbers -> the rule that one of them breaks, and the nearest values that keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

# One sentence each, the rule and then the value, as in `engine.spec`.
SENTENCES = {
    "stages_of_schedule": "The schedule {schedule} needs stages-per-rank to be {wanted}; it is {value}.",
    "too_few_microbatches": "The schedule {schedule} needs at least as many microbatches as stages ({stages}); "
    "microbatches is {value}.",
    "rounds_of_microbatches": "The schedule {schedule} runs microbatches in rounds: as many rounds as devices "
    "({devices}) go into microbatches, and at least 1. microbatches must be a multiple of that, here {rounds}; "
    "it is {value}.",
    "two_way_devices": "The schedule {schedule} runs two pipelines against each other, so devices must be even; "
    "it is {value}.",
    "two_way_microbatches": "The schedule {schedule} shares microbatches between two pipelines: they must be even, and "
    "at least twice the devices ({devices}); microbatches is {value}.",
    "forwards_of_plan": "A plan has room for {limit} forwards in a step, and {stages} stages have one for each "
    "microbatch; microbatches is {value}.",
}
MOST_FORWARDS = 2**20  # in a step, of all stages: 16 stages of 65,536 microbatches take some 8 s and 2 GB


@dataclass(frozen=True, slots=True)
class Requirement:
    """A rule that does not hold: the setting to change, its value, and the nearest values that keep the rule.

    The fields are the arguments of SpecError; `str()` is the English sentence.
    """

    code: str
    setting: str
    value: int
    suggest: tuple[int, ...]
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sentence = SENTENCES[self.code].format(value=self.value, **self.values)
        return f"{sentence} Try: {', '.join(map(str, self.suggest))}."


def insist(broken: Requirement | None) -> None:
    """ValueError where a rule is broken."""
    if broken:
        raise ValueError(str(broken))


def stages_a_rank(schedule: str, value: int, wanted: int) -> Requirement:
    return Requirement(
        "stages_of_schedule", "stages_per_rank", value, (wanted,), {"schedule": schedule, "wanted": wanted}
    )


def at_least_the_stages(schedule: str, num_stages: int, num_microbatches: int) -> Requirement | None:
    """M >= stages, as torch's Schedule1F1B and ScheduleDualPipeV ask for."""
    if num_microbatches >= num_stages:
        return None
    values = {"schedule": schedule, "stages": num_stages}
    return Requirement("too_few_microbatches", "microbatches", num_microbatches, (num_stages,), values)


def whole_rounds(schedule: str, num_ranks: int, num_microbatches: int) -> Requirement | None:
    """M % R == 0 with R = max(1, M // P), as torch's two interleaved schedules ask for. So every M < 2P will do."""
    if num_microbatches % num_rounds(num_ranks, num_microbatches) == 0:
        return None
    suggest = nearest(lambda m: m % num_rounds(num_ranks, m) == 0, num_microbatches)
    values = {"schedule": schedule, "devices": num_ranks, "rounds": num_rounds(num_ranks, num_microbatches)}
    return Requirement("rounds_of_microbatches", "microbatches", num_microbatches, suggest, values)


def two_ways(schedule: str, num_ranks: int, num_microbatches: int) -> Requirement | None:
    """P even, M even and M >= 2P, as DeepSeek's DualPipe asks for."""
    if num_ranks % 2:
        suggest = nearest(lambda p: p % 2 == 0, num_ranks, 2)
        return Requirement("two_way_devices", "devices", num_ranks, suggest, {"schedule": schedule})
    if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        suggest = nearest(lambda m: m % 2 == 0 and m >= 2 * num_ranks, num_microbatches)
        values = {"schedule": schedule, "devices": num_ranks}
        return Requirement("two_way_microbatches", "microbatches", num_microbatches, suggest, values)
    return None


def room(num_stages: int, num_microbatches: int) -> Requirement | None:
    """Every op of a step is planned, one by one."""
    if num_stages * num_microbatches <= MOST_FORWARDS:
        return None
    values = {"limit": f"{MOST_FORWARDS:,}", "stages": num_stages}
    suggest = (max(1, MOST_FORWARDS // num_stages),)
    return Requirement("forwards_of_plan", "microbatches", num_microbatches, suggest, values)


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


def nearest(works: Callable[[int], bool], value: int, most: int = 3) -> tuple[int, ...]:
    """The numbers from 1 on nearest to `value` for which `works` is true, in rising order."""
    return tuple(sorted(islice(filter(works, _outward(value)), most)))


def _outward(value: int) -> Iterator[int]:
    """value, value - 1, value + 1, value - 2, ...; only numbers from 1 on."""
    for distance in count():
        for number in dict.fromkeys((value - distance, value + distance)):
            if number >= 1:
                yield number
