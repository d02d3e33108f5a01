"""Three small real runs -> runs/gallery/, which is committed: what a visitor can look at before anything has run.

    python -m bench.gallery

Of each run only what the pages read is kept. Run it again, on a quiet machine, when what a run writes has changed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engine import archive
from engine.launch import Launcher, start
from engine.spec import Spec

SPECS = {
    "recorded-ddp4": Spec(mode="ddp", devices=4, model="cnn", dataset="digits", bucket_mb=0.5, steps=20),
    "recorded-pipeline4": Spec(mode="pipeline", devices=4, model="cnn", dataset="digits", schedule="1f1b", steps=20),
    "recorded-fsdp4": Spec(mode="fsdp", devices=4, model="cnn", dataset="digits", steps=20),
}
KEPT = ("spec.json", "status.json", "result.json", "timeline.parquet")


def record(spec: Spec, name: str, gallery: Path, launcher: Launcher) -> Path:
    """RuntimeError unless the run has finished as planned and equals one device's."""
    with tempfile.TemporaryDirectory() as folder:
        handle = start(spec, folder, launcher)
        result = handle.result(timeout=300)
        proved = [(result.get(proof) or {}).get("ok") for proof in ("parity", "conformance")]
        if result["status"] != "finished" or proved != [True, True]:
            raise RuntimeError(f"{name}: {result['status']}, parity and conformance {proved}, {result['error']}")
        kept = gallery / name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for file in KEPT:
            shutil.copy(handle.run_dir / file, kept)
    nobody = {"launcher_pid": None, "launcher_start": None, "worker_pids": []}  # processes of this machine
    for file, changes in (("status.json", nobody), ("result.json", {})):
        archive.write_json(kept / file, (archive.read_json(kept / file) or {}) | {"run_id": name} | changes)
    return kept


def main() -> None:
    with Launcher() as launcher:
        for name, spec in SPECS.items():
            kept = record(spec, name, archive.RUNS / archive.GALLERY, launcher)
            print(f"{kept}  {sum(file.stat().st_size for file in kept.iterdir()) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
