"""What the kernel says in every step -> seconds for which this process had no core, and for which cores were busy at
all; its memory."""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path

BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: columns of /proc/stat, proc(5)


def waited() -> float | None:
    """Seconds for which this process's first thread was ready to run and had no core: second number of
    /proc/self/schedstat (Linux, Documentation/scheduler/sched-stats.rst); None where there is none."""
    try:
        return int(_read("/proc/self/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def busy(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds for which the cores that this process may use were not idle since the machine started, all together, in
    hundredths as the kernel counts; None where it does not."""
    try:
        lines = [line.split() for line in _read(stat).partition(b"intr")[0].splitlines()]
    except OSError:
        return None
    mine = {b"cpu%d" % i for i in os.sched_getaffinity(0)}
    ticks = [int(line[1 + i]) for line in lines if line[0] in mine for i in BUSY if len(line) > 1 + i]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def resident() -> int:
    """Bytes of this process in memory: proc(5), second field of /proc/self/statm, in pages."""
    return int(_read("/proc/self/statm").split()[1]) * resource.getpagesize()


def _read(path: str | Path) -> bytes:
    return os.pread(_opened(path, os.getpid()), 1 << 20, 0)


@functools.cache
def _opened(path: str | Path, pid: int) -> int:
    """Once a process: a step reads several files, and to open one takes ten times as long as to read it."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
