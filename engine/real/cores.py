"""What the kernel says -> seconds for which this process had no core, and seconds for which cores were busy at all."""

from __future__ import annotations

import os
from pathlib import Path

BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: columns of /proc/stat, proc(5)


def waited() -> float | None:
    """Seconds for which this process's first thread was ready to run and had no core: second number of
    /proc/self/schedstat (Linux, Documentation/scheduler/sched-stats.rst); None where there is none."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def busy(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds for which the cores that this process may use were not idle since the machine started, all together, in
    hundredths as the kernel counts; None where it does not."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    ticks = [int(line[1 + i]) for line in lines if line[0] in mine for i in BUSY if len(line) > 1 + i]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
