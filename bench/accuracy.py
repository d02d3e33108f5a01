"""Every mode on 2 and 4 ranks, run for real -> a table of the predicted and the measured step, its error, and why.

    python -m bench.accuracy --rounds 3

Each round is a calibration, and then a run of every case, predicted with it (`--stored`: with the one that is stored
here). What other programs disturbed is run again. `--keep FILE` adds the rounds to a file, and tells of all in it.

Errors are without their signs in medians. Two runs of one case differ too: by how much is the floor, the error that a
prediction would have which is the same run, an earlier round of it. A case whose error has one sign in all rounds is
off for a reason other than that. `at speed`: with what is predicted brought to the speed that this machine had when the
run had ended, beside when it was calibrated, where that differed. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from engine.calibration.calibrate import Measuring
from engine.cli import tables
from engine.cost import calibration
from engine.launch import Launcher, start
from engine.outcome.accuracy import explain, shared_with
from engine.spec import MODES, Spec

STEPS = 14
TRIES = 3  # of a run, while other programs disturb it
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
    """What the result says of its accuracy; of several tries, of the one that was disturbed least."""
    tries = []
    for _ in range(TRIES):
        result = start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=300)
        if result["status"] != "finished":
            raise RuntimeError(f"{spec.mode}: {result['error']}")
        tries.append(result["accuracy"])
        if not shared_with(tries[-1]):
            break
    return min(tries, key=lambda found: found["other_cores"] or 0.0)


def name(spec: Spec) -> str:
    degrees = [f"{axis} {getattr(spec, axis)}" for axis in ("pp", "dp", "fsdp", "tp") if getattr(spec, axis)]
    return f"{spec.mode} {spec.model}" + (f" ({', '.join(degrees)})" if degrees else "") + f", {spec.devices}"


def one_round(specs: list[Spec], *, stored: bool) -> dict[str, Any]:
    """`disturbed`: cores that other programs kept busy while it was calibrated, and names of runs that they disturbed
    in all tries."""
    with tempfile.TemporaryDirectory() as folder:
        if not stored:
            path = Path(folder) / "calibration.json"
            calibration.store(Measuring().run(), path)
            os.environ[calibration.VARIABLE] = str(path)
        with Launcher() as launcher:
            launcher.warm()
            found = {name(spec): measure(spec, launcher, folder) for spec in specs}
        made = calibration.find().calibration
    rows = {}
    for case, one in found.items():
        why = explain(one["reason"], tables.seconds) if one["reason"] else ""
        rows[case] = {
            **one["step"],
            "slower": one["slower"] or 1.0,
            "at_speed": (one["at_speed"] or one["step"])["error"],
            "why": why,
            "other_cores": one["other_cores"],
            "ops": one["ops"],
        }
    return {
        "made": made.made,
        "disturbed": {
            "calibration": made.was_disturbed,
            "runs": [case for case, one in found.items() if shared_with(one)],
        },
        "rows": rows,
    }


def apart(pairs: Iterable[tuple[float, float]]) -> float | None:
    """By how much the second one is off the first, in the median; None of nothing."""
    off = [abs(other / one - 1) for one, other in pairs]
    return median(off) if off else None


def told(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each case its rounds; the median error of each round and of the cases' own medians; the floor (see above); by
    how much predictions of one case differ between calibrations; cases that are off to one side in all rounds."""
    cases = [case for case in rounds[-1]["rows"] if all(case in each["rows"] for each in rounds)]
    rows = {case: [each["rows"][case] for each in rounds] for case in cases}
    middle = {case: median(row["error"] for row in each) for case, each in rows.items()}
    pairs = [pair for each in rows.values() for pair in itertools.permutations(each, 2)]
    one_side = {case: off for case, off in middle.items() if len({row["error"] > 0 for row in rows[case]}) == 1}
    return {
        "rows": rows,
        "error": middle,
        "median_error": median(abs(off) for off in middle.values()),
        "at_speed": [median(abs(each["rows"][case]["at_speed"]) for case in cases) for each in rounds],
        "slower": [median(each["rows"][case]["slower"] for case in cases) for each in rounds],
        "of_rounds": [median(abs(each["rows"][case]["error"]) for case in cases) for each in rounds],
        "floor": apart((one["measured"], other["measured"]) for one, other in pairs),
        "calibrations": apart((one["predicted"], other["predicted"]) for one, other in pairs),
        "one_side": one_side if len(rounds) > 1 else {},
        "disturbed": [each["disturbed"] for each in rounds],
        "cores": os.cpu_count(),
    }


def show(found: dict[str, Any]) -> None:
    for case, each in found["rows"].items():
        took = f"{tables.seconds(median(row['measured'] for row in each)):>9}"
        errors = " ".join(f"{100 * row['error']:>+4.0f}" for row in each)
        side = "*" if case in found["one_side"] else " "
        print(f"{case:<34} {took} {100 * found['error'][case]:>+5.0f} % {side} ({errors})  {each[-1]['why']}")
    print(f"median error {100 * found['median_error']:.1f} % of {len(found['rows'])} cases")
    pairs = zip(found["slower"], found["at_speed"], strict=True)
    speeds = ", ".join(f"{slower:.2f} and {100 * off:.1f} %" for slower, off in pairs)
    print(f"the same took so many times as long as when calibrated, and the median error at that speed: {speeds}")
    if len(found["of_rounds"]) > 1:
        of_rounds = ", ".join(f"{100 * off:.1f}" for off in found["of_rounds"])
        print(
            f"of each round {of_rounds} %; one run of a case against another (the floor) {100 * found['floor']:.1f} %"
        )
        print(f"one calibration's prediction against another's {100 * found['calibrations']:.1f} %")
        print(f"* off to one side in all rounds: {len(found['one_side'])}")
    for disturbed in found["disturbed"]:
        if disturbed["calibration"]:
            print(
                "other programs kept {other} of {cores} cores busy while it was calibrated".format_map(
                    disturbed["calibration"]
                )
            )
        if disturbed["runs"]:
            print(f"other programs disturbed {', '.join(disturbed['runs'])}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--modes", nargs="+", default=MODES)
    arguments.add_argument("--stored", action="store_true")
    arguments.add_argument("--keep", type=Path)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    specs = cases(tuple(given.ranks), tuple(given.modes))
    rounds = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else []
    for _ in range(given.rounds):
        rounds.append(one_round(specs, stored=given.stored))
        if given.keep:
            given.keep.write_text(json.dumps(rounds))
    found = told(rounds)
    print(json.dumps(found)) if given.json else show(found)


if __name__ == "__main__":
    main()
