"""Scale models on this machine -> how near their steps come to what is simulated, and what ranks that sleep show.

    python -m bench.paced                  # three tables, about four minutes
    python -m bench.paced schedules --machine unit --steps 8

schedules: 4 stages, 8 microbatches, every schedule that PyTorch has: the median step against the simulated one.
replicas: the same global batch on 1, 2, 4 and 8 devices, at one factor: how many times faster a step is.
slow: the same pipeline and replicas with a rank that takes twice as long: how long each rank waits, and for whom.
modes: every mode once, on 4 devices.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from engine.asking.rules import SpecError
from engine.asking.settings import MODE_SETTINGS
from engine.launch import Launcher, start
from engine.predict import predict
from engine.spec import Spec
from engine.timeline import Timeline

SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
MODEL = {"model": "llama3_8b", "measure_memory": False}
GPT = {"model": "gpt", "dataset": "synthetic", "layers": 8, "hidden": 2048, "heads": 16, "context": 2048}
MODES = (
    {"mode": "single", "devices": 1},
    *({"mode": mode} for mode in ("ddp", "zero1", "zero2", "fsdp", "layer_split", "tensor", "sequence")),
    {"mode": "hsdp", "fsdp": 2},
    *({"mode": "context", "attention": attention} for attention in ("ring", "all_gather", "ulysses")),
    {"mode": "expert", "model": "moe", "bucket_mb": 65_536.0},
    *({"mode": "hybrid", "pp": 2, other: 2} for other in ("dp", "fsdp", "tp")),
    *({"mode": "hybrid", "fsdp": 2, other: 2} for other in ("tp", "cp")),
)


class Bench:
    def __init__(self, launcher: Launcher, folder: str, machine: str, steps: int):
        self.launcher, self.folder, self.machine, self.steps = launcher, folder, machine, steps

    def run(self, **settings) -> tuple[dict, Timeline]:
        """The result, and the timeline of the last step."""
        spec = Spec(**({"devices": 4, "paced": self.machine, "steps": self.steps} | MODEL | settings))
        handle = start(spec, runs_dir=self.folder, launcher=self.launcher)
        result = handle.result(timeout=600)
        if result["status"] != "finished":
            raise SystemExit(f"{settings}: {result['error']}")
        return result, Timeline.load(Path(handle.run_dir) / "timeline.parquet").step(self.steps - 1)

    def line(self, name: str, **settings) -> float:
        try:
            result, _ = self.run(**settings)
        except SpecError as refused:
            print(f"  {name:<28} {refused}")
            return 0.0
        error = result["step_time"] / result["predicted_step_time"] - 1
        proven = [word for word in ("parity", "conformance") if not result[word]["ok"]]
        print(
            f"  {name:<28} {result['scale_model']['ratio']:>11}  {result['predicted_step_time']:8.3f} s"
            f"  {result['step_time']:8.3f} s  {100 * error:+6.1f} %  {', '.join(f'NO {word}' for word in proven)}",
            flush=True,
        )
        return abs(error)


def schedules(bench: Bench) -> None:
    print(f"4 stages, 8 microbatches, {bench.machine}: factor, simulated, measured, error")
    errors = [bench.line(name, mode="pipeline", schedule=name, microbatches=8, global_batch=64) for name in SCHEDULES]
    print(f"  largest error {100 * max(errors):.1f} %, median {100 * median(errors):.1f} %")


def modes(bench: Bench) -> None:
    print(f"every mode on 4 devices, {bench.machine}: factor, simulated, measured, error")
    errors = []
    for case in MODES:
        words = [f"{name} {value}" for name, value in case.items() if name not in ("mode", "model", "bucket_mb")]
        buckets = {"bucket_mb": 400.0} if "bucket_mb" in MODE_SETTINGS[case["mode"]] else {}
        errors.append(bench.line(" ".join([case["mode"], *words]), **(GPT | buckets | case)))
    print(f"  largest error {100 * max(errors):.1f} %, median {100 * median(errors):.1f} %")


def replicas(bench: Bench) -> None:
    print(f"ddp, 64 samples a step, {bench.machine}: devices, simulated, measured, times faster than 1")
    shared = GPT | {"mode": "ddp", "bucket_mb": 400.0, "global_batch": 64}
    alone = predict(Spec(devices=8, paced=bench.machine, **shared)).dilation  # the factor that 8 need, for all
    first = None
    for devices in (1, 2, 4, 8):
        result, _ = bench.run(**shared, devices=devices, dilation=alone)
        first = first or result
        simulated = first["predicted_step_time"] / result["predicted_step_time"]
        faster = first["step_time"] / result["step_time"]
        print(
            f"  {devices}  {result['predicted_step_time']:8.3f} s  {result['step_time']:8.3f} s  "
            f"{faster:5.2f} times (simulated {simulated:.2f})",
            flush=True,
        )


def slow(bench: Bench) -> None:
    print("rank 2 takes twice as long: of each rank, the part of a step in which it computes, measured (simulated)")
    cases = {
        "1f1b": {"mode": "pipeline", "schedule": "1f1b", "microbatches": 8, "global_batch": 64},
        "ddp": GPT | {"mode": "ddp", "global_batch": 64, "bucket_mb": 400.0},
    }
    for name, case in cases.items():
        for slower in (None, "2:2"):
            result, timeline = bench.run(**case, slow_rank=slower)
            predicted = predict(Spec(devices=4, paced=bench.machine, slow_rank=slower, **(MODEL | case)))
            shares = [_busy(timeline, rank) for rank in range(4)]
            wanted = [_busy(predicted.timeline, rank) for rank in range(4)]
            words = "  ".join(f"{one:4.0%} ({other:4.0%})" for one, other in zip(shares, wanted, strict=True))
            error = 100 * (result["step_time"] / result["predicted_step_time"] - 1)
            print(f"  {name:<5} {slower or '-':<4} {result['step_time']:7.3f} s ({error:+.1f} %)  {words}", flush=True)


def _busy(timeline: Timeline, rank: int) -> float:
    mine = (timeline["rank"] == rank) & (timeline["lane"] == "compute")
    return float((timeline["end"][mine] - timeline["start"][mine]).sum() / timeline.makespan)


def main() -> None:
    tables = {"schedules": schedules, "replicas": replicas, "slow": slow, "modes": modes}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *tables], default=[])
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        launcher.warm()
        bench = Bench(launcher, folder, asked.machine, asked.steps)
        for name in asked.tables or ("schedules", "replicas", "slow"):
            tables[name](bench)


if __name__ == "__main__":
    main()
