"""Plans of growing size -> how long preparing, planning and simulating one takes, and how many ops a second that is.

    python -m bench.simulate

Prints one JSON object a case, in seconds of wall time: the median of the repeats.
"""

from __future__ import annotations

import json
import time
from statistics import median

from engine import simulate
from engine.spec import Spec

REPEATS = 3
CASES = {
    "pipeline of 64 stages, 1,024 microbatches": Spec(
        mode="pipeline", devices=64, model="gpt", layers=62, global_batch=1024, microbatches=1024, machine="h100"
    ),
    "pipeline of 64 stages, 3,072 microbatches": Spec(
        mode="pipeline", devices=64, model="gpt", layers=62, global_batch=3072, microbatches=3072, machine="h100"
    ),
    "ddp of 1,024 ranks": Spec(mode="ddp", devices=1024, global_batch=1024, machine="h100"),
}


def main() -> None:
    for name, spec in CASES.items():
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            prediction = simulate(spec)
            times.append(time.perf_counter() - start)
        num_ops = len(prediction.timeline)
        print(
            json.dumps(
                {"case": name, "ops": num_ops, "seconds": median(times), "ops_per_second": num_ops / median(times)}
            )
        )


if __name__ == "__main__":
    main()
