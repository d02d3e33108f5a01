"""A folder that says what to measure, and a rank -> what this process measured of its machine, in files beside it.

Called by the launcher in forked processes, as a training's worker is. Three kinds of measurement: `rates` of products,
one after the other or on all cores at once; `links`, every collective at several sizes; and `trainings`, a few steps of
small jobs, recorded as those of any run. `engine.calibration.calibrate` makes costs of them. The first two are
measured on GPUs as they are on the CPU, with NCCL in gloo's place, and a clock that waits until the device has done
what it was asked for.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.autograd.profiler import _disable_profiler, _enable_profiler, _prepare_profiler

from engine import modes
from engine.archive import read_json, write_json
from engine.job import Job, prepare
from engine.real import cores, speed, worker
from engine.real.events import communications
from engine.real.parity import Parity
from engine.real.preemption import preempt_nobody
from engine.real.recorder import Recorder
from engine.real.targets import Targets
from engine.real.training import Place, Training, mark_updates
from engine.spec import Spec

ASKED, FOUND, PROGRESS = "calibration.json", "rank{rank}.found.json", "progress"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# [m, k] x [k, n], from a tiny layer on few samples to a block's on thousands of tokens; a GPU is full with more.
PRODUCTS = {
    "cpu": ((16, 16, 16), (64, 64, 64), (64, 256, 256), (512, 128, 512), (2048, 512, 512)),
    "cuda": ((16, 16, 16), (256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)),
}
FEWER = {"cpu": 3, "cuda": 5}  # of them in bf16, which few CPUs multiply
ARRAYS = {  # bytes of an array
    "cpu": (4_096, 262_144, 2_097_152, 16_777_216),
    "cuda": (4_096, 2_097_152, 67_108_864, 536_870_912),
}
BETWEEN = 4_000_000  # bytes that are read, and written, from one collective to the next
FEWEST, MOST = 8, 40  # calls of a collective, in each pass: some take ten times as long, where a thread has to wait
FLOAT = 4  # bytes
PREEMPTED = 0.2  # of a training, for which a rank waits for a core: each has one, and when nobody else does it is 0.05


def work(run_dir: str, rank: int, world_size: int) -> Any:
    """Measure what the folder asks for. The caller keeps what is returned, and ends the process without finalisers."""
    folder = Path(run_dir)
    asked = read_json(folder / ASKED)
    preempt_nobody()
    torch.set_num_threads(asked.get("threads") or max(1, len(os.sched_getaffinity(0)) // world_size))
    device = worker.device_of(asked["device"], rank)
    worker._peak_memory(device)
    if world_size > 1:
        worker._join(folder, rank, world_size, device, "file", 60.0)
    measure = {"rates": rates, "together": together, "links": links, "trainings": trainings}[asked["what"]]
    began, busy, used = time.perf_counter(), cores.busy(), time.process_time()
    found, kept = measure(asked, folder, device, rank, world_size)
    seconds, used, now = time.perf_counter() - began, time.process_time() - used, cores.busy()
    spent = {"seconds": seconds, "used": used, "busy": None if now is None else now - busy}
    write_json(folder / FOUND.format(rank=rank), {"found": found, "spent": spent})
    return kept


def finish(run_dir: Path, state: str, error: dict[str, Any] | None) -> None:
    """Nothing is left to be done for a measurement when its processes have ended."""


def settle(device: torch.device) -> None:
    """Return when the device has done all that it was asked for; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def told(folder: Path, rank: int) -> None:
    """One more thing is measured."""
    if rank == 0:
        with (folder / PROGRESS).open("a") as file:
            file.write(".")


# --- products ---------------------------------------------------------------------------------------------------------


