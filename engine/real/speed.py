"""A small training, in one process or in several at once -> CPU seconds of a step of it: how fast this machine is now.

The same while a machine is calibrated and after a run's last step. So a prediction can be held to the speed that the
machine had meanwhile (`engine.outcome.accuracy`), and no time of the run's own steps is in that speed. Time in which
something else has the core does not count: a run tells that apart. Nor do the first steps, which make memory and fill
caches: in a process that has just begun the second one takes a third longer than the fifth.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from engine import archive, modes
from engine.cost.calibration import PROBING
from engine.job import Job, prepare
from engine.real.recorder import Recorder
from engine.real.training import Place, update
from engine.spec import Spec

ENOUGH = 10  # steps: what a run of fewer took is too uncertain to be held to a speed
SECONDS = 0.3  # of a run; ten steps, since a single one takes up to a fifth longer than another
WARM = 4  # steps that do not count
SPEC = Spec(
    mode="single", devices=1, model="gpt", layers=2, hidden=192, heads=4, context=64, dataset="synthetic",
    global_batch=4, steps=1, parity_steps=0, device="cpu",
)  # fmt: skip


class Probe:
    """A training of one process, on one thread, which nothing else knows of."""

    def __init__(self, folder: Path, rank: int):
        self.recorder = Recorder(folder / f"rank{rank}.jsonl", rank, 0, enabled=False)
        place = Place(rank, 1, torch.device("cpu"), self.recorder, folder)
        self.training = modes.run(SPEC.mode).training(prepare(SPEC), place)

    def step(self) -> float:
        used = time.process_time()
        self.training.make_gradients(0)
        update(self.training, self.recorder)
        return time.process_time() - used

    def warm(self) -> None:
        for _ in range(WARM):
            self.step()

    def step_seconds(self, seconds: float) -> float:
        """Median CPU seconds of the steps that so many seconds are enough for, on one thread."""
        threads, each = torch.get_num_threads(), []
        torch.set_num_threads(1)
        self.warm()
        ended = time.perf_counter() + seconds
        while time.perf_counter() < ended or not each:
            each.append(self.step())
        torch.set_num_threads(threads)
        return median(each)


def keep(job: Job, place: Place) -> None:
    """What a step takes now, in files beside what else the first ranks say, which train at once while the others wait;
    where predictions are made of this machine's cores."""
    if job.spec.device != "cpu" or job.steps < ENOUGH:
        return
    probe = Probe(place.run_dir, place.rank) if place.rank < PROBING else None
    if place.world_size > 1:
        dist.barrier()
    if probe:
        found = {"step_seconds": probe.step_seconds(SECONDS)}
        archive.write_json(place.run_dir / f"rank{place.rank}.speed.json", found)
    if place.world_size > 1:
        dist.barrier()
