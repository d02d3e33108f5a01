"""PyTorch's PowerSGD hook, with each of its all-reduces seen by the recorder.

The hook issues the second and third from callbacks, on threads of the backend. The profiler follows the thread that
started it and what that one issues, so these two are noted here, from their call to the moment when the hook has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from engine.job import Job
from engine.modes.ddp.compression import START
from engine.real.recorder import Recorder


def compress_by_factors(replica: DistributedDataParallel, job: Job, recorder: Recorder) -> None:
    powerSGD_hook.dist = _Noting(powerSGD_hook.dist, recorder)
    rank = job.spec.compress_rank
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class _Noting:
    """torch.distributed as that module knows it."""

    def __init__(self, dist: Any, recorder: Recorder):
        self._dist, self._recorder = dist, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def all_reduce(self, tensor: torch.Tensor, **how: Any) -> Any:
        if torch.autograd._profiler_enabled():  # on this thread
            return self._dist.all_reduce(tensor, **how)
        return _Noted(self._dist, tensor, how, self._recorder)


class _Noted:
    """An asynchronous all-reduce, as far as the hook uses it: `.get_future().wait()`."""

    def __init__(self, dist: Any, tensor: torch.Tensor, how: dict[str, Any], recorder: Recorder):
        self._recorder, self._size, self._began = recorder, tensor.nbytes, recorder.moment()
        self._future = dist.all_reduce(tensor, **how).get_future()

    def get_future(self) -> _Noted:
        return self

    def wait(self) -> list[torch.Tensor]:
        result = self._future.wait()
        recorder = self._recorder
        recorder.mark(
            "all_reduce",
            self._began,
            recorder.moment(),
            microbatch=recorder.microbatch,
            payload="gradient",
            size=self._size,
            axis="dp",
        )
        return result
