"""A communication op, the size of its group and a machine -> seconds, and the bytes that each rank puts on its links.

The alpha-beta model of ring algorithms: n-1 rounds (2(n-1) for an all-reduce), each moving 1/n of the tensor
(Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002; Thakur et al. 2005, doi 10.1177/1094342005051521).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cost.machine import Machine
from engine.plan import Op


def rounds_and_bytes(op: Op, group: int) -> tuple[float, float]:
    """(messages one after the other, bytes a rank sends in all) for one op in a group of `group` ranks.

    `op.bytes` is the tensor that this rank passes in; for all_gather that is its shard, for reduce_scatter the whole.
    """
    n, size = group, op.bytes
    if n <= 1:
        return 0, 0.0
    if op.kind == "all_reduce":
        return 2 * (n - 1), 2 * (n - 1) / n * size
    if op.kind == "all_gather":
        return n - 1, (n - 1) * size
    if op.kind in ("reduce_scatter", "all_to_all", "scatter", "gather"):
        return n - 1, (n - 1) / n * size
    if op.kind in ("broadcast", "reduce"):
        return n - 1, float(size)  # a pipelined ring: every rank passes the whole tensor on once
    raise ValueError(f"not a collective: {op.kind}")


def communication_seconds(op: Op, group: Sequence[int], machine: Machine) -> float:
    """Seconds of a collective among the ranks of `group`, or of a message between two."""
    return message_seconds(op.bytes, machine) if op.kind == "send" else collective_seconds(op, len(group), machine)


def message_seconds(size: int, machine: Machine) -> float:
    return machine.link_latency + size / machine.link_rate


def collective_seconds(op: Op, group: int, machine: Machine) -> float:
    rounds, sent = rounds_and_bytes(op, group)
    return rounds * machine.link_latency + sent / machine.link_rate


def busy_cores(op: Op, group: int, machine: Machine) -> float:
    """Cores that the op keeps busy meanwhile, on all its members together, where ranks share a machine's cores."""
    return 0.0 if machine.local is None else machine.local.communication(op, group)[1]
