"""Every mode on 2 and 4 ranks, run for real -> a table of the predicted and the measured step, its error, and why.

    python -m engine calibrate && python -m bench.accuracy

Runs are in turn, `--rounds` times; of each case the median. The median error is over all cases, without their signs.
Something else that runs on the machine shows as contention. `--json` prints one object instead.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from statistics import median
from typing import Any

from engine import tables
from engine.accuracy import explain
from engine.cost import calibration
from engine.launch import Launcher, start
from engine.spec import MODES, Spec

STEPS = 14
SIZES = {"model": "gpt", "global_batch": 16, "dataset": "synthetic"}
OF_MODE = {"expert": {"model": "moe"}, "pipeline": {"microbatches": 4}, "hsdp": {}, "single": {}}
HYBRIDS = ({"fsdp": 2, "tp": 2}, {"pp": 2, "dp": 2, "microbatches": 4})


def cases(ranks: tuple[int, ...], modes: tuple[str, ...]) -> list[Spec]:
    found = []
    for mode in modes:
        for devices in (1,) if mode == "single" else (4,) if mode == "hybrid" else ranks:
            for more in HYBRIDS if mode == "hybrid" else (OF_MODE.get(mode, {}),):
                given = {"mode": mode, "devices": devices, "steps": STEPS, **SIZES, **more}
                if mode == "hsdp":
                    given |= {"dp": 2, "fsdp": devices // 2}
                found.append(Spec(**given, parity_steps=0, measure_memory=False, device="cpu"))
    return found


def measure(spec: Spec, launcher: Launcher, runs_dir: str) -> dict[str, Any]:
    result = start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=300)
    if result["status"] != "finished":
        raise RuntimeError(f"{spec.mode}: {result['error']}")
    return result["accuracy"]


def name(spec: Spec) -> str:
    degrees = [f"{axis} {getattr(spec, axis)}" for axis in ("pp", "dp", "fsdp", "tp") if getattr(spec, axis)]
    return f"{spec.mode} {spec.model}" + (f" ({', '.join(degrees)})" if degrees else "")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--modes", nargs="+", default=MODES)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    specs = cases(tuple(given.ranks), tuple(given.modes))
    seen: dict[Spec, list[dict[str, Any]]] = {spec: [] for spec in specs}
    with tempfile.TemporaryDirectory() as runs_dir, Launcher() as launcher:
        launcher.warm()
        for _ in range(given.rounds):
            for spec in specs:
                seen[spec].append(measure(spec, launcher, runs_dir))
    rows = []
    for spec, each in seen.items():
        middle = sorted(each, key=lambda found: found["step"]["measured"])[len(each) // 2]
        why = explain(middle["reason"], tables.seconds) if middle["reason"] else ""
        rows.append({"case": name(spec), "ranks": spec.devices, **middle["step"], "why": why, "ops": middle["ops"]})
    off = median(abs(row["error"]) for row in rows)
    if given.json:
        told = calibration.told()
        print(json.dumps({"median_error": off, "cores": os.cpu_count(), "calibration": told, "rows": rows}))
        return
    for row in rows:
        took = f"{tables.seconds(row['predicted']):>9} {tables.seconds(row['measured']):>9}"
        print(f"{row['case']:<34} {row['ranks']} ranks {took} {100 * row['error']:>+5.0f} %  {row['why']}")
    print(f"median error {100 * off:.1f} % of {len(rows)} cases")


if __name__ == "__main__":
    main()