def rates(asked: dict, folder: Path, device: torch.device, rank: int, world_size: int) -> tuple[dict, None]:
    """`fp32/1` -> (FLOPs, seconds) of a layer's product and of the two of its backward pass, in the mean; `memory/1` ->
    (bytes, seconds) of a sum of two arrays, whose result is new, as every layer's is."""
    found: dict[str, list[tuple[float, float]]] = {"memory/1": []}
    torch.set_num_threads(1)

    def seconds(call: Callable[[], object], threads: int) -> float:
        """What one thread of a CPU computes is measured by its own clock, which stands still while something else has
        its core."""
        clock = time.thread_time if threads == 1 and device.type == "cpu" else time.perf_counter
        return seconds_of(call, asked["budget"], clock, device)

    for size in ARRAYS[device.type]:
        x, y = (torch.zeros(size // FLOAT, device=device) for _ in range(2))
        found["memory/1"].append((3.0 * size, seconds(lambda x=x, y=y: x + y, 1)))
    told(folder, rank)
    for threads in asked["each_threads"]:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            points = found[f"{name}/{threads}"] = []
            for m, k, n in PRODUCTS[device.type][: None if name == "fp32" else FEWER[device.type]]:
                x, w, g = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))
                ways = (lambda x=x, w=w: F.linear(x, w), lambda g=g, w=w: g @ w, lambda g=g, x=x: g.t() @ x)
                points.append((2.0 * m * k * n, fmean(seconds(way, threads) for way in ways)))
                told(folder, rank)
    return found, None


def seconds_of(call: Callable[[], object], budget: float, clock: Callable[[], float], device: torch.device) -> float:
    """Median seconds of one call, over calls that fill `budget` seconds, and no less than three."""
    call()
    settle(device)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < budget:
        start = clock()
        call()
        settle(device)
        times.append(clock() - start)
    return median(times)


def together(asked: dict, folder: Path, device: torch.device, rank: int, world_size: int) -> tuple[dict, list]:
    """`2` -> CPU seconds of a step of this process while two of them train a model of their own, on one thread each."""
    torch.set_num_threads(1)
    probe, found = speed.Probe(folder, rank), {}
    probe.warm()
    for processes in asked["each"]:
        dist.barrier()
        if rank < processes:
            found[str(processes)] = probe.step_seconds(asked["budget"])
        told(folder, rank)
    return found, [probe]


# --- links ------------------------------------------------------------------------------------------------------------


