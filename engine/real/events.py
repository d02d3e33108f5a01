"""Events of torch's profiler -> the communications among them: what each was, when, how many bytes, inside of what.

Limited to user scope, the profiler keeps PyTorch's own marks and each operation of gloo, which has its true start and
end, or the call of one of NCCL. What NCCL's kernels then took on the device is a mark of the same number there.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import NamedTuple

from torch.autograd import DeviceType

# Bytes of an item, by the name that the profiler gives its type.
ITEM_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "unsigned char": 1, "signed char": 1, "bool": 1,
    "c10::Half": 2, "c10::BFloat16": 2, "short": 2, "char": 1,
}  # fmt: skip

# NCCL's names that are not gloo's (ProcessGroupNCCL.cpp). A message's name goes on with its ends: `send 0->1`.
KINDS = {
    "_all_gather_base": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
}  # fmt: skip
COALESCED = "coalesced"  # several messages in one kernel of NCCL, which does not say which
BARRIERS = ("barrier", "all_reduce_barrier")


class Event(NamedTuple):
    """One communication that the profiler saw."""

    kind: str  # all_reduce, send, ...
    start: int  # ns; of NCCL when it was called
    end: int  # ns
    bytes: int
    inside: tuple[str, ...] = ()  # PyTorch's own marks around its start, outermost first
    whole: bool = False  # its numbers are whole ones of four bytes
    took: tuple[int, int] | None = None  # start and end of its kernel, on a GPU (ns)


def communications(seen: list, *, on_device: bool = False) -> list[Event]:
    """The communications among the events `seen`, by start. `on_device`: some of the events are a GPU's."""
    device = {}
    if on_device:
        device = {e.correlation_id(): _ends(e) for e in seen if not _is_host(e) and e.name().startswith("nccl:")}
        seen = filter(_is_host, seen)
    found: list[Event] = []
    marks: list[tuple[int, str]] = []  # end, name
    for start, name, one in sorted(((e.start_ns(), e.name(), e) for e in seen), key=itemgetter(0)):
        end = start + one.duration_ns()
        backend, _, kind = name.partition(":")
        if backend not in ("gloo", "nccl") or kind in BARRIERS:
            marks.append((end, name))
            continue
        marks = [mark for mark in marks if mark[0] >= start]
        inside = tuple(name for _, name in marks)
        took = device.get(one.correlation_id()) if device else None
        kind = KINDS.get(kind, kind.partition(" ")[0])
        found.append(Event(kind, start, end, _bytes(one), inside, whole="int" in one.dtypes(), took=took))
    return found


def _is_host(event) -> bool:
    return event.device_type() == DeviceType.CPU


def _ends(event) -> tuple[int, int]:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def _bytes(event) -> int:
    return sum(
        math.prod(shape) * ITEM_BYTES[kind]
        for shape, kind in zip(event.shapes(), event.dtypes(), strict=False)
        if shape
    )
