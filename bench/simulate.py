"""Plans of growing size -> seconds to prepare, plan, match and simulate each; beside it PyTorch's own simulator.

    python -m bench.simulate [--repeats 5]

Prints one JSON object a case: medians of the repeats, after one that warms up, in seconds of wall time, and of this
process's time on a core (`cpu`), which others on the machine lengthen less; and the machine's load. `ops` counts each
role's ops once, as they are computed. Of pipelines that torch.distributed.pipelining can simulate
(`get_schedule_ops` of `_schedule_visualizer` with messages, then `_simulate_comms_compute`, which knows turns and no
durations) both are measured in turn, and `ratio` is theirs over ours.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import time
from collections.abc import Callable
from statistics import median

from engine import simulate
from engine.spec import Spec

LLAMA = Spec(
    mode="hybrid", devices=16_384, model="llama3_405b", tp=8, pp=16, dp=128, global_batch=2048, microbatches=16,
    schedule="1f1b", machine="h100", dataset="synthetic",
)  # fmt: skip
PIPELINE = Spec(mode="pipeline", devices=64, model="gpt", layers=62, machine="h100")
CASES = {
    "Llama 3 405B, 16,384 ranks, 1F1B": LLAMA,
    "the same, interleaved": LLAMA.with_(schedule="interleaved_1f1b", stages_per_rank=2),
    "the same, rank 9,003 twice as slow": LLAMA.with_(slow_rank="9003:2"),
    "the same, link 9,003 to 9,005 ten times as slow": LLAMA.with_(slow_link="9003-9005:10"),
    "64 stages, 1,024 microbatches": PIPELINE.with_(global_batch=1024, microbatches=1024),
    "64 stages, 3,072 microbatches": PIPELINE.with_(global_batch=3072, microbatches=3072),
    "ddp, 2,048 ranks": Spec(mode="ddp", devices=2048, model="gpt", global_batch=2048, machine="h100"),
    "zero1, 2,048 ranks": Spec(mode="zero1", devices=2048, model="gpt", global_batch=2048, machine="h100"),
}
BOTH = ((4, 16), (8, 64), (16, 128))  # (ranks, microbatches), interleaved, with two stages a rank
UNKNOWN = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # of sharded stages; their simulator raises at them
STAGES = 2  # theirs cannot add messages where a rank has one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for name, spec in CASES.items():
        ((ours, cpu),) = measure([functools.partial(simulate, spec)], repeats)
        ops = sum(len(program.ops) for program in simulate(spec).plan.programs)
        show(case=name, ops=ops, seconds=ours, cpu=cpu, ops_per_second=ops / ours)
    for size in BOTH:
        spec = PIPELINE.with_(devices=size[0], microbatches=size[1], global_batch=size[1])
        spec = spec.with_(schedule="interleaved_1f1b", stages_per_rank=STAGES)
        doing = [functools.partial(simulate, spec), functools.partial(torch_simulates, *size)]
        (ours, cpu), (theirs, their_cpu) = measure(doing, repeats)
        case = f"interleaved, {size[0]} ranks of {STAGES} stages, {size[1]} microbatches"
        show(case=case, seconds=ours, cpu=cpu, torch_seconds=theirs, torch_cpu=their_cpu, ratio=theirs / ours)


def torch_simulates(ranks: int, microbatches: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _simulate_comms_compute

    with contextlib.redirect_stdout(io.StringIO()):
        ops = get_schedule_ops("Interleaved1F1B", ranks, microbatches, STAGES, with_comms=True)
        ops = [[op for op in row if op and op.computation_type.name not in UNKNOWN] for row in ops]
        _simulate_comms_compute(dict(enumerate(ops)), lambda stage: stage % ranks, ranks * STAGES)


def measure(doing: list[Callable[[], object]], repeats: int) -> list[tuple[float, float]]:
    """The median seconds of each on the wall and on a core, one after the other in turn."""
    times: list[list[tuple[float, float]]] = [[] for _ in doing]
    for _ in range(1 + repeats):
        for do, mine in zip(doing, times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            do()
            mine.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [tuple(map(median, zip(*mine[1:], strict=True))) for mine in times]


def show(**values: object) -> None:
    print(json.dumps(values | {"load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
