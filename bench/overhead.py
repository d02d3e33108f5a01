"""The same training with recording on and off, in turn -> the ratio of their step times.

    python -m bench.overhead            # a gpt with steps of about 50 ms on 2 ranks

They take turns (`bench/turns.py`), a third one beside them without recording too: `null` is that of the two without.
Prints one JSON object, of as many rounds as fit into the seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial

from bench.turns import WARMUP, alternate, compared, launcher, recorded
from engine.spec import Spec


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=180.0)
    arguments.add_argument("--steps", type=int, default=20)
    given = arguments.parse_args()
    spec = Spec(
        mode="ddp", devices=2, model="gpt", layers=4, hidden=128, heads=4, context=64, global_batch=16,
        steps=given.steps + WARMUP, parity_steps=0, measure_memory=False, device="cpu",
    )  # fmt: skip
    ways, rounds, began = (True, False, False), [], time.monotonic()
    with launcher(len(ways)) as warm:
        warm.warm()
        while not rounds or time.monotonic() - began < given.seconds:
            with tempfile.TemporaryDirectory() as runs_dir:
                begins = [partial(recorded, spec.with_(record=record), warm, runs_dir) for record in ways]
                rounds.append(alternate(*begins))
    print(json.dumps({**compared(rounds), "null": compared(rounds, 2, 1)}))


if __name__ == "__main__":
    main()
