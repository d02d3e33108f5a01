"""A training between two steps <-> a folder that torch.distributed.checkpoint writes, for any mode and number of ranks.

What is kept are tensors alone, by the names of the whole model: `model.fc1.weight`, `optimizer.fc1.weight.exp_avg`. A
DTensor is written shard by shard, what several ranks hold alike once, and what only one rank holds (a stage, the state
that a ZeroRedundancyOptimizer's owner has) by that rank. Whoever loads asks for the names, or parts of them, that it
holds, so a checkpoint fits every other way of cutting the same model.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.optim import ZeroRedundancyOptimizer

from engine import checkpoints
from engine.job import Job
from engine.real.parts import updated, whole_state

MODEL, OPTIMIZER = "model.", "optimizer."
# All that the index of a checkpoint is made of (`.metadata`, a pickle). A file that names anything else is not read.
CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "float32", "float64", "bfloat16", "float16", "int64", "int32"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}


def save(run_dir: Path, job: Job, step: int, held: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Collective. `step` steps of the whole training are done. The description comes last: without it, a folder that
    was left half written is no checkpoint."""
    folder = checkpoints.folder_of(run_dir, step)
    folder.mkdir(parents=True, exist_ok=True)
    state = {MODEL + name: parameter.detach() for name, parameter in held.items()}
    own = local(optimizer)
    parts = updated(own)
    for name, part in ((name, parts[parameter]) for name, parameter in held.items() if parameter in parts):
        for key, value in own.state.get(part, {}).items():
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            state[f"{OPTIMIZER}{name}.{key}"] = whole_state(part, tensor)
    index = dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = index.state_dict_metadata
        shapes = {name.removeprefix(MODEL): list(found[name].size) for name in found if name.startswith(MODEL)}
        checkpoints.describe(folder, job, step, shapes)


def restore(
    run_dir: Path,
    job: Job,
    held: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    alone: bool = False,
) -> None:
    """Fill parameters and optimizer, in place, with what the job resumes. Collective unless `alone`."""
    runs_dir = run_dir.parent  # the other run stands beside this one
    reader = Reader(checkpoints.find(job.spec.resume, runs_dir).folder)
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = {MODEL + name: parameter.detach() for name, parameter in held.items()}
    own = local(optimizer)
    parts = updated(own)
    for name, parameter in held.items():
        prefix = f"{OPTIMIZER}{name}."
        keys = [key.removeprefix(prefix) for key in saved if key.startswith(prefix)] if parameter in parts else []
        for key in keys:
            entry, part = saved[prefix + key], parts[parameter]
            # Cut as the parameter is, and of its precision, which another run may have had otherwise; a count of steps
            # is neither.
            is_alike = entry.size == parameter.shape
            own.state[part][key] = value = (
                torch.zeros_like(part, requires_grad=False)
                if is_alike
                else torch.zeros(entry.size, dtype=entry.properties.dtype)
            )
            state[prefix + key] = whole_state(part, value)
    dcp.load(state, storage_reader=reader, no_dist=alone or not dist.is_initialized())


def local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What updates this rank's own parameters."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


class Reader(FileSystemReader):
    """PyTorch's reader, but the index is unpickled from its own few classes only. Tensors it reads without pickle's
    freedom already (`weights_only`)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"the index of a checkpoint holds no {module}.{name}")
        return super().find_class(module, name)
