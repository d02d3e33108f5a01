"""What every mode's run gives the worker: a Training that makes gradients, then updates the weights it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from engine.job import Job
from engine.real.recorder import Recorder

if TYPE_CHECKING:
    from engine.real.data import Batches


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands: its rank among `world_size` processes, its device, its recorder."""

    rank: int
    world_size: int
    device: torch.device
    recorder: Recorder
    run_dir: Path


class Training(Protocol):
    """One rank's part of a training. Names of parameters are those of the whole model.

    Where ranks hold different parameters whole, as plain tensors, `norm_groups` names the mesh axes over which they do,
    each with its process group (None: all ranks); and `norm_names`, if that is true of some parameters only, those.
    """

    optimizer: torch.optim.Optimizer
    batches: Batches | None  # None on a rank that has neither the first layer nor the last

    def make_gradients(self, step: int) -> float | None:
        """Load a batch, run forward and backward and all communication of gradients. The mean loss over this rank's
        samples, or None where no loss is computed."""

    def outputs(self, inputs: torch.Tensor | None, samples: int) -> torch.Tensor | None:
        """Forward only, under `no_grad`, of `samples` samples of this rank's replica: the model's output where the last
        layer is, else None. Collective; nothing of the training changes. `inputs` is None where `batches` is."""

    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, or holds a shard of, by their name in the whole model."""


def update(training: Training, recorder: Recorder) -> None:
    recorder.doing = "optimizer"
    training.optimizer.step()


def mark_updates(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Mark what this rank computes in an update, without what it sends: of ZeRO-1 its own part."""
    around = (ZeroRedundancyOptimizer, PostLocalSGDOptimizer)  # these communicate, and have another one inside
    own = optimizer.optim if isinstance(optimizer, around) else optimizer
    began = 0

    def begin(*_) -> None:
        nonlocal began
        recorder.pace.begin("optimizer")
        began = recorder.moment()

    def end(*_) -> None:
        recorder.pace.complete("optimizer")
        recorder.mark("optimizer", began, recorder.moment())

    own.register_step_pre_hook(begin)
    own.register_step_post_hook(end)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of the whole tensor; collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def whole_of_each(tensors: dict[str, list[torch.Tensor]]) -> dict[str, tuple[torch.Tensor, ...]]:
    """The same of several tensors under each name, which lie alike; what is sharded alike travels together."""
    alike: dict[Any, list[str]] = {}
    for name, (first, *_) in tensors.items():
        sharded = isinstance(first, DTensor)
        lies = (first.shape, first.dtype, first.placements, first.device_mesh) if sharded else name
        alike.setdefault(lies, []).append(name)
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for names in alike.values():
        each = iter(_whole_together([tensor for name in names for tensor in tensors[name]]))
        found |= {name: tuple(islice(each, len(tensors[name]))) for name in names}
    return found


def _whole_together(tensors: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    first = tensors[0]
    if not isinstance(first, DTensor):
        return map(whole, tensors)
    number = len(tensors)
    return whole(
        DTensor.from_local(
            torch.stack([each._local_tensor for each in tensors], dim=-1),
            first.device_mesh,
            first.placements,
            run_check=False,
            shape=torch.Size((*first.shape, number)),
            stride=(*(number * stride for stride in first.stride()), 1),
        )
    ).unbind(-1)


def forget_forward(chain: nn.Module) -> None:
    """As if sharded layers had not gone forward: no backward follows.

    What they keep gathered for one would be out of date after the next update. And they have noted their turns, with or
    without gradients, so that a later backward would prefetch by turns that are over: one gather too many.
    """
    for module in chain.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for group in sharded_groups(chain):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def sharded_groups(chain: nn.Module) -> Iterator[Any]:
    """fully_shard's groups of parameters in a chain; torch before 2.13 has one a module, or none."""
    for module in chain.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            known = hasattr(state, "_fsdp_param_groups")
            yield from filter(None, state._fsdp_param_groups if known else [state._fsdp_param_group])


def in_microsteps(job: Job, recorder: Recorder, one_pass: Callable[[int, int], Any]) -> list[Any]:
    """What `one_pass(k, count)` returns of each micro-step. Where there are several, their ops carry their number."""
    if job.microsteps == 1:
        return [one_pass(0, 1)]
    returned = []
    for k in range(job.microsteps):
        with recorder.microstep(k):
            returned.append(one_pass(k, job.microsteps))
    return returned


class LocalTraining:
    """A chain of layers on one device, with the loss at its end: `single`, and each replica of a data-parallel mode."""

    def __init__(self, job: Job, place: Place, chain: nn.Module, callee: nn.Module, batches, optimizer):
        self.job, self.place, self.chain, self.callee = job, place, chain, callee
        self.batches, self.optimizer = batches, optimizer
        # A pass inside of reducing(False) keeps its gradients to itself; the next one that reduces adds them in.
        self.reducing: Callable[[bool], AbstractContextManager] = lambda reduces: nullcontext()

    def make_gradients(self, step: int) -> float:
        self.optimizer.zero_grad()

        def reduced(k: int, count: int) -> float:
            with self.reducing(bool(self.job.spec.sync_every_microstep) or k == count - 1):
                return self._pass(step, k, count)

        return sum(in_microsteps(self.job, self.place.recorder, reduced))

    def _pass(self, step: int, k: int, count: int) -> float:
        """Micro-step `k` of `count`: its part of the step's mean loss, and of the gradients."""
        recorder = self.place.recorder
        with recorder.span("load", payload="batch", microbatch=recorder.microbatch):
            inputs, targets = self.batches(step, k, count)
        recorder.doing = "forward"  # which may begin with what the wrapper around the chain sends
        loss = self.chain.loss(self.callee(inputs), targets, self.batches.per_sample)
        if count > 1:
            loss = loss / count
        self.chain.backward(loss)
        return loss.item()

    def outputs(self, inputs: torch.Tensor, samples: int) -> torch.Tensor:
        output = self.chain(inputs)
        forget_forward(self.chain)
        return output

    def held(self) -> dict[str, nn.Parameter]:
        return dict(self.chain.named_parameters())
