"""The same training with recording on and off, in turn -> the ratio of their median step times.

    python -m bench.overhead            # a gpt with steps of about 100 ms on 2 ranks

Runs alternate, so that whatever else the machine does falls on both alike. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from statistics import median

from engine.archive import read_steps
from engine.launch import Launcher, start
from engine.spec import Spec

WARMUP = 3  # steps at the start of a run that are not counted


def step_times(spec: Spec, launcher: Launcher, runs_dir: str) -> list[float]:
    """Seconds of each counted step, from the first rank's start to the last rank's end."""
    handle = start(spec, runs_dir=runs_dir, launcher=launcher)
    result = handle.result(timeout=600)
    if result["status"] != "finished":
        raise RuntimeError(result["error"])
    ranks = [read_steps(handle.run_dir, rank) for rank in range(spec.devices)]
    steps = list(zip(*ranks, strict=True))[WARMUP:]
    return [max(r["end"] for r in step) - min(r["start"] for r in step) for step in steps]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--steps", type=int, default=30)
    rounds, steps = (getattr(arguments.parse_args(), name) for name in ("rounds", "steps"))
    spec = Spec(
        mode="ddp", devices=2, model="gpt", layers=4, hidden=128, heads=4, context=64, global_batch=16,
        steps=steps + WARMUP, parity_steps=0, device="cpu",
    )  # fmt: skip
    on: list[float] = []
    off: list[float] = []
    ratios = []
    with tempfile.TemporaryDirectory() as runs_dir, Launcher() as launcher:
        launcher.warm()
        for i in range(rounds):
            order = ((True, on), (False, off)) if i % 2 else ((False, off), (True, on))
            for record, times in order:
                times += step_times(spec.with_(record=record), launcher, runs_dir)
            ratios.append(median(on[-steps:]) / median(off[-steps:]))
    print(
        json.dumps(
            {
                "recorded_step_time": median(on),
                "unrecorded_step_time": median(off),
                "ratio": median(on) / median(off),
                "ratio_of_each_round": [round(ratio, 4) for ratio in ratios],
                "steps": len(on),
            }
        )
    )


if __name__ == "__main__":
    main()
