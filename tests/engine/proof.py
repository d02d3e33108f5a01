"""A spec -> the result of its real run, and the claims that every such result must bear out."""

from __future__ import annotations

from engine.launch import Launcher, start
from engine.spec import Spec


def finished(spec: Spec, launcher: Launcher, runs_dir) -> dict:
    result = start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=120)
    assert result["status"] == "finished", result["error"]
    return result


def holds(result: dict) -> None:
    """Parity and conformance, with every step recorded and every parameter compared."""
    assert result["parity"]["ok"], result["parity"]
    assert result["parity"]["steps"] == 3
    conformance = result["conformance"]
    assert conformance["ok"], conformance["first_difference"]
    assert conformance["planned"] == conformance["measured"] == conformance["matched"] > 0
    assert conformance["steps"] == result["total_steps"] == result["steps"]
    assert result["validation_accuracy"] is not None
