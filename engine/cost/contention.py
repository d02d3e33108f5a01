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


def hidden(
    seconds: Sequence[float], exchanges: Sequence[bool], forward: Sequence[bool], backward: Sequence[bool]
) -> list[float]:
    """Exchanges among experts that travel beside passes of another micro-batch, which a rank computes in turns with
    this one's (Megatron-LM, overlap_moe_expert_parallel_comm; DualPipe: DeepSeek-AI 2024, arXiv:2412.19437, section
    3.2.1): -> what of them is waited for. From a rank's first backward pass to its last forward pass that is what they
    take longer than all that it computes meanwhile; before and after it has nothing else to do."""
    begins = next((i for i, yes in enumerate(backward) if yes), len(seconds))
    ends = max((i for i, yes in enumerate(forward) if yes), default=-1)
    steady = range(begins, ends + 1)
    computed = sum(seconds[i] for i in steady if forward[i] or backward[i])
    sent = sum(seconds[i] for i in steady if exchanges[i])
    left = max(0.0, 1 - computed / sent) if sent else 0.0
    return [length * left if exchanges[i] and i in steady else length for i, length in enumerate(seconds)]
