"""A machine's name -> its numbers: rates of a device, latency and bandwidth of a link, cores that ranks share."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace

from engine.rules import SpecError, closest


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Rates are per second, sizes in bytes, times in seconds.

    `flop_rate` is what a matmul in fp32 achieves, not the peak; in bf16 it is `bf16_gain` times that. `cores`: where
    ranks are processes that share cores, how many there are; 0 where every rank has a device of its own. `together`:
    how fast a core is while all are busy, beside one that is alone. `unit`: forget the rates: a stage's forward takes
    1 s, its backward `unit_backward`, everything else nothing.
    """

    name: str
    flop_rate: float
    memory_rate: float
    op_overhead: float
    link_latency: float
    link_rate: float
    bf16_gain: float = 1.0
    cores: int = 0
    together: float = 1.0
    unit: bool = False
    unit_backward: float = 2.0

    def at(self, precision: str | None) -> Machine:
        """The same machine, computing in this precision."""
        return replace(self, flop_rate=self.flop_rate * self.bf16_gain) if precision == "bf16" else self

    def threads(self, ranks: int) -> int:
        """Cores that each of `ranks` ranks computes on when they are shared out; 1 where there are not enough."""
        return max(1, self.cores // ranks)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("flop_rate", "memory_rate", "link_rate", "bf16_gain", "together") and not value > 0:
                raise ValueError(f"{f.name} must be greater than 0; it is {value}")
            if f.name in ("op_overhead", "link_latency", "cores") and not 0 <= value < math.inf:
                raise ValueError(f"{f.name} must be 0 or more, and finite; it is {value}")


def _catalogue() -> dict[str, Machine]:
    unit = Machine(
        name="unit",
        flop_rate=math.inf,
        memory_rate=math.inf,
        op_overhead=0.0,
        link_latency=0.0,
        link_rate=math.inf,
        unit=True,
    )
    # As pictures of schedules are often drawn: a slot for each pass, forward or backward.
    slots = replace(unit, name="slots", unit_backward=1.0)
    # A core of a small cloud machine, and gloo over loopback, as bench/local_rates.py measured them.
    local = Machine(
        name="local",
        flop_rate=19e9,  # the mean of the three models' whole layers
        memory_rate=14e9,
        op_overhead=60e-6,
        link_latency=2e-3,
        link_rate=2.2e9,
        cores=os.cpu_count() or 1,
    )
    # NVIDIA A100 and H100 SXM data sheets: TF32 peak 156 and 495 TFLOP/s, of which a good matmul reaches about 60 %
    # (Narayanan et al. 2021, arXiv:2104.04473, table 1, reports 44 to 52 % of peak for whole steps); memory 2.0 and
    # 3.35 TB/s; bf16 twice the rate of TF32; NVLink 300 and 450 GB/s in one direction.
    on_gpus = {"link_latency": 5e-6, "bf16_gain": 2.0}
    a100 = Machine(name="a100", flop_rate=94e12, memory_rate=1.7e12, op_overhead=5e-6, link_rate=240e9, **on_gpus)
    h100 = Machine(name="h100", flop_rate=297e12, memory_rate=2.8e12, op_overhead=4e-6, link_rate=360e9, **on_gpus)
    return {m.name: m for m in (local, a100, h100, unit, slots)}


MACHINES = _catalogue()


def machine(name: str) -> Machine:
    if name not in MACHINES:
        raise SpecError("unknown_name", "machine", name, suggest=closest(name, MACHINES))
    return MACHINES[name]
