"""A spec -> the result of its real run, and the claims that every such result must bear out."""

from __future__ import annotations

from engine.launch import Launcher, start
from engine.predict import Prediction
from engine.spec import Spec
from tests import table

# For variants of what a longer run has proven, which compares three steps of four. The second step's gradients are of
# weights that the first has updated, its weights those of an optimizer that has state, and its collectives those of a
# training that goes on; the third is not compared, and would show what the comparison disturbs.
BRIEF = {"steps": 3, "parity_steps": 2, "device": "cpu"}


def finished(spec: Spec, launcher: Launcher, runs_dir, *, measure_memory: bool = False) -> dict:
    """To measure memory takes a few more steps, slowly, so few tests ask for it. To compile takes minutes where
    other things run too."""
    spec = spec.with_(measure_memory=measure_memory)
    limit = 600 if spec.compile_stage == "torch_compile" else 120
    result = start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=limit)
    assert result["status"] == "finished", result["error"]
    return result


def planned(prediction: Prediction) -> None:
    """Keep that it was, for the README's table."""
    spec = prediction.job.spec
    table.record(what="plan", mode=spec.mode, devices=spec.devices, model=spec.model)


def holds(result: dict) -> None:
    """Parity and conformance, with every step recorded and every parameter compared. What was found is kept first, for
    the README's table."""
    _keep(result, parity=result["parity"]["ok"])
    assert result["parity"]["ok"], result["parity"]
    asked = result["spec"]["parity_steps"]
    assert result["parity"]["steps"] == (3 if asked is None else asked) >= BRIEF["parity_steps"]
    _conforms(result)


def holds_by_design(result: dict) -> None:
    """The same of a mode that differs from one device by design: parity is with a simulation of that design."""
    parity = result["parity"]
    _keep(result, parity="by design" if parity["ok"] is None and parity["exact"]["ok"] else False)
    assert parity["ok"] is None and parity["exact"]["ok"], parity
    _conforms(result)


def _keep(result: dict, *, parity: bool | str | None) -> None:
    who = {"mode": result["mode"], "devices": result["devices"], "model": result["spec"]["model"]}
    table.record(what="run", **who, conformance=result["conformance"]["ok"], parity=parity)


def _conforms(result: dict) -> None:
    conformance = result["conformance"]
    assert conformance["ok"], conformance["first_difference"]
    assert conformance["planned"] == conformance["measured"] == conformance["matched"] > 0
    assert conformance["steps"] == result["total_steps"] == result["steps"]
    assert result["validation_accuracy"] is not None
