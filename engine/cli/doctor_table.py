"""What was found of this machine -> a table for people."""

from __future__ import annotations

import time
from typing import Any

from engine.cli.tables import failure, rows


def doctor(report: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version or 'MISSING'}" for name, version in report["packages"].items())
    checks = ", ".join(f"{name} {'ok' if ok else 'FAILED'}" for name, ok in report["checks"].items())
    lines = [("python", report["python"]), ("packages", packages), ("cores", str(report["cores"]))]
    lines += [("torch.compile", f"needs {lacking}" if (lacking := report["torch_compile_lacks"]) else "can be used")]
    lines += [("calibration", calibrated(report["calibration"]))]
    lines += [("gpus", str(report["gpus"])), ("ddp on 2 CPU ranks", checks)]
    return rows(lines) + (f"\n{failure(report['error'])}" if report["error"] else "")


def calibrated(told: dict[str, Any]) -> str:
    """What the machine `local` is predicted with, and what would be better."""
    if told["source"] == "calibrated":
        then = "; other programs kept {other} of {cores} cores busy then: measure again" if told["disturbed"] else ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(told["made"]))
        return f"of this machine, {when}{then.format_map(told['disturbed'] or {})}"
    why = f": {told['refused']}" if told["refused"] else "; measure this machine's: python -m engine calibrate"
    return f"shipped ({told['cpu']}, {told['cores']} cores){why}"
