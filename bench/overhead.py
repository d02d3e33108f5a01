"""The same training with recording on and off, in turn -> the ratio of their step times.

    python -m bench.overhead            # a gpt with steps of about 100 ms on 2 ranks

They take turns (`bench/turns.py`), so that whatever else the machine does falls on both alike. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile

from bench.turns import WARMUP, alternate, compared, recorded
from engine.launch import Launcher
from engine.spec import Spec


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=60)
    given = arguments.parse_args()
    spec = Spec(
        mode="ddp", devices=2, model="gpt", layers=4, hidden=128, heads=4, context=64, global_batch=16,
        steps=given.steps + WARMUP, parity_steps=0, device="cpu",
    )  # fmt: skip
    turns = []
    with tempfile.TemporaryDirectory() as runs_dir, Launcher() as launcher:
        launcher.warm()
        ways = [
            lambda record=record: recorded(spec.with_(record=record), launcher, runs_dir) for record in (True, False)
        ]
        for _ in range(given.rounds):
            turns.append(alternate(*ways)[0])
    print(json.dumps(compared(turns)))


if __name__ == "__main__":
    main()
