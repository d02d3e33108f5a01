"""Real runs of every mode: the ops measured are the ops planned, and the numbers are those of one device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import archive
from engine.job import prepare_real
from engine.launch import start
from engine.outcome.finish import finish
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished, holds

pytestmark = pytest.mark.real

SHORT = {"steps": 4, "device": "cpu"}


@pytest.mark.parametrize("devices", [1, 3, 4])  # two: in the next test
@pytest.mark.parametrize("mode", ["data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "layer_split", "pipeline"])
def test_every_mode_equals_one_device_and_does_what_was_planned(mode, devices, launcher, runs_dir):
    spec = Spec(mode=mode, devices=devices, model="cnn", global_batch=12, **SHORT)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.parametrize("mode", ["data_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "layer_split", "pipeline"])
def test_a_transformer_under_adamw(mode, launcher, runs_dir):
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "context": 16}
    spec = Spec(mode=mode, devices=2, model="gpt", **sizes, optimizer="adamw", lr=1e-3, global_batch=16, **SHORT)
    holds(finished(spec, launcher, runs_dir))


def test_one_device_equals_itself(launcher, runs_dir):
    result = finished(Spec(mode="single", devices=1, model="mlp", **SHORT), launcher, runs_dir)
    holds(result)
    assert result["parity"]["loss_max_abs_diff"] == result["parity"]["grad_max_rel_diff"] == 0.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_by_hand(schedule, launcher, runs_dir):
    """The split given is the split run: three layers and one, eight microbatches."""
    spec = Spec(mode="pipeline", devices=2, split=(3, 1), schedule=schedule, microbatches=8, **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet")
    forwards = (timeline["kind"] == "forward") & (timeline["step"] == 3) & (timeline["rank"] == 1)
    assert timeline["microbatch"][forwards].tolist() == list(range(8))


# Buckets of the mlp with hidden 256: out 10,280 bytes; fc2 263,168; fc1 803,840 (weight and bias each). Of the cnn's
# convolutions the weights' gradients arrive first, so that conv2's fills a bucket and its bias is in the next.
@pytest.mark.parametrize(
    ("model", "limit", "buckets"),
    [
        ("mlp", 25.0, [1_077_288]),
        ("mlp", 0.2, [273_448, 803_840]),
        ("mlp", 0.001, None),
        ("cnn", 0.05, [1_622_040, 100_000, 2_280]),
    ],
)
def test_ddp_reduces_the_buckets_that_were_predicted(model, limit, buckets, launcher, runs_dir):
    spec = Spec(mode="ddp", devices=2, model=model, bucket_mb=limit, **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet")
    for rank in range(2):
        reduced = (timeline["kind"] == "all_reduce") & (timeline["step"] == 3) & (timeline["rank"] == rank)
        if buckets:
            assert timeline["bytes"][reduced].tolist() == buckets
        # 269,322 or 431,080 parameters of 4 bytes
        assert timeline["bytes"][reduced].sum() == {"mlp": 1_077_288, "cnn": 1_724_320}[model]


def test_a_wrong_gradient_on_one_rank_is_seen(launcher, runs_dir):
    """The negative control of parity: in its last step, one rank scales its averaged gradients by 1.5."""
    spec = Spec(mode="ddp", devices=2, model="mlp", fault="gradient@1:2", **SHORT)
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False
    assert parity["grad_max_rel_diff"] == pytest.approx(0.5, abs=1e-3)
    assert "grad_max_rel_diff" in parity["reason"]


@pytest.mark.parametrize("mode", ["zero1", "zero2", "fsdp", "hsdp"])
def test_eight_ranks_share_a_model_of_uneven_rows(mode, launcher, runs_dir):
    """Ten output rows on eight ranks: five keep two, three none; of 4 parameters, four ranks own none."""
    spec = Spec(mode=mode, devices=8, model="mlp", layers=1, hidden=12, global_batch=48, **SHORT)
    holds(finished(spec, launcher, runs_dir))


@pytest.mark.parametrize(("dp", "fsdp"), [(1, 4), (4, 1)])
def test_replicas_of_shards_on_the_other_meshes_of_four(dp, fsdp, launcher, runs_dir):
    holds(finished(Spec(mode="hsdp", devices=4, dp=dp, fsdp=fsdp, model="mlp", **SHORT), launcher, runs_dir))


def test_a_wrong_shard_of_a_gradient_is_seen_in_the_whole(launcher, runs_dir):
    """The negative control where gradients are shards: one rank's shard is scaled by 1.5."""
    spec = Spec(mode="fsdp", devices=2, model="mlp", fault="gradient@1:2", **SHORT)
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False
    assert 0.1 < parity["grad_max_rel_diff"] <= 0.5 + 1e-3  # the largest entry may lie in the other shard


