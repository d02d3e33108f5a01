"""torch's functional collectives, which DTensor calls -> what was called and where it was waited for, for the recorder.

The profiler sees what the backend carries out: gloo does a reduce_scatter as an all_reduce. What was called is known
only where it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as funcol

from engine.real.recorder import Recorder

# Since torch 2.13 the older names call the newer ones.
CALLS = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single", "all_gather_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


def announce(recorder: Recorder, axis: str) -> None:
    """From here on, in this process, tell the recorder of every call and of every wait for its result."""
    for kind, names in CALLS.items():
        name = next(name for name in names if hasattr(funcol, name))
        setattr(funcol, name, _announced(getattr(funcol, name), recorder, kind, axis))
    funcol.wait_tensor = _noted(funcol.wait_tensor, recorder)


def _announced(call: Callable, recorder: Recorder, kind: str, axis: str) -> Callable:
    @functools.wraps(call)
    def announced(tensor: torch.Tensor, *args, **kwargs):
        recorder.collective(kind, tensor.nbytes, axis=axis)
        result = call(tensor, *args, **kwargs)
        recorder.will_wait(_address(result))
        return result

    return announced


def _address(result: torch.Tensor) -> int:
    """Of a tensor, or of the one inside of one that is waited for when it is used."""
    return getattr(result, "elem", result).data_ptr()


def _noted(wait: Callable, recorder: Recorder) -> Callable:
    @functools.wraps(wait)
    def noted(tensor: torch.Tensor) -> torch.Tensor:
        result = wait(tensor)
        recorder.waited(_address(tensor))
        return result

    return noted
