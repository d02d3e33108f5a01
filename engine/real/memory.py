"""A few more steps of a training that is done -> the bytes that a rank holds in one, by category, in its memory file.

PyTorch's MemTracker knows every tensor's memory and when it goes, with DTensor, FSDP and pipelines alike. Its hooks on
modules are left out: they break a backward pass in halves, and do not let a module run twice in a step. What no op of
the step makes was made before, or by code that asks for memory itself (DDP's reducer): such a tensor is met as the
input of an op, and then counts as a buffer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from engine.cost.memory import CATEGORIES
from engine.job import Job
from engine.real.recompute import Again
from engine.real.training import Place, Training, sharded_groups, update

KINDS = {
    "parameters": _MemRefType.PARAM,
    "gradients": _MemRefType.GRAD,
    "optimizer": _MemRefType.OPT,
    "activations": _MemRefType.ACT,
    "buffers": _MemRefType.OTH,
}
OUTSIDE = _MemRefType.BUFFER  # of the data set, which is no part of the training's memory
LET_GO = 0.002  # seconds in which gloo's threads nearly always let go of the tensors that they moved
STEPS = 3  # at most. All are alike, but for tensors let go of late: in one is seldom, in two alike or in three not seen


def measure(job: Job, place: Place, training: Training) -> None:
    """Called when the training is done, since it takes more optimizer steps. nn.DataParallel computes on threads of its
    own, which no tracker sees; its four steps on the CPU are taken in turn for this, once: nothing is sent."""
    threads = job.spec.mode == "data_parallel"
    if threads and place.device.type != "cpu":
        return
    steps: list[dict[str, int]] = []
    while len(steps) < STEPS and not _agreed(steps):
        ledger = Ledger(place.device, training)
        in_turn = InTurn(training, ledger) if threads else None
        with ledger:
            training.make_gradients(job.steps - 1)
            ledger.settle()
            update(training, place.recorder)
            ledger.settle()
        steps.append(ledger.held)
    held = in_turn.held() if in_turn else [{name: min(step[name] for step in steps) for name in CATEGORIES}]
    (place.run_dir / f"rank{place.rank}.memory.json").write_text(json.dumps({"devices": held}))


def _agreed(steps: list[dict[str, int]]) -> bool:
    """Whether all ranks have held the same in the last step as in the one before; alone it is always the same."""
    if not dist.is_initialized():
        return len(steps) == 1
    if len(steps) < 2:
        return False
    differ = torch.tensor([steps[-1] != steps[-2]], dtype=torch.int32)
    dist.all_reduce(differ)
    return not differ.item()


class WithoutModules(ModTracker):
    """Knows whether a backward pass is going on, and hooks into no module."""

    def __enter__(self) -> WithoutModules:
        return self

    def __exit__(self, *_) -> None:
        pass


class Ledger(MemTracker):
    """MemTracker, with our categories. `held`: the most bytes of each.

    Activations are counted when a backward pass begins and whenever a layer has been computed again, when most are
    kept: what exists during an op only is not kept. Gradients are counted when a backward pass begins or is over, and
    they and optimizer state when all is done.
    """

    def __init__(self, device: torch.device, training: Training):
        super().__init__()
        self._mod_tracker = WithoutModules()
        self.device, self.training, self.task, self.again = device, training, -1, Again.done
        self.held = dict.fromkeys(CATEGORIES, 0)
        if (batches := getattr(training, "batches", None)) is not None:
            self.mark(vars(batches).values(), OUTSIDE)
        self.chains = getattr(training, "chains", None) or {0: getattr(training, "chain", None)}
        self.mark(places_of_messages(training), _MemRefType.OTH)
        # What FSDP gathers into, copies out to and reduces from; and where ranks share nothing else, averaged weights.
        self.moving = {"fsdp"}
        if isinstance(training.optimizer, PostLocalSGDOptimizer):  # in this step, as in every k-th
            self.moving.add("c10d")
            training.optimizer.averager.step = training.optimizer.averager.warmup_steps
        self.settle()

    def settle(self) -> None:
        """Between passes: whatever is a parameter, a gradient or optimizer state by now counts as such."""
        optimizer = self.training.optimizer
        own = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        self.mark(self.training.held().values(), _MemRefType.PARAM)
        self.mark([value for state in own.state.values() for value in state.values()], _MemRefType.OPT)
        self._count("parameters", "optimizer")
        self._count_gradients()

    def _count_gradients(self) -> None:
        """Those of shards, and of sharded layers those that wait whole to be reduced."""
        self.mark([parameter.grad for parameter in self.training.held().values()], _MemRefType.GRAD)
        for group in (group for chain in self.chains.values() if chain for group in sharded_groups(chain)):
            for each in group.fsdp_params:  # whichever of its two parameters the layer has just then
                both = (each.sharded_param, getattr(each, "_unsharded_param", None))
                self.mark([parameter.grad for parameter in both if parameter is not None], _MemRefType.GRAD)
        self._count("gradients")

    def mark(self, tensors: Iterable[Any], kind: _MemRefType) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._update_and_maybe_create_winfos(tensor, kind)

    def now(self, category: str) -> int:
        return self._curr_mem_snap.get(self.device, {}).get(KINDS[category], 0)

    def _count(self, *categories: str) -> None:
        for category in categories:
            if dist.is_initialized() and self.now(category) > self.held[category]:
                time.sleep(LET_GO)
            self.held[category] = max(self.held[category], self.now(category))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its op on the local tensors comes next
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self._count_gradients()
        # A backward pass begins, or all that a layer needs to go back is there again.
        if task not in (-1, self.task) or Again.done != self.again:
            self._count("activations")
        self.task, self.again = task, Again.done
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is not None:  # DTensor only asks for shapes
            return result
        named = [result, *(kwargs or {}).values()]  # what it made, or was given to write into
        if func.namespace in self.moving:
            self.mark(tensors_in(named), _MemRefType.OTH)
        for tensor in tensors_in([*args, *named[1:]]):
            if tensor.dim():  # a constant is no buffer
                self._track(_MemRefType.OTH, tensor)
        for tensor in tensors_in(named[:1]):
            self._track(_MemRefType.ACT if task == -1 or Again.going_on else _MemRefType.TEMP, tensor)
        self._count("buffers")
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def places_of_messages(training: Training) -> Iterator[torch.Tensor]:
    """What a pipeline's messages are received into: it is there before the first of them comes."""
    stages = {stage.stage_index: stage for stage in getattr(training, "stages", ())}
    for index, stage in stages.items():
        for ways, other in ((stage.args_recv_info, index - 1), (stage.grad_recv_info, index + 1)):
            if other not in stages:
                yield from (each.buffer for infos in ways.values() for each in infos)


