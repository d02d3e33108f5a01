"""A job and a rank -> what PyTorch itself would call there, seen in this one process, which plays that rank.

Its process group moves nothing ("fake"), so a world may have any number of ranks. Calls are taken from torch's
dispatcher, where every collective passes, whoever calls it: not from our recorder, which is to be held to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._library.custom_ops import OPDEFS
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from engine import modes
from engine.job import Job
from engine.plan import FLAT, Mesh
from engine.real.recorder import Recorder
from engine.real.training import Place, Training

KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "send": "send",
    "recv_": "recv",
}
INPUTS = {"_allgather_base_": 1, "_reduce_scatter_base_": 1}  # which argument is what a rank gives, where not the first


class Call(NamedTuple):
    kind: str
    axis: str
    bytes: int
    peer: int | None = None


class Calls(TorchDispatchMode):
    """The communication of this process, in order."""

    def __init__(self, axis_of: dict[str, str]):
        super().__init__()
        self.axis_of, self.seen = axis_of, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:  # let it take its ops apart first: some of them communicate
            return NotImplemented
        name = op._schema.name.split("::")
        if name[0] in ("c10d", "_c10d_functional") and name[1] in KINDS:
            given = args[INPUTS.get(name[1], 0)]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            axis = next(self.axis_of[group] for group in map(_group_name, args) if group in self.axis_of)
            kind = KINDS[name[1]]
            peer = args[2] if kind in ("send", "recv") else None
            self.seen.append(Call(kind, axis, sum(t.nbytes for t in tensors), peer))
        if own := OPDEFS.get(op._schema.name):  # in an op of our own, what it calls passes the dispatcher without modes
            with self:
                return own._init_fn(*args, **(kwargs or {}))
        return op(*args, **(kwargs or {}))


def _group_name(argument: object) -> str | None:
    if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
        return dist.ProcessGroup.unbox(argument).group_name
    return argument if isinstance(argument, str) else None


def _axes(mesh: Mesh, rank: int) -> dict[str, str]:
    """The axis of each process group: the one whose ranks it has."""
    axes = {mesh.group(rank, axis): axis for axis in (*FLAT, *mesh.axes) if mesh.has(axis)}
    groups = dist.distributed_c10d._world.pg_group_ranks.items()
    return {
        group.group_name: axes[ranks] for group, ranks in ((g, tuple(sorted(r))) for g, r in groups) if ranks in axes
    }


def _agree(schedule: _PipelineSchedule, stages: list, *args) -> None:
    """What stages find out by asking each other: that all of them know the shapes of their messages."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@contextmanager
def playing(job: Job, rank: int, folder: Path) -> Iterator[tuple[Training, Calls]]:
    """The job's training as `rank` has it, and what it calls from now on."""
    dist.init_process_group("fake", rank=rank, world_size=job.spec.devices, store=FakeStore())
    ask = _PipelineSchedule._warmup_p2p
    _PipelineSchedule._warmup_p2p = _agree
    called = {name: value for name, value in vars(funcol).items() if callable(value)}
    try:
        recorder = Recorder(folder / "spans", rank, 0, enabled=False)
        place = Place(rank, job.spec.devices, torch.device("cpu"), recorder, folder)
        training = modes.run(job.spec.mode).training(job, place)
        with Calls(_axes(modes.plan(job).mesh, rank)) as calls:
            yield training, calls
    finally:
        _PipelineSchedule._warmup_p2p = ask
        dist.destroy_process_group()
        vars(funcol).update(called)  # without what announces them to a recorder
        _clear_sharding_prop_cache()  # it would find this world's groups again in an equal mesh of the next one
