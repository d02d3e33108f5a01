"""Text -> devices and links that are slower than the machine says, and what that does to groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.asking.rules import SpecError

MOST = 8  # of each: every one splits roles, along each axis of the mesh
LOW, HIGH = 1e-6, 1_000_000  # so that the times of a step stay numbers that can be added up


@dataclass(frozen=True, slots=True)
class Slow:
    """`ranks`: how many times as long each takes to compute. `links`: by its two ranks, the lower one first, how many
    times less bandwidth it has, and how many times the latency."""

    ranks: dict[int, float] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ranks or self.links)

    def apart(self, world_size: int) -> list[int] | None:
        """A number for each rank, as `engine.graph.roles.uniform` takes them: ranks of one number are as slow as each
        other, and every end of a slow link has its own. None where nothing is slow."""
        if not self:
            return None
        ends = {rank for link in self.links for rank in link}
        kinds = {rank: ("end", rank) if rank in ends else ("rank", self.ranks[rank]) for rank in {*ends, *self.ranks}}
        numbers = {kind: 1 + i for i, kind in enumerate(dict.fromkeys(kinds[rank] for rank in sorted(kinds)))}
        apart = [0] * world_size
        for rank, kind in kinds.items():
            apart[rank] = numbers[kind]
        return apart

    def computing(self, rank: int) -> float:
        """How many times as long the rank computes."""
        return self.ranks.get(rank, 1.0)

    def moving(self, group: Sequence[int]) -> float:
        """How many times as long a message or a collective takes among these ranks: all go at the pace of the slowest
        link. One that is faster than others helps only where it is the only one."""
        factors = [factor for (a, b), factor in self.links.items() if a in group and b in group]
        return max(factors if len(group) == 2 else [1.0, *factors], default=1.0)


def slow_ranks(text: str | None) -> dict[int, float]:
    """`5:2,9:1.5` -> {5: 2.0, 9: 1.5}. SpecError for text that reads otherwise."""
    found: dict[int, float] = {}
    for item in _items("slow_rank", text):
        rank, factor = _pair("slow_rank", text, item)
        (rank,) = _ranks("slow_rank", text, rank, 1)
        if rank in found:
            raise _wrong("slow_rank", text)
        found[rank] = factor
    return found


def slow_links(text: str | None) -> dict[tuple[int, int], float]:
    """`3-4:10` -> {(3, 4): 10.0}. SpecError for text that reads otherwise."""
    found: dict[tuple[int, int], float] = {}
    for item in _items("slow_link", text):
        ends, factor = _pair("slow_link", text, item)
        a, b = sorted(_ranks("slow_link", text, ends, 2))
        if a == b or (a, b) in found:
            raise _wrong("slow_link", text)
        found[a, b] = factor
    return found


def check(setting: str, text: str | None) -> None:
    """SpecError unless the text of slow_rank or slow_link reads as it should."""
    (slow_ranks if setting == "slow_rank" else slow_links)(text)


def of_spec(spec) -> Slow:
    """What a spec says is slow. SpecError where it names a rank that there is not."""
    ranks, links = slow_ranks(spec.slow_rank), slow_links(spec.slow_link)
    last = spec.devices - 1
    for rank, factor in ranks.items():
        if rank > last:
            raise _wrong("slow_rank", spec.slow_rank, [f"{last}:{factor:g}"])
    for (a, b), factor in links.items():
        if b > last:
            raise _wrong("slow_link", spec.slow_link, [f"{min(a, last - 1)}-{last}:{factor:g}"] if last else [])
    return Slow(ranks, links)


def _items(setting: str, text: str | None) -> list[str]:
    items = [] if text is None else text.split(",")
    if len(items) > MOST:
        raise _wrong(setting, text, [",".join(items[:MOST])])
    return items


def _pair(setting: str, text: str | None, item: str) -> tuple[str, float]:
    where, _, factor = item.partition(":")
    try:
        value = float(factor)
    except ValueError:
        raise _wrong(setting, text) from None
    if not LOW <= value <= HIGH:
        raise _wrong(setting, text, [f"{where}:2"])
    return where.strip(), value


def _ranks(setting: str, text: str | None, where: str, count: int) -> list[int]:
    parts = where.split("-")
    if len(parts) != count or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise _wrong(setting, text)
    return [int(part) for part in parts]


def _wrong(setting: str, text: str | None, suggest: Sequence[str] = ()) -> SpecError:
    return SpecError(f"bad_{setting}", setting, text, suggest=list(suggest), most=MOST, low=LOW, high=HIGH)