class InTurn:
    """The devices of nn.DataParallel on the CPU, one after the other on this thread."""

    def __init__(self, training: Any, ledger: Ledger):
        training.pool = self
        self.replicas, self.ledger = training.replicas, ledger
        self.kept: list[int] = []  # activations of each device
        self.again = [0] * len(self.replicas)  # and what is computed again beside them, on its way back
        for device, replica in enumerate(self.replicas):
            ledger.mark(replica.parameters(), OUTSIDE)
            replica.register_forward_pre_hook(self._begin)
            replica.register_forward_hook(self._end)
            replica.backward = partial(self._back, device, replica.backward)

    map = staticmethod(map)

    def _begin(self, _, inputs: tuple[torch.Tensor, ...]) -> None:
        self.kept.append(inputs[0].nbytes - self.ledger.now("activations"))

    def _end(self, *_) -> None:
        self.kept[-1] += self.ledger.now("activations")

    def _back(self, device: int, backward: Callable[..., None], *ends: torch.Tensor) -> None:
        """What others keep stays as it is meanwhile. The first device's is counted with all that is its own."""
        held, at_first = self.ledger.held, self.ledger.now("activations")
        before, held["activations"] = held["activations"], 0
        backward(*ends)
        self.again[device] = max(self.again[device], held["activations"] - at_first)
        held["activations"] = before if device else max(before, held["activations"])

    def held(self) -> list[dict[str, int]]:
        """The first device has the optimizer, and all activations that are not another's. In every micro-step each of
        them goes forward, in turn."""
        devices, most = [], [max(self.kept[i :: len(self.replicas)]) for i in range(len(self.replicas))]
        for replica, kept, again in zip(self.replicas, most, self.again, strict=True):
            parameters = [*replica.parameters()]
            sizes = {"parameters": parameters, "gradients": [parameter.grad for parameter in parameters]}
            of_device = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in sizes.items()}
            devices.append(dict.fromkeys(CATEGORIES, 0) | of_device | {"activations": kept + again})
        devices[0] |= {name: self.ledger.held[name] for name in ("optimizer", "buffers")}
        devices[0]["activations"] = self.ledger.held["activations"] - sum(most[1:])
        return devices
