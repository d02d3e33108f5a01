"""Rows of collectives measured alone (nccl-tests) -> seconds, measured and predicted by the cost model.

nccl-tests prints the bus bandwidth: for an all-reduce of S bytes over n ranks 2 (n - 1) / n S / seconds, which a ring
moves over each link whatever n is (NVIDIA, nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.cost.collectives import collective_seconds
from engine.plan import Op
from engine.spec import MAX_DEVICES
from engine.validate import words
from engine.validate.case import PER_NODE, whole, words_of
from engine.validate.rows import Row, Unusable
from engine.validate.sources import is_of_the_host
from engine.validate.spec_of import machine_with

BUSBW = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)_busbw")
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
RATES = {"GB/s": 1e9, "GiB/s": 2.0**30, "MB/s": 1e6}


class Call(NamedTuple):
    row: Row
    kind: str
    ranks: int
    size: float  # bytes, as nccl-tests counts them: the whole tensor
    measured: float  # seconds
    predicted: float
    inferred: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def is_collective(row: Row) -> bool:
    return any(BUSBW.fullmatch(metric.name) for metric in row.metrics)


def call_of(row: Row) -> Call:
    """Unusable where the row does not say how much was sent, by how many, or on what."""
    metric = next(metric for metric in row.metrics if BUSBW.fullmatch(metric.name))
    kind = KINDS[BUSBW.fullmatch(metric.name)[1].replace("_", "")]
    message = row.metric("message_bytes")
    if message is None or not message.value > 0:
        raise Unusable("not published: bytes of the message")
    if is_of_the_host(row, message.value):
        raise Unusable("the time is its host's: the source has the same for 1, 2, 3 and 4 MiB")
    if metric.unit not in RATES:
        raise Unusable("a metric's unit is not known", f"{metric.name} in {metric.unit or 'none'}")
    ranks = whole(row.parallel, "gpus")
    if ranks is None or ranks < 2:
        raise Unusable("not published: number of devices")
    if ranks > MAX_DEVICES:
        raise Unusable("more devices than Lockstep plans for", str(ranks))
    name, inferred = words_of(row.hardware, "gpu") or "", []
    per_node = whole(row.hardware, "gpus_per_node")
    if per_node is None:
        per_node = PER_NODE
        inferred.append(f"{PER_NODE} devices in a node")
    network = words.network_rate(words_of(row.hardware, "inter"), per_node)
    if network is None and ranks > per_node:
        inferred.append("network between nodes as the machine catalogue has it")
    machine = machine_with(words.device(name), per_node=per_node, network_rate=network)
    share = (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    given = message.value / ranks if kind == "all_gather" else message.value  # what this rank passes in
    op = Op(kind=kind, axis="dp", bytes=round(given))
    seconds = collective_seconds(op, ranks, machine)
    measured = share * message.value / (metric.value * RATES[metric.unit])
    return Call(row, kind, ranks, message.value, measured, seconds, tuple(inferred))
