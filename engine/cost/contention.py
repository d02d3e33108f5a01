"""A program's seconds, and what of it communicates in the background -> the same, with compute slowed meanwhile.

NCCL moves data with kernels of its own, a block on a multiprocessor for each of its channels, which the compute beside
it does not have; so while both run compute goes on with the rest (NVIDIA, NCCL user guide, NCCL_MAX_CTAS). Messages of
a pipeline take few channels, and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

CHANNELS = 20  # of a ring or a tree over NVLink: NCCL opens 16 to 24 of them on these machines


def slowed(seconds: Sequence[float], background: Sequence[bool], computes: Sequence[bool], share: float) -> list[float]:
    """`share`: of the multiprocessors, those that communication takes. What is in the background goes one after the
    other, and beside whatever is computed from then on."""
    out, waiting = list(seconds), 0.0
    for i, length in enumerate(seconds):
        if background[i]:
            waiting += length
        elif computes[i] and waiting:
            # With (1 - share) of the rate; when communication ends first, the rest goes at the whole rate.
            both = length / (1 - share)
            out[i] = both if both <= waiting else length + waiting * share
            waiting = max(0.0, waiting - out[i])
    return out
