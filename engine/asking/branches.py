"""Text -> the layers that ranks leave out of their passes, so that on these ranks they take no part in the loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine.asking.rules import SpecError
from engine.model.shapes import Layer
from engine.spec import Spec


def left_out(spec: Spec) -> dict[int, tuple[str, ...]]:
    """`0:block1,1:block2` -> {0: ("block1",), 1: ("block2",)}, of a spec that was checked."""
    found: dict[int, tuple[str, ...]] = {}
    for item in (spec.leave_out or "").split(",") if spec.leave_out else []:
        rank, _, layer = item.partition(":")
        found[int(rank)] = (*found.get(int(rank), ()), layer.strip())
    return found


def check(spec: Spec, layers: Sequence[Layer]) -> None:
    """SpecError unless ranks and layers are there, the model goes on without them, each layer is left to somebody, and
    gradients that one rank has not are not waited for."""
    if spec.leave_out is None:
        return
    can = [layer.name for before, layer in itertools.pairwise(layers) if layer.output == before.output]
    items = [item.partition(":") for item in spec.leave_out.split(",")]
    ranks = [rank.strip() for rank, _, _ in items]
    readable = all(rank.isascii() and rank.isdigit() and int(rank) < spec.devices for rank in ranks)
    if not readable or any(layer.strip() not in can for _, _, layer in items):
        good = [f"{spec.devices - 1}:{can[-1]}"] if can else []
        names = {"layers": ", ".join(can) or "none", "devices": spec.devices}
        raise SpecError("bad_leave_out", "leave_out", spec.leave_out, suggest=good, **names)
    found = left_out(spec)
    for name in can:
        if sum(name in of_rank for of_rank in found.values()) == spec.devices:
            raise SpecError("left_out_by_all", "leave_out", spec.leave_out, layer=name)
    if not spec.find_unused:
        names = {layer.name: ", ".join(f"{layer.name}.{name}" for name, _ in layer.params) for layer in layers}
        unused = "; ".join(f"rank {rank}: {', '.join(names[n] for n in found[rank])}" for rank in sorted(found))
        raise SpecError("unused_parameters", "find_unused", spec.find_unused, suggest=["true"], unused=unused)
