"""A cold `torchrun` beside the warm launcher -> seconds from asking for a training to its first finished step.

    python -m bench.launch

Four gloo ranks train the same small model with DistributedDataParallel on the CPU, in turns: once started through
engine.launch, once by torchrun from a script as one would write it by hand. The clock starts before the call, and stops
when every rank has finished its first optimizer step. The script has random numbers for data, which costs it nothing;
Lockstep loads its dataset, and records every op. What the launcher takes to become warm, once per program, is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.archive import read_steps
from engine.launch import Launcher, start
from engine.spec import Spec

RANKS = 4
TARGET = 40.0
SPEC = Spec(mode="ddp", devices=RANKS, model="mlp", layers=2, hidden=256, global_batch=64, device="cpu", steps=1000)
LOOK = 0.002  # seconds between looks for the first step
PATIENCE = 120.0

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = [784, 256, 256]
hidden = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs, targets = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
for step in range(1000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if step == 0:
        Path(sys.argv[1], str(dist.get_rank())).touch()
        break
dist.barrier()
dist.destroy_process_group()
"""


def time_launcher(launcher: Launcher, folder: Path) -> float:
    begin = time.perf_counter()
    handle = start(SPEC, folder, launcher)
    seconds = _wait(lambda: all(read_steps(handle.run_dir, rank) for rank in range(RANKS)), begin)
    handle.stop()
    _wait(lambda: handle.done, time.perf_counter())  # so that the next turn has the cores to itself
    return seconds


def time_torchrun(folder: Path) -> float:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        script,
        folder,
    ]
    begin = time.perf_counter()
    # One thread a rank is what torchrun itself would set, with a warning.
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        seconds = _wait(lambda: all((folder / str(rank)).exists() for rank in range(RANKS)), begin)
        process.wait(PATIENCE)
    return seconds


def _wait(done: Callable[[], bool], begin: float) -> float:
    while not done():
        if time.perf_counter() - begin > PATIENCE:
            raise TimeoutError(f"no first step after {PATIENCE:.0f} s")
        time.sleep(LOOK)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=3, help="measurements of each (3)")
    repeats = parser.parse_args().n
    warm, cold = [], []
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        begin = time.perf_counter()
        launcher.warm()
        print(f"the launcher became warm in {time.perf_counter() - begin:.1f} s", flush=True)
        for turn in range(repeats):
            warm.append(time_launcher(launcher, Path(folder, "runs")))
            fresh = Path(folder, str(turn))
            fresh.mkdir()
            cold.append(time_torchrun(fresh))
            print(f"{turn + 1} of {repeats}: launcher {warm[-1]:.3f} s, torchrun {cold[-1]:.2f} s", flush=True)
    ratio = statistics.median(cold) / statistics.median(warm)
    print(f"median to the first step of {RANKS} ranks: launcher {statistics.median(warm):.3f} s, ", end="")
    print(f"torchrun {statistics.median(cold):.2f} s, ratio {ratio:.0f} (target {TARGET:.0f} or more)")
    sys.exit(ratio < TARGET)


if __name__ == "__main__":
    main()