def calls(kind: str, size: int, device: torch.device, rank: int, ranks: int) -> Callable[[], int | None]:
    """A call of a collective with a tensor of `size` bytes on this rank, as plans count them; of a message there and
    back, which says when it was there (Unix ns). Tensors are new in each call, as they are in a training: in no cache,
    and in memory that is touched for the first time."""
    count = -(-max(1, size // FLOAT) // ranks) * ranks
    zeros, empty = (partial(make, device=device) for make in (torch.zeros, torch.empty))

    def message() -> int:
        """From rank 0 to rank 1, and back."""
        for sender in (0, 1):
            if rank == sender:
                dist.send(zeros(count), 1 - sender)
            elif rank == 1 - sender:
                dist.recv(empty(count), sender)
            if sender == 0:
                settle(device)
                there = time.time_ns()
        return there

    return {
        "all_reduce": lambda: dist.all_reduce(zeros(count)),
        "all_gather": lambda: dist.all_gather_into_tensor(empty(count * ranks), zeros(count)),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(empty(count // ranks), zeros(count)),
        "broadcast": lambda: dist.broadcast(zeros(count), 0),
        "all_to_all": lambda: dist.all_to_all_single(empty(count), zeros(count)),
        "send": message,
    }[kind]


def links(asked: dict, folder: Path, device: torch.device, rank: int, world_size: int) -> tuple[dict, None]:
    """`all_reduce/65536` -> this rank's (start, end) of every operation (Unix ns) in each of some calls, and the part
    of that time in which the process used a core."""
    found: dict[str, Any] = {}
    between = torch.zeros(
        BETWEEN // FLOAT, device=device
    )  # a step computes between collectives: caches are full of other things
    passes = asked["passes"]
    for kind, size in passes * [*itertools.product(asked["kinds"], asked["sizes"])]:
        call = calls(kind, size, device, rank, world_size)
        call()
        settle(device)
        began = time.perf_counter()
        between + 1.0
        call()
        settle(device)
        # All ranks make as many calls: rank 0 says how many.
        each = asked["budget"] / passes / (time.perf_counter() - began)
        count = torch.tensor([min(max(int(each), FEWEST), MOST)])
        dist.broadcast(count, 0)
        config = ProfilerConfig(ProfilerState.KINETO, True, False, False, False, False, _ExperimentalConfig())
        _prepare_profiler(config, {ProfilerActivity.CPU})
        _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
        marks, halves, cpu, wall = [], [], 0.0, 0.0
        for _ in range(int(count)):
            between + 1.0
            settle(device)
            start, used = time.time_ns(), time.process_time()
            there = call()
            settle(device)
            marks.append((start, time.time_ns()))
            halves.append(there if kind == "send" else None)
            cpu, wall = cpu + time.process_time() - used, wall + (marks[-1][1] - start) / 1e9
        events = communications(_disable_profiler().events())
        one = found.setdefault(f"{kind}/{size}", {"busy": 0.0, "calls": []})
        one["busy"] += cpu / wall / passes
        one["calls"] += of_calls(marks, events) if device.type == "cpu" else of_device(marks, halves)
        told(folder, rank)
    return found, None


def of_device(marks: list[tuple[int, int]], halves: list[int | None]) -> list[list[tuple[int, int]]]:
    """The same of a device, which is waited for: a call is an operation; a message there and back is two."""
    pairs = zip(marks, halves, strict=True)
    return [[mark, mark] if half is None else [mark, (mark[0], half), (half, mark[1])] for mark, half in pairs]


def of_calls(marks: list[tuple[int, int]], events: list) -> list[list[tuple[int, int]]]:
    """Of each call its own (start, end), and those of the operations that began in it: one that is waited for begins
    before its call returns."""
    return [[mark, *((e.start, e.end) for e in events if mark[0] <= e.start <= mark[1])] for mark in marks]


# --- trainings --------------------------------------------------------------------------------------------------------


def trainings(asked: dict, folder: Path, device: torch.device, rank: int, world_size: int) -> tuple[dict, list]:
    """A few steps of each job, in a folder of its own as that of a run; once more where others took its cores, and the
    calmer one counts. What has process groups is kept. Found: the folders that count, and how fast this machine was
    before the first and after the last of them."""
    probe = speed.Probe(folder, rank)
    kept: list = [probe]
    if world_size > 1:
        dist.barrier()
    before = probe.step_seconds(asked["budget"])
    where, folders, left = (asked["origin"], device, rank, world_size), [], asked["again"]
    for i, values in enumerate(asked["jobs"]):
        job, name = prepare(Spec.from_dict(values)), f"job{i}"
        training, waited, seconds = trained(job, folder / name, *where)
        kept.append(training)
        if waited > PREEMPTED and seconds < left:
            left -= seconds
            training, now, _ = trained(job, folder / f"{name}-again", *where)
            kept.append(training)
            name = f"{name}-again" if now < waited else name
        folders.append(name)
        told(folder, rank)
    return {"step_seconds": [before, probe.step_seconds(asked["budget"])], "folders": folders}, kept


def trained(
    job: Job, folder: Path, origin: int, device: torch.device, rank: int, world_size: int
) -> tuple[Training, float, float]:
    """A training, as it is recorded in `folder`; the most of its time for which a rank had to wait for a core; and how
    long it took on the rank that took longest: ranks know the same of both."""
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder / f"rank{rank}.jsonl", rank, origin, enabled=True)
    place = Place(rank, world_size, device, recorder, folder)
    training = modes.run(job.spec.mode).training(job, place)
    mark_updates(training.optimizer, recorder)
    checked = training.held(), Parity(job, place, training), Targets(job, place)
    began, waited = time.perf_counter(), cores.waited()
    with (folder / f"rank{rank}.steps.jsonl").open("w", encoding="utf-8") as steps:
        for step in range(job.steps):  # as in a run, where each line is written when its step is done
            steps.write(json.dumps(worker.one_step(job, place, training, *checked, step)) + "\n")
            steps.flush()
    seconds = time.perf_counter() - began
    most = torch.tensor([0.0 if waited is None else (cores.waited() - waited) / seconds, seconds])
    recorder.flush()
    if world_size > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return training, *most.tolist()