def test_a_gathered_layer_computes_outside_of_its_gather(launcher, runs_dir):
    """Compute spans leave out every wait: on a rank nothing that it communicates overlaps what it computes, since
    gloo's collectives are waited for on the spot."""
    spec = Spec(mode="fsdp", devices=2, model="mlp", **SHORT)
    result = finished(spec, launcher, runs_dir)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3)
    for rank in range(2):
        spans = sorted((s for s in timeline.spans() if s.rank == rank), key=lambda s: s.start)
        assert [s.part for s in spans if s.kind == "all_gather"] == ["fc1", "fc2", "out", "out", "fc2", "fc1"]
        gathers = [s for s in spans if s.lane == "fsdp"]
        for compute in (s for s in spans if s.kind in ("forward", "backward")):
            assert not any(g.start < compute.start < g.end or compute.start < g.start < compute.end for g in gathers)


def test_a_message_goes_on_when_its_sender_sends(launcher, runs_dir):
    """After settling, both ends of a message tell of the same transfer, and it ends no earlier than it began."""
    spec = Spec(mode="layer_split", devices=3, model="mlp", **SHORT)
    result = finished(spec, launcher, runs_dir)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(3)
    spans = list(timeline.spans())
    sends = [s for s in spans if s.kind == "send"]
    assert len(sends) == 4
    for send in sends:
        (recv,) = [
            r for r in spans if r.kind == "recv" and (r.peer, r.rank, r.payload) == (send.rank, send.peer, send.payload)
        ]
        assert send.start <= recv.start <= recv.end
        assert send.end <= recv.end
        assert send.bytes == recv.bytes > 0


def test_without_recording_nothing_is_claimed(launcher, runs_dir):
    result = finished(Spec(mode="ddp", devices=2, model="mlp", record=False, **SHORT), launcher, runs_dir)
    assert result["conformance"]["ok"] is None
    assert result["conformance"]["reason"] == "recording was off"
    assert result["parity"]["ok"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("raise@1:2", "raised on purpose"), ("exit@1:2", "7"), ("kill@1:2", "signal 9")],
)
def test_the_rank_that_fails_is_named_and_not_its_peers(fault, message, launcher, runs_dir):
    spec = Spec(mode="ddp", devices=3, model="mlp", global_batch=48, fault=fault, **SHORT)
    result = start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=60)
    assert result["status"] == "failed"
    assert result["error"]["rank"] == 1
    assert message in result["error"]["message"]
    assert result["error"]["step"] == 2  # the step it was in, whether it said so or not
    assert result["steps"] == 2
    assert result["conformance"]["ok"] is not False


def test_a_slow_rank_keeps_the_others_waiting(launcher, runs_dir):
    spec = Spec(mode="ddp", devices=2, model="mlp", fault="slow@1:2:0.3", **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["step_time"] > 0.3
    (straggler,) = result["stragglers"]  # who came last to the collectives, though it spent the least time in them
    assert straggler["rank"] == 1 and straggler["seconds"] > 0.25
    waits = {row["rank"]: row["seconds"] for row in result["idle_causes"]["ranks"]}
    assert waits[0]["straggler"] > 0.25 and waits[1]["start"] > 0.25  # it sleeps before it begins
    assert result["critical_path"]["seconds"] > 0.3
    assert 0 <= result["overlap_fraction"] <= 1


@pytest.mark.parametrize(("paced", "policy"), [(None, os.SCHED_BATCH), ("h100", os.SCHED_OTHER)])
def test_ranks_take_no_core_from_who_runs(paced, policy, launcher, runs_dir):
    """None of their threads, gloo's among them; but a rank of a scale model wakes when its moment has come."""
    spec = Spec(mode="ddp", devices=2, model="mlp", steps=1000, parity_steps=0, paced=paced, device="cpu")
    handle = start(spec, runs_dir=runs_dir, launcher=launcher)
    while not handle.poll().step and not handle.done:
        time.sleep(0.02)
    workers = archive.read_status(handle.run_dir)["worker_pids"]
    threads = [thread for pid in workers for thread in Path(f"/proc/{pid}/task").iterdir()]
    names = [(thread / "comm").read_text().strip() for thread in threads]
    policies = {os.sched_getscheduler(int(thread.name)) for thread in threads}
    handle.stop()
    assert handle.result(timeout=60)["status"] == "stopped"
    assert names.count("gloo_tcp_loop") >= len(workers)
    assert policies == {policy}


def test_many_runs_leave_nothing_hanging(launcher, runs_dir):
    """A process group that is destroyed at the end of a run hangs now and then (see docs/decisions)."""
    spec = Spec(mode="ddp", devices=4, model="mlp", layers=1, hidden=16, steps=1, parity_steps=1, device="cpu")
    for _ in range(5):
        assert start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=60)["status"] == "finished"


def test_the_same_worker_runs_under_torchrun(runs_dir):
    """Any program that sets RANK, WORLD_SIZE and MASTER_ADDR can start it: the way to more than one machine."""
    run_dir = archive.new_run(runs_dir, prepare_real(Spec(mode="ddp", devices=2, model="mlp", **SHORT)))
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 -m engine.real.worker".split()
    done = subprocess.run(
        [sys.executable, *words, str(run_dir)], cwd=archive.RUNS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    holds(finish(run_dir, "finished"))
