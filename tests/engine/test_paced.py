"""Scale models, run: real gradients on small tensors, and ops that last as long as what is pictured says."""

from __future__ import annotations

import os
import time
from statistics import median

import pytest

from engine.archive import read_status
from engine.launch import start
from engine.paced import TABLE
from engine.predict import predict
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished

NEAR = 0.15  # of a step: how far a busy machine may be from the clock
SMALL = {"model": "mlp", "layers": 3, "hidden": 2048, "dataset": "synthetic", "steps": 4, "device": "cpu"}


def test_a_pipeline_takes_its_time_and_trains_as_one_device_does(launcher, runs_dir, alone) -> None:
    """Unit time, 4 stages, 8 microbatches: (8 + 3) x 3 = 33 times as long as a forward. Ranks sleep, so that 4 of them
    on two cores take no longer than they would on cores of their own."""
    spec = Spec(mode="pipeline", devices=4, microbatches=8, schedule="1f1b", paced="unit", dilation=0.03, **SMALL)
    with alone():
        result = finished(spec, launcher, runs_dir)
    assert result["parity"]["ok"] and result["conformance"]["ok"], (result["parity"], result["conformance"])
    assert result["predicted_step_time"] == pytest.approx(33 * 0.03)
    assert _best_step(runs_dir, result) == pytest.approx(33 * 0.03, rel=NEAR)
    assert result["scale_model"]["pictured_step_time"] == pytest.approx(33)
    assert result["scale_model"]["miniature"]["hidden"] == 32
    assert result["spec"]["hidden"] == 2048
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet")
    assert median(_of(timeline, "forward")) == pytest.approx(0.03, rel=2 * NEAR)
    assert median(_of(timeline, "backward")) == pytest.approx(0.06, rel=2 * NEAR)
    assert not (runs_dir / result["run_id"] / TABLE).exists()


def test_replicas_wait_for_a_slow_one_at_their_gradients(launcher, runs_dir, alone) -> None:
    spec = Spec(mode="ddp", devices=4, paced="h100", slow_rank="2:2", global_batch=4096, **SMALL)
    factor = 0.4 / (predict(spec).step_time / predict(spec).dilation)
    spec = spec.with_(dilation=round(factor, 3))
    with alone():
        result = finished(spec, launcher, runs_dir)
    assert result["parity"]["ok"] and result["conformance"]["ok"], (result["parity"], result["conformance"])
    predicted = predict(spec).timeline
    assert _best_step(runs_dir, result) == pytest.approx(result["predicted_step_time"], rel=NEAR)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3)
    busy = [sum(_of(timeline, "forward", rank) + _of(timeline, "backward", rank)) for rank in range(4)]
    assert busy[2] > 1.5 * max(busy[0], busy[1], busy[3])
    for span in timeline.spans():
        if span.kind == "all_reduce":  # as long as on the pictured links, whatever the loopback took
            wanted = [s.duration for s in predicted.spans() if (s.kind, s.part) == (span.kind, span.part)]
            assert span.duration == pytest.approx(wanted[0], rel=1e-3)
    last = {rank: max(s.end for s in timeline.spans() if s.rank == rank and s.kind == "backward") for rank in range(4)}
    assert max(last, key=last.get) == 2


def test_a_scale_model_that_is_stopped_leaves_nothing(launcher, runs_dir) -> None:
    spec = Spec(mode="pipeline", devices=4, microbatches=8, paced="unit", dilation=0.3, **SMALL)
    handle = start(spec, runs_dir=runs_dir, launcher=launcher)
    limit = time.monotonic() + 60
    while not (table := handle.run_dir / TABLE).exists() or not any(handle.run_dir.glob("rank*.steps.jsonl")):
        assert time.monotonic() < limit and not handle.done
        time.sleep(0.02)
    pids = read_status(handle.run_dir)["worker_pids"]
    handle.stop()
    assert handle.result(timeout=30)["status"] == "stopped"
    assert len(pids) == 4 and not any(_lives(pid) for pid in pids)
    assert not table.exists()


def _best_step(runs_dir, result: dict) -> float:
    """Seconds: what else a machine does can only make a step longer."""
    return min(Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step_seconds().values())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _of(timeline: Timeline, kind: str, rank: int | None = None) -> list[float]:
    return [span.duration for span in timeline.spans() if span.kind == kind and rank in (None, span.rank)]
