"""The same training, recorded by Lockstep and written by hand, in turn -> the ratio of their step times.

    python -m bench.handwritten                       # ddp, fsdp, tensor and pipeline: a gpt on 2 ranks
    python -m bench.handwritten --modes ddp fsdp --seconds 90

The programs by hand are what a PyTorch user writes: of Lockstep they have the layers and the batches, and nothing
else; no recorder, no marks, no plan. Both are forked from a process that has the same modules imported and its objects
frozen, with as many threads, which wait alike, and the losses of both must be the same, or there is nothing to compare.
They take turns (`bench/turns.py`), a second training by hand with them: `null` is that of the two by hand. Prints one
JSON object a mode, of as many rounds as fit into the seconds for it; each round has new processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.turns import WARMUP, Ranks, Steps, alternate, compared, launcher, recorded
from engine.job import Job, prepare
from engine.launch import FORKING, WAITING, Launcher
from engine.real.launcher import PRELOAD, fork
from engine.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import nn

    # Inputs and targets -> the loss, with gradients made; what is to be updated.
    Program = tuple[Callable[[torch.Tensor, torch.Tensor], float | None], torch.optim.Optimizer]

MODES = ("ddp", "fsdp", "tensor", "pipeline")
RANKS = 2
AT_ONCE = 3  # trainings that take turns: one recorded, two by hand


# --- the programs ---------------------------------------------------------------------------------------------------


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def sgd(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(model.parameters(), lr=job.spec.lr, momentum=0.9)


def ddp(job: Job, model: nn.Module, rank: int) -> Program:
    from torch.nn.parallel import DistributedDataParallel

    replica = DistributedDataParallel(model)

    def make_gradients(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(replica(inputs), targets)
        loss.backward()
        return loss.item()

    return make_gradients, sgd(job, model)


def fsdp(job: Job, model: nn.Module, rank: int) -> Program:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def make_gradients(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return loss.item()

    return make_gradients, sgd(job, model)


def tensor(job: Job, model: nn.Module, rank: int) -> Program:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    plan = {
        "embed.token": RowwiseParallel(input_layouts=Replicate()),
        "block*.qkv": ColwiseParallel(),
        "block*.proj": RowwiseParallel(),
        "block*.up": ColwiseParallel(),
        "block*.down": RowwiseParallel(),
        "head.linear": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)

    def make_gradients(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with loss_parallel():
            loss = loss_of(model(inputs), targets)
            loss.backward()
        for parameter in model.parameters():  # of an embedding's rows, autograd gives every rank all
            placements = getattr(parameter, "placements", None)
            if placements is not None and parameter.grad.placements != placements:
                parameter.grad = parameter.grad.redistribute(placements=placements)
        return loss.item()

    return make_gradients, sgd(job, model)


def pipeline(job: Job, model: nn.Module, rank: int) -> Program:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    first = sum(job.spec.split[:rank])
    stage = nn.Sequential(*list(model)[first : first + job.spec.split[rank]])
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, RANKS, torch.device("cpu")), job.spec.microbatches, loss_fn=loss_of
    )

    def make_gradients(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        if rank == 0:
            schedule.step(inputs)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean().item()

    return make_gradients, sgd(job, stage)


PROGRAMS = {"ddp": ddp, "fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}


# --- running them ---------------------------------------------------------------------------------------------------


def train(job: Job, rank: int, folder: Path) -> None:
    """One rank of a program; writes the start, the end and the loss of each step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from engine.real import models
    from engine.real.data import Batches

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // RANKS))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    model = nn.Sequential(OrderedDict(models.build(job).named_children()))
    make_gradients, optimizer = PROGRAMS[job.spec.mode](job, model, rank)
    batches = Batches(job, *((rank, RANKS) if job.replicas > 1 else (0, 1)), torch.device("cpu"))
    rows = []
    for step in range(job.steps):
        begin = time.time_ns()
        optimizer.zero_grad()
        loss = make_gradients(*batches(step))
        optimizer.step()
        end = time.time_ns()
        rows.append({"start": begin / 1e9, "end": end / 1e9, "loss": loss, "cpu": time.process_time()})
    (folder / f"rank{rank}.json").write_text(json.dumps(rows))


def by_hand(job: Job, folder: Path) -> Ranks:
    """In processes forked from this one as the launcher forks its workers."""
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    pids = [fork(partial(train, job, rank, folder), log, ()) for rank, log in enumerate(logs)]
    codes: dict[int, int] = {}

    def reap(options: int) -> bool:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, options)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        return len(codes) == RANKS

    def result() -> Steps:
        reap(0)
        if any(codes.values()):
            said = "\n".join(log.read_text() for log in logs)
            raise RuntimeError(f"the {job.spec.mode} by hand did not end well: {said}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]

    return Ranks(pids, lambda: reap(os.WNOHANG), result)


def losses(ranks: Steps) -> list[float]:
    found = []
    for step in zip(*ranks, strict=True):
        known = [row["loss"] for row in step if row["loss"] is not None]
        found.append(sum(known) / len(known))
    return found


def compare(mode: str, seconds: float, steps: int, warm: Launcher) -> dict:
    cut = {"schedule": "1f1b", "microbatches": 4} if mode == "pipeline" else {}
    spec = Spec(
        mode=mode, devices=RANKS, model="gpt", layers=4, hidden=128, heads=4, context=64, global_batch=16,
        steps=steps + WARMUP, parity_steps=0, measure_memory=False, device="cpu", **cut,
    )  # fmt: skip
    job, found, apart, began = prepare(spec), [], 0.0, time.monotonic()
    while not found or time.monotonic() - began < seconds:
        with contextlib.ExitStack() as stack:
            runs_dir, *folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(AT_ONCE)]
            hands = [partial(by_hand, job, Path(folder)) for folder in folders]
            found.append(alternate(partial(recorded, spec, warm, runs_dir), *hands))
        recorded_losses, *others = map(losses, found[-1].steps)
        apart = max(apart, *(abs(a - b) for other in others for a, b in zip(recorded_losses, other, strict=True)))
    if apart > 1e-3:
        raise RuntimeError(f"{mode}: the losses are {apart} apart, so these are not the same training")
    return {"mode": mode, **compared(found), "null": compared(found, 2, 1), "losses_apart": apart}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    arguments.add_argument("--seconds", type=float, default=180.0, help="for each mode")
    arguments.add_argument("--steps", type=int, default=20)
    given = arguments.parse_args()
    os.environ.update(FORKING | WAITING)  # as the launcher's process has them, before torch is imported
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with launcher(AT_ONCE) as warm:
        warm.warm()
        for mode in given.modes:
            print(json.dumps(compare(mode, given.seconds, given.steps, warm)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
