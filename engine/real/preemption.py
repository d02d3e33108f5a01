"""A process that shares cores with other ranks -> one whose threads take none from a thread that runs when they wake.

A thread of gloo's that is told of a message while another thread has that socket's lock asks the kernel again at once,
until it has it. The lock is held for the microseconds of a send. But where ranks share a core, what is sent wakes a
thread of the receiver, which takes the core from the sender before it has unlocked; the answer wakes the sender's
thread of gloo, which now asks for as long as it is left the core, for milliseconds. On 2 cores that was a fifth of all
CPU time, and steps of 4 ranks took up to twice as long. Linux lets threads of its policy for batches wait until who
runs is done, or has had its time (sched(7), SCHED_BATCH).
"""

from __future__ import annotations

import contextlib
import os


def preempt_nobody() -> None:
    """To be called before the process starts threads, which do as it does."""
    with contextlib.suppress(OSError):  # a kernel with one policy only (gVisor): there it is slower, and no less right
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
