"""This machine, looked at without loading torch or a driver -> its GPUs, and what a run would lack here."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from engine.asking.rules import SpecError
from engine.asking.settings import REDUCE_SCATTER_MODES, TORCH_FLOOR


def check_torch(mode: str) -> None:
    """By what is installed, without loading it; where nothing is, the run will say so."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < TORCH_FLOOR:
        code = "old_torch_gloo" if mode in REDUCE_SCATTER_MODES else "old_torch"
        floor = ".".join(map(str, TORCH_FLOOR))
        raise SpecError(code, "mode", version, mode=mode, floor=floor)


def lacks_compiler() -> str | None:
    """What torch.compile would look for here and not find: it writes C++, on GPUs a launcher, and has it compiled."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "a C++ compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the headers of Python"
    return None


def count_gpus() -> int:
    """NVIDIA GPUs that a process started here may use."""
    present = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    return min(len(present), len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))
