"""The same training, recorded by Lockstep and written by hand, in turn -> the ratio of their median step times.

    python -m bench.handwritten                       # ddp, fsdp, tensor and pipeline: a gpt on 2 ranks
    python -m bench.handwritten --modes ddp fsdp --rounds 6 --steps 30

The programs by hand are what a PyTorch user writes: of Lockstep they have the layers and the batches, and nothing
else; no recorder, no marks, no plan. Both are forked from a process that has torch imported, with as many threads, and
the losses of both must be the same, or there is nothing to compare. Rounds alternate, so that whatever else the machine
does falls on both alike. Prints one JSON object a mode.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from engine.archive import read_steps
from engine.job import Job, prepare
from engine.launch import FORKING, WAITING, Launcher, start
from engine.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import nn

    # Inputs and targets -> the loss, with gradients made; what is to be updated.
    Program = tuple[Callable[[torch.Tensor, torch.Tensor], float | None], torch.optim.Optimizer]

MODES = ("ddp", "fsdp", "tensor", "pipeline")
WARMUP = 4  # steps at the start of a run that are not counted
RANKS = 2


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
        rows.append({"start": begin / 1e9, "end": time.time_ns() / 1e9, "loss": loss})
    (folder / f"rank{rank}.json").write_text(json.dumps(rows))


def by_hand(job: Job) -> list[list[dict]]:
    """The steps of each rank, in processes forked from this one."""
    with tempfile.TemporaryDirectory() as name:
        workers = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                try:
                    train(job, rank, Path(name))
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            workers.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in workers):
            raise RuntimeError(f"the {job.spec.mode} by hand did not end well")
        return [json.loads((Path(name) / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def recorded(spec: Spec, launcher: Launcher, runs_dir: str) -> list[list[dict]]:
    handle = start(spec, runs_dir=runs_dir, launcher=launcher)
    result = handle.result(timeout=600)
    if result["status"] != "finished" or not result["conformance"]["ok"]:
        raise RuntimeError(result["error"] or result["conformance"])
    return [read_steps(handle.run_dir, rank) for rank in range(RANKS)]


def seconds(ranks: list[list[dict]]) -> list[float]:
    """Of each counted step, from the first rank's start to the last rank's end."""
    steps = list(zip(*ranks, strict=True))[WARMUP:]
    return [max(r["end"] for r in step) - min(r["start"] for r in step) for step in steps]


def losses(ranks: list[list[dict]]) -> list[float]:
    found = []
    for step in zip(*ranks, strict=True):
        known = [row["loss"] for row in step if row["loss"] is not None]
        found.append(sum(known) / len(known))
    return found


def compare(mode: str, rounds: int, steps: int, launcher: Launcher, runs_dir: str) -> dict:
    cut = {"schedule": "1f1b", "microbatches": 4} if mode == "pipeline" else {}
    spec = Spec(
        mode=mode, devices=RANKS, model="gpt", layers=4, hidden=128, heads=4, context=64, global_batch=16,
        steps=steps + WARMUP, parity_steps=0, measure_memory=False, device="cpu", **cut,
    )  # fmt: skip
    job = prepare(spec)
    ways = {"recorded": lambda: recorded(spec, launcher, runs_dir), "by_hand": lambda: by_hand(job)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    ratios, apart = [], 0.0
    for i in range(rounds):
        found = {way: ways[way]() for way in (list(ways) if i % 2 else reversed(ways))}
        for way, ranks in found.items():
            times[way] += seconds(ranks)
        ratios.append(median(times["recorded"][-steps:]) / median(times["by_hand"][-steps:]))
        pairs = zip(*(losses(found[way]) for way in ways), strict=True)
        apart = max(apart, *(abs(a - b) for a, b in pairs))
    if apart > 1e-3:
        raise RuntimeError(f"{mode}: the losses are {apart} apart, so these are not the same training")
    return {
        "mode": mode,
        "recorded_step_time": median(times["recorded"]),
        "step_time_by_hand": median(times["by_hand"]),
        "ratio": median(times["recorded"]) / median(times["by_hand"]),
        "ratio_of_each_round": [round(ratio, 4) for ratio in ratios],
        "losses_apart": apart,
        "steps": len(times["recorded"]),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--steps", type=int, default=30)
    given = arguments.parse_args()
    os.environ.update(FORKING | WAITING)  # as the launcher's process has them, before torch is imported
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    with tempfile.TemporaryDirectory() as runs_dir, Launcher() as launcher:
        launcher.warm()
        for mode in given.modes:
            print(json.dumps(compare(mode, given.rounds, given.steps, launcher, runs_dir)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
