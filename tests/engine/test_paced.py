"""Scale models, run: real gradients on small tensors, and ops that last as long as what is pictured says."""

from __future__ import annotations

import os
import time
from statistics import median

import pytest

from engine.archive import read_status
from engine.launch import start
from engine.predict import predict
from engine.scale_model.paced import TABLE
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished

NEAR = 0.15  # of a step: how far a busy machine may be from the clock
SMALL = {"model": "mlp", "layers": 3, "hidden": 2048, "dataset": "synthetic", "steps": 4, "device": "cpu"}


def test_a_pipeline_takes_its_time_and_trains_as_one_device_does(launcher, runs_dir, alone) -> None:
    """Unit time, 4 stages, 8 microbatches: (8 + 3) x 3 = 33 times as long as a forward. Ranks sleep, so that 4 of them
    on two cores take no longer than they would on cores of their own."""
    spec = Spec(mode="pipeline", devices=4, microbatches=8, schedule="1f1b", paced="unit", dilation=0.03, **SMALL)
    result, timeline = _undisturbed(spec, launcher, runs_dir, alone)
    assert result["predicted_step_time"] == pytest.approx(33 * 0.03)
    assert result["scale_model"]["pictured_step_time"] == pytest.approx(33)
    assert result["scale_model"]["miniature"]["hidden"] == 32
    assert result["spec"]["hidden"] == 2048
    assert median(_of(timeline, "forward")) == pytest.approx(0.03, rel=2 * NEAR)
    assert median(_of(timeline, "backward")) == pytest.approx(0.06, rel=2 * NEAR)
    assert not (runs_dir / result["run_id"] / TABLE).exists()


def test_replicas_wait_for_a_slow_one_at_their_gradients(launcher, runs_dir, alone) -> None:
    spec = Spec(mode="ddp", devices=4, paced="h100", slow_rank="2:2", global_batch=4096, **SMALL)
    factor = 0.4 / (predict(spec).step_time / predict(spec).dilation)
    spec = spec.with_(dilation=round(factor, 3))
    _, timeline = _undisturbed(spec, launcher, runs_dir, alone)
    seconds = timeline.step_seconds()
    best = timeline.step(min(seconds, key=seconds.get))
    busy = [sum(_of(best, "forward", rank) + _of(best, "backward", rank)) for rank in range(4)]
    assert busy[2] > 1.5 * max(busy[0], busy[1], busy[3])
    last = {rank: max(s.end for s in best.spans() if s.rank == rank and s.kind == "backward") for rank in range(4)}
    assert max(last, key=last.get) == 2
    wanted = {span.part: span.duration for span in predict(spec).timeline.spans() if span.kind == "all_reduce"}
    assert len(wanted) > 1
    for part, length in wanted.items():  # as long as on the pictured links, whatever the loopback took
        took = [span.duration for span in timeline.spans() if (span.kind, span.part) == ("all_reduce", part)]
        assert min(took) == pytest.approx(length, rel=1e-3)


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


def _undisturbed(spec: Spec, launcher, runs_dir, alone) -> tuple[dict, Timeline]:
    """A right run whose best step is on time. What else a machine does can only make a step longer: once more, then."""
    for _ in range(3):
        with alone():
            result = finished(spec, launcher, runs_dir)
        assert result["parity"]["ok"] and result["conformance"]["ok"], (result["parity"], result["conformance"])
        timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet")
        best = min(timeline.step_seconds().values())
        if best <= (1 + NEAR) * result["predicted_step_time"]:
            break
    assert best == pytest.approx(result["predicted_step_time"], rel=NEAR)
    return result, timeline


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _of(timeline: Timeline, kind: str, rank: int | None = None) -> list[float]:
    return [span.duration for span in timeline.spans() if span.kind == kind and rank in (None, span.rank)]
