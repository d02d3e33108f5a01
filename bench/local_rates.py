"""This machine's cores and loopback -> the numbers of the machine `local` in the catalogue.

    python -m bench.local_rates

One thread, as a rank has when ranks outnumber cores. Prints one JSON object in FLOP/s, bytes/s and seconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from engine.job import prepare
from engine.real import models
from engine.real.data import Batches
from engine.spec import Spec


def seconds_of(work: Callable[[], object], least: float = 0.3) -> float:
    """Median seconds of one call, over calls that fill `least` seconds."""
    work()
    times = []
    while sum(times) < least:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def compute_rates() -> dict[str, float]:
    torch.set_num_threads(1)
    square = torch.randn(512, 512)
    vector = torch.randn(8_000_000)
    small = nn.Linear(8, 8)
    x = torch.randn(1, 8)
    return {
        "matmul_flop_rate": 2 * 512**3 / seconds_of(lambda: square @ square),
        **{f"{model}_flop_rate": model_flop_rate(model) for model in ("cnn", "mlp", "gpt")},
        "memory_rate": 2 * vector.nbytes / seconds_of(lambda: vector.add_(1.0)),
        "op_overhead": seconds_of(lambda: torch.relu(small(x)).sum().backward()) / 2,
    }


def model_flop_rate(name: str) -> float:
    """FLOP/s that whole layers reach, forward and backward, with all that is not arithmetic in them."""
    job = prepare(Spec(mode="single", devices=1, model=name, global_batch=32))
    model = models.build(job)
    x, y = Batches(job, 0, 1, torch.device("cpu"))(0)

    def step() -> None:
        model.zero_grad()
        models.loss_of(model(x), y).backward()

    return 3 * 32 * sum(layer.flops for layer in job.layers) / seconds_of(step)


def _peer(rank: int, path: str, results: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    found = {}
    for name, count in (("small", 1), ("large", 16_000_000)):
        tensor = torch.zeros(count)

        def exchange(tensor: torch.Tensor = tensor) -> None:
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        for _ in range(5):
            exchange()
        times = []
        for _ in range(30):
            start = time.perf_counter()
            exchange()
            times.append((time.perf_counter() - start) / 2)
        found[name] = median(times)
    if rank == 0:
        with open(results, "w") as file:
            json.dump({"link_latency": found["small"], "link_rate": 64e6 / (found["large"] - found["small"])}, file)
    os._exit(0)


def link_rates() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                _peer(rank, f"{folder}/store", f"{folder}/results")
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        with open(f"{folder}/results") as file:
            return json.load(file)


if __name__ == "__main__":
    links = link_rates()  # first: a process that has run torch's threads should not fork
    print(json.dumps({"cores": os.cpu_count(), **compute_rates(), **links}))
