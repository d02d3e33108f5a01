"""A small training, in one process or in two at once -> steps a second of each: how fast this machine is now.

The same while a machine is calibrated and after a run's last step. So a prediction can be held to the speed that the
machine had meanwhile (`engine.accuracy`), and no time of the run's own steps is in that speed.
"""

from __future__ import annotations

import time
from pathlib import Path

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

    def steps_per_second(self, seconds: float) -> float:
        """In so many seconds, after a step that does not count."""
        self._step()
        steps, began = 0, time.perf_counter()
        while (ended := time.perf_counter()) - began < seconds or not steps:
            self._step()
            steps += 1
        return steps / (ended - began)

    def _step(self) -> None:
        self.training.make_gradients(0)
        update(self.training, self.recorder)


def steps_per_second(folder: Path, rank: int, world_size: int, seconds: float) -> float | None:
    """Called by all ranks: of the first of them, which train at once while the others wait; None on the others."""
    threads, found = torch.get_num_threads(), None
    torch.set_num_threads(1)
    probe = Probe(folder, rank) if rank < PROBING else None
    if world_size > 1:
        dist.barrier()
    if probe:
        found = probe.steps_per_second(seconds)
    if world_size > 1:
        dist.barrier()
    torch.set_num_threads(threads)
    return found


def keep(job: Job, place: Place) -> None:
    """In a file beside what else the rank says, where predictions are made of this machine's cores."""
    if job.spec.device != "cpu" or job.steps < ENOUGH:
        return
    if (steps := steps_per_second(place.run_dir, place.rank, place.world_size, SECONDS)) is not None:
        archive.write_json(place.run_dir / f"rank{place.rank}.speed.json", {"steps_per_second": steps})
