"""What a machine is: rates of a device, what a kernel costs beside them, and links, from the innermost group outwards.

Rates are those that good code reaches, since nothing ever runs at the peak of a data sheet; the peak is kept beside
them, for the fraction of it that is used. An impossible machine (no bandwidth, a negative latency) is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import dataclass, fields, replace
from numbers import Real
from statistics import NormalDist
from typing import Any

from engine.asking.rules import SpecError
from engine.cost.local import Local

EVERYBODY = 0  # ranks of a tier that reaches all of them
GAINS = {"bf16": "bf16_gain", "fp16": "fp16_gain", "fp8": "fp8_gain"}  # precision -> how much faster than fp32

FREE = ("rate", "flop_rate", "memory_rate", "link_rate", "load_rate", "flash_rate")  # may be infinite: it costs nothing
UNKNOWN = ("memory_size", "peak_flop_rate")  # may be None


def _checked(thing: object, positive: tuple[str, ...], nonnegative: tuple[str, ...]) -> None:
    """SpecError with the rule that a number of a machine breaks."""
    for name in positive:
        value, free = getattr(thing, name), name in FREE
        most = math.inf if free else sys.float_info.max
        if not (value is None and name in UNKNOWN) and not (_is_number(value) and 0 < value <= most):
            wanted = "a number greater than 0" + ("" if free else ", and finite")
            raise SpecError("impossible_machine", name, str(value), wanted=wanted)
    for name in nonnegative:
        value = getattr(thing, name)
        if not (_is_number(value) and 0 <= value <= sys.float_info.max):
            raise SpecError("impossible_machine", name, str(value), wanted="a number, 0 or more, and finite")


def _is_number(value: object) -> bool:
    """One that can be reckoned with as a float."""
    fits = isinstance(value, Real) and not isinstance(value, bool)
    return fits and (value == math.inf or abs(value) <= sys.float_info.max)


def most_of(number: int) -> float:
    """Of so many normal numbers the largest that is expected, in standard deviations from their mean (Blom 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds that the first byte takes, and bytes a second of one device in one direction.

    Where there are three ways of sending (NCCL's protocols) `latency` is that of a line, `chunk` that of a chunk, which
    is passed on whole, and `word` that of a word; and lines and words, which have flags in them, reach `lines` and
    `words` of the rate. `tree`: the three latencies (of a chunk, a line and a word) where several are waited for."""

    latency: float
    rate: float
    chunk: float | None = None
    word: float = 0.0
    lines: float = 120 / 128
    words: float = 0.5
    tree: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        seconds = ("latency", "word") if self.chunk is None else ("latency", "word", "chunk")
        _checked(self, ("rate", "lines", "words"), seconds)


@functools.lru_cache(maxsize=256)  # checked once, and asked for by each message
def _link(*numbers: Any) -> Link:
    return Link(*numbers)


@dataclass(frozen=True, slots=True)
class Switch:
    """Switches that sum: the part of a link's rate that reaches them, the seconds that a round waits for the ranks to
    be where it is, and the channels that take part in it, in one node and across several."""

    reached: float
    pause: float
    channels: int
    across: int

    def __post_init__(self) -> None:
        _checked(self, ("reached", "channels", "across"), ("pause",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Rates are per second, sizes in bytes, times in seconds.

    `flop_rate` is what a large matmul in fp32 (TF32 where a device has it) achieves, not the peak; in another precision
    it is `bf16_gain`, `fp16_gain` or `fp8_gain` times that. `op_overhead` is what every op costs beside its work, or on
    a GPU (`sms` > 0) every kernel of it. `cores`: where ranks are processes that share cores, how many there are; 0
    where every rank has a device of its own. `together`: how fast a core is while all are busy, beside one that is
    alone; `crowded`: the same where each has two processes, which find its caches full of each other's, whether they
    take turns or wait for each other.
    `uneven`: seconds of variance that a second of the same computing adds to when ranks are done with it. `unit`:
    forget the rates: a stage's forward takes 1 s, its backward `unit_backward`, everything else nothing.

    What begins with `link_` is of the link between neighbours: inside of a group of `node_size`
    ranks, or between all where that is 0. `outer`: further tiers, each with the number of ranks that it reaches; the
    last one reaches all. `block`: ranks of a group that a job gets, if it is larger than one and no number of groups.
    `spread`: the standard deviation of devices' rates of products, beside their mean.
    """

    name: str
    flop_rate: float
    memory_rate: float
    op_overhead: float
    link_latency: float
    link_rate: float
    link_chunk: float | None = None
    link_word: float = 0.0
    link_lines: float = 120 / 128
    link_words: float = 0.5
    link_tree: tuple[float, float, float] = (0.0, 0.0, 0.0)
    bf16_gain: float = 1.0
    fp16_gain: float = 1.0
    fp8_gain: float = 1.0
    cores: int = 0
    together: float = 1.0
    crowded: float = 1.0
    uneven: float = 0.0
    unit: bool = False
    unit_backward: float = 2.0
    memory_size: int | None = None
    node_size: int = EVERYBODY
    block: int = 0
    spread: float = 0.0
    outer: tuple[tuple[int, Link], ...] = ()
    peak_flop_rate: float | None = None  # of the data sheet, in the precision in which `flop_rate` is
    flash_rate: float = math.inf  # FLOPs a second of attention in one kernel, forward, in two bytes
    sms: int = 0  # multiprocessors, over which the tiles of a matmul are dealt out; 0: not a GPU
    trees: bool = False  # whether a collective may go along a tree, as in NCCL, where that is faster than a ring
    switch: Switch | None = None  # of a group of `node_size` ranks
    call_overhead: float = 0.0  # seconds of a collective or a message beside its rounds and bytes
    copies_tokens: bool = False  # tokens of tensor ranks are copied once gathered and before they are scattered
    stepwise_loss: bool = False  # each operation of a loss is a kernel, as in Megatron-LM
    fills: bool = False  # what a kernel writes is filled before, as PyTorch does where it has to be deterministic
    fused_experts: bool = False  # products of all experts of a rank are one kernel
    overlaps_exchanges: bool = False  # among experts, beside passes of another micro-batch
    sent_once: int = 0  # copies of a token to experts, of which one goes to each device, and to each node; 0: all go
    unfused: float = 1.0  # how often what kernels besides products move is moved where each operation is a kernel
    stepwise_optimizer: float = 1.0  # the same of the optimizer's step
    does: tuple[str, ...] = ()  # what only some software does, and moves bytes for (engine.cost.kernels)
    taken: tuple[tuple[str, int], ...] = ()  # (product, multiprocessors that communication beside it takes)
    load_rate: float = math.inf  # bytes a second at which a device gets its samples from its host
    precision: str | None = None  # in which it computes, where that was chosen
    local: Local | None = None  # where ops were measured one by one: what each class of them takes

    @property
    def tiers(self) -> tuple[tuple[int, Link], ...]:
        """(ranks that it reaches, link), innermost first; the last reaches everybody."""
        ways = (self.link_chunk, self.link_word, self.link_lines, self.link_words, self.link_tree)
        return ((self.node_size, _link(self.link_latency, self.link_rate, *ways)), *self.outer)

    def at(self, precision: str | None) -> Machine:
        """The same machine, computing in this precision."""
        gain = getattr(self, GAINS[precision]) if precision in GAINS else 1.0
        if gain == 1.0:
            return self
        peak = None if self.peak_flop_rate is None else self.peak_flop_rate * gain
        return replace(self, flop_rate=self.flop_rate * gain, peak_flop_rate=peak, precision=precision)

    def running(self, who: tuple[str, ...], precision: str | None) -> Machine:
        """The same machine, with what these take whose ops it runs (see engine.cost.local)."""
        if self.local is None:
            return self
        return replace(self, local=replace(self.local, who=who, precision=precision or self.local.precision))

    def placed(self, ranks: int) -> Machine:
        """The same machine, as a job of so many ranks lies on it. All wait for the slowest of their devices."""
        whole = self.node_size == EVERYBODY or ranks <= self.node_size or ranks % self.node_size == 0
        size = self.node_size if whole or not self.block or ranks % self.block else self.block
        slowest = 1 + self.spread * most_of(ranks)
        rates = {name: getattr(self, name) / slowest for name in ("flop_rate", "flash_rate")} if slowest > 1 else {}
        return replace(self, node_size=size, **rates)

    def threads(self, ranks: int) -> int:
        """Cores that each of `ranks` ranks computes on when they are shared out; 1 where there are not enough."""
        return max(1, self.cores // ranks)

    def crowding(self, ranks: int) -> float:
        """How many times as long the same computing takes where so many ranks share the cores, be they busy or not."""
        twice = min(max(ranks / self.cores - 1.0, 0.0), 1.0) if self.cores else 0.0
        return 1.0 / (1.0 - twice * (1.0 - self.crowded / self.together))

    def __post_init__(self) -> None:
        gains = tuple(f.name for f in fields(self) if f.name.endswith("_gain"))
        rates = (
            "flop_rate",
            "memory_rate",
            "link_rate",
            "load_rate",
            "peak_flop_rate",
            "flash_rate",
            "unit_backward",
            "together",
            "crowded",
            "unfused",
            "stepwise_optimizer",
        )
        rates = (*rates, "memory_size")
        counts = ("cores", "node_size", "block", "sms")
        shares = ("op_overhead", "call_overhead", "link_latency", "spread", "uneven")
        _checked(self, (*gains, *rates), (*counts, *shares))
        reach = [ranks for ranks, _ in self.tiers]
        if reach[-1] != EVERYBODY or any(a >= b for a, b in itertools.pairwise([EVERYBODY, *reach[:-1]])):
            wanted = "tiers that reach more and more ranks, the last of them (0) all"
            raise SpecError("impossible_machine", "tiers", reach, wanted=wanted)
