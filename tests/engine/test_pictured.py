"""What is pictured -> the miniature with the same ops, its factor, and each rank's time: op for op as simulated."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.machine import machine
from engine.job import prepare
from engine.predict import predict
from engine.real import paced
from engine.real.paced import Pace, Table
from engine.scale_model.paced import ratio
from engine.scale_model.pictured import at_scale, dilation, miniature, steady_step, trained
from engine.spec import MODES, Spec
from engine.timeline import Span

LARGE = {"model": "gpt", "layers": 6, "hidden": 4096, "heads": 32, "context": 2048, "dataset": "synthetic"}
MIXED = {"model": "moe", "layers": 3, "hidden": 1024, "heads": 16, "context": 512, "dataset": "synthetic"}
PIPELINES = [
    {"mode": "pipeline", "schedule": schedule, "microbatches": 8}
    for schedule in ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
]
CASES = [
    {"mode": "single", "devices": 1} | LARGE,
    *(case | LARGE for case in PIPELINES),
    *({"mode": mode} | LARGE for mode in ("ddp", "zero1", "zero2", "fsdp", "local_sgd", "layer_split", "tensor")),
    {"mode": "ddp", "accumulate": 2, "compress": "fp16", "bucket_mb": 100.0} | LARGE,
    {"mode": "fsdp", "recompute": "full", "clip": 1.0, "precision": "bf16"} | LARGE,
    {"mode": "hsdp", "fsdp": 2} | LARGE,
    {"mode": "sequence"} | LARGE,
    *({"mode": "context", "attention": attention} | LARGE for attention in ("ring", "all_gather", "ulysses")),
    {"mode": "expert", "experts": 64, "top_k": 6, "bucket_mb": 1000.0} | MIXED,
    {"mode": "hybrid", "dp": 2, "ep": 2} | MIXED,
    {"mode": "hybrid", "pp": 2, "fsdp": 2, "schedule": "zbv"} | LARGE,
    {"mode": "hybrid", "fsdp": 2, "tp": 2} | LARGE,
    {"mode": "hybrid", "fsdp": 2, "cp": 2} | LARGE,
    {"mode": "pipeline", "schedule": "1f1b", "microbatches": 8, "slow_rank": "2:2", "slow_link": "0-1:50"} | LARGE,
    {"mode": "ddp", "model": "mlp", "hidden": 8192, "slow_rank": "1:1.5"},
    {"mode": "ddp", "model": "cnn"},
]


def _name(case: dict) -> str:
    return "-".join(str(value) for name, value in case.items() if name not in LARGE or name == "model")


def _job(case: dict, **more):
    return prepare(Spec(**({"devices": 4, "paced": "h100"} | case | more)))


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_miniature_does_what_is_pictured_with_small_tensors(case: dict) -> None:
    job = _job(case)
    small = miniature(job)
    for step in (0, 1, None):
        big_plan, plan = modes.plan(job, step), modes.plan(small, step)
        for rank in range(4 if job.spec.devices == 4 else 1):
            assert _by_lane(plan, rank) == _by_lane(big_plan, rank)
    assert len(small.layers) == len(job.layers) and small.stage_layers == job.stage_layers
    assert (small.steps, small.degree("pp"), small.replicas) == (job.steps, job.degree("pp"), job.replicas)
    if job.spec.model != "cnn":
        assert sum(layer.num_params for layer in small.layers) < 600_000


def _by_lane(plan, rank: int) -> dict:
    lanes = defaultdict(list)
    for op in plan.program(rank).ops:
        what = [op.kind, op.payload, op.stage, op.microbatch, op.axis, op.peer]
        lanes[op.axis, op.kind if op.peer is not None else "", op.peer].append(
            [*what, "" if op.kind == "load" else op.part]
        )
    return lanes


def test_buckets_that_cannot_be_had_are_refused_with_a_size_that_works() -> None:
    with pytest.raises(SpecError) as refused:
        miniature(_job({"mode": "expert", "experts": 64} | MIXED))
    assert refused.value.code == "paced_buckets"
    miniature(_job({"mode": "expert", "experts": 64, "bucket_mb": refused.value.suggest[0]} | MIXED))


def test_another_plan_is_refused_with_the_first_op_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scale_model.pictured._with_buckets_of", lambda job, small: small)
    monkeypatch.setattr("engine.scale_model.pictured.LARGER_MB", (2.0,))
    with pytest.raises(SpecError) as refused:
        miniature(_job({"mode": "ddp", "bucket_mb": 1.0} | LARGE))
    assert refused.value.code == "paced_differs"
    assert refused.value.values["pictured"] == "all_reduce gradient bucket1"
    assert refused.value.values["miniature"] == "nothing"


# --- the factor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "seconds", "factor"),
    [
        # Unit time, M microbatches on P stages: (M + P - 1) passes of 1 s and as many of 2 s; 1.5 s, two digits, up.
        ({"microbatches": 8}, 33.0, 0.046),
        ({"microbatches": 4}, 21.0, 0.072),
        ({"microbatches": 8, "dilation": 0.02}, 33.0, 0.02),
    ],
)
def test_the_factor_makes_a_step_last_a_second_and_a_half(settings: dict, seconds: float, factor: float) -> None:
    spec = Spec(mode="pipeline", devices=4, paced="unit", model="gpt", **settings)
    job = prepare(spec)
    simulation = steady_step(job)
    assert simulation.makespan == pytest.approx(seconds)
    assert dilation(job, simulation) == pytest.approx(factor)
    found = predict(spec)
    assert found.step_time == pytest.approx(seconds * factor)
    assert found.timeline["end"].max() == pytest.approx(seconds * factor)
    assert found.scale_model["pictured_step_time"] == pytest.approx(seconds)
    assert at_scale(job).spec.dilation == found.job.spec.dilation == pytest.approx(factor)


def test_many_ops_make_a_step_longer() -> None:
    """64 microbatches on 4 stages of 5 layers: 4 x 64 x 2 passes of 5 layers of 1.1 ms take longer than 1.5 s."""
    spec = Spec(mode="pipeline", devices=4, paced="unit", model="gpt", layers=18, microbatches=64)
    job = prepare(spec)
    least = 4 * 64 * 2 * 5 * 1.1e-3 / (2 * 0.4)  # on two cores, of which two fifths are theirs
    assert dilation(job, steady_step(job)) * steady_step(job).makespan > least


def test_a_factor_is_said_as_a_ratio() -> None:
    said = [ratio(850.0), ratio(1.0), ratio(0.046), ratio(2894.0)]
    assert said == ["1 : 850", "1 : 1", "21.7 : 1", "1 : 2,890"]


# --- a rank's time ----------------------------------------------------------------------------------------------------


STEP = 7  # the last one of a period, too


class Names:
    """Calls a Pace around each compute op of its rank, and before each send, as the code that trains does."""

    def __init__(self, pace: Pace, plan, rank: int):
        self.pace, self.ops = pace, plan.program(rank).ops

    def __call__(self) -> None:
        self.pace.meet(STEP)
        for op in self.ops:
            at = (
                op.kind,
                -1 if op.stage is None else op.stage,
                -1 if op.microbatch is None else op.microbatch,
                op.part,
            )
            if op.is_compute:
                self.pace.begin(*at)
                self.pace.complete(*at)
            elif op.kind == "send":
                words = ("payload", "stage", "microbatch", "part", "axis", "peer")
                self.pace.sending(**{word: getattr(op, word) for word in words})
        self.pace.end_step()


@pytest.mark.parametrize("case", [case for case in CASES if case["mode"] != "single"], ids=_name)
def test_ranks_that_keep_time_end_when_the_simulator_says(case: dict, tmp_path, monkeypatch) -> None:
    """Each on its own, knowing of the others what they tell: together the schedule that the simulator finds."""
    monkeypatch.setattr(Pace, "_sleep", lambda self: None)
    monkeypatch.setattr(paced, "LOOK", 0.0)
    job = at_scale(_job(case, paced="a100", timeout=10.0))
    paces = [Pace(job, trained(job), rank, tmp_path) for rank in range(4)]
    plan = modes.plan(job, STEP)
    threads = [threading.Thread(target=Names(pace, plan, rank)) for rank, pace in enumerate(paces)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pace.origin for pace in paces}) == 1
    wanted = steady_step(job)
    ends = dict.fromkeys(range(4), 0.0)
    for span in wanted.timeline.spans():
        if span.kind != "send":  # a sender goes on before its message arrives
            ends[span.rank] = max(ends[span.rank], span.end)
    for pace in paces:
        seconds = (pace.clock - pace.origin) / 1e9
        assert seconds == pytest.approx(ends[pace.rank] * job.spec.dilation, rel=1e-5), pace.rank
    makespan = max(pace.clock - pace.origin for pace in paces) / 1e9
    assert makespan == pytest.approx(wanted.makespan * job.spec.dilation, rel=1e-5)


def test_a_message_moves_when_the_simulator_says(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Pace, "_sleep", lambda self: None)
    job = at_scale(_job({"mode": "layer_split", "devices": 2} | LARGE))
    paces = [Pace(job, trained(job), rank, tmp_path) for rank in range(2)]
    threads = [threading.Thread(target=Names(pace, modes.plan(job, STEP), rank)) for rank, pace in enumerate(paces)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = 0
    for span in steady_step(job).timeline.spans():
        if span.kind in ("send", "recv"):
            found = paces[span.rank].moved(span._replace(step=STEP), 0)
            times = [(moment - paces[0].origin) / 1e9 / job.spec.dilation for moment in (found.start, found.end)]
            assert times == pytest.approx([span.start, span.end], rel=1e-4)
            moved += 1
    assert moved == 4


def test_a_bucket_that_is_noted_late_keeps_its_own_time(tmp_path, monkeypatch) -> None:
    """gloo's threads may note the second of two reductions first, as conformance allows: it is known by its bytes."""
    monkeypatch.setattr(Pace, "_sleep", lambda self: None)
    settings = {"model": "mlp", "layers": 3, "hidden": 2048, "paced": "h100", "timeout": 10.0}
    job = at_scale(prepare(Spec(mode="ddp", devices=2, **settings)))
    small = trained(job)
    paces = [Pace(job, small, rank, tmp_path) for rank in range(2)]
    threads = [threading.Thread(target=Names(pace, modes.plan(job, STEP), rank)) for rank, pace in enumerate(paces)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lengths = {span.part: span.duration for span in steady_step(job).timeline.spans() if span.kind == "all_reduce"}
    buckets = [op for op in modes.plan(small, STEP).program(0).ops if op.kind == "all_reduce"]
    assert len(lengths) == len({op.bytes for op in buckets}) == 2
    for rank, noted in enumerate([buckets, buckets[::-1]]):
        for op in noted:
            span = Span(rank, "dp", "all_reduce", STEP, 0, 0, payload="gradient", bytes=op.bytes)
            took = paces[rank].moved(span, 0)
            seconds = (took.end - took.start) / 1e9 / job.spec.dilation
            assert seconds == pytest.approx(lengths[op.part], rel=1e-4), (rank, op.part)


@pytest.mark.parametrize(("dilation", "most"), [(0.02, 30_000_000), (0.6, 60_000_000)])
def test_a_rank_that_is_late_catches_up_and_no_more(dilation: float, most: int, tmp_path, monkeypatch) -> None:
    """Of a step of 3 units by 30 ms, or by a thirtieth of it."""
    monkeypatch.setattr(paced, "CATCH_UP", 30_000_000)
    job = at_scale(prepare(Spec(mode="single", devices=1, model="mlp", paced="unit", dilation=dilation)))
    assert steady_step(job).makespan == 3
    now = [1_000_000_000]
    monkeypatch.setattr(paced.time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(paced.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + round(seconds * 1e9)))
    pace = Pace(job, trained(job), 0, tmp_path)
    pace.meet(0)
    pace.begin("forward", 0, 0, "fc1")
    lengths = {beat.key[:4]: beat.length for beat in pace._program}
    begun, busy = now[0], lengths["forward", 0, 0, "fc1"] + 15_000_000  # for longer than the op should take
    now[0] += busy
    pace.complete("forward", 0, 0, "fc1")
    assert now[0] == begun + busy
    pace.begin("forward", 0, 0, "fc2")
    pace.complete("forward", 0, 0, "fc2")
    both = lengths["forward", 0, 0, "fc1"] + lengths["forward", 0, 0, "fc2"]
    assert now[0] == max(begun + both, begun + busy)  # by the clock, and not after the delay
    now[0] += 500_000_000
    late = now[0]
    left = [("forward", 0, 0, "out"), *(("backward", 0, 0, part) for part in ("out", "fc2", "fc1"))]
    for at in left:
        pace.begin(*at)
        pace.complete(*at)
    assert now[0] == late - most + sum(lengths[at] for at in left) > late


def test_an_op_that_was_never_named_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Pace, "_sleep", lambda self: None)
    job = at_scale(prepare(Spec(mode="single", devices=1, model="mlp", paced="unit")))
    pace = Pace(job, trained(job), 0, tmp_path)
    pace.meet(0)
    pace.complete("forward", 0, 0, "out")
    with pytest.raises(RuntimeError, match="has not come to its backward 0 0 out"):
        pace.end_step()


def test_ranks_share_moments(tmp_path) -> None:
    one, other = (Table(tmp_path / "table", 2, 3) for _ in range(2))
    slots = [one.came(step, rank) for step in (0, 1) for rank in (0, 1)]
    slots += [one.of_op(rank, place) for rank in (0, 1) for place in range(3)]
    assert sorted(slots) == list(range(10))
    for slot in slots:
        one[slot] = 2**61 + slot
    assert [other[slot] for slot in slots] == [2**61 + slot for slot in slots]


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code", "setting"),
    [
        ({"paced": "local"}, "paced_machine", "paced"),
        ({"paced": "h10"}, "unknown_name", "paced"),
        ({"paced": "h100", "mode": "data_parallel"}, "paced_mode", "mode"),
        ({"paced": "h100", "machine": "a100"}, "exclusive", "machine"),
        ({"paced": "h100", "record": False}, "paced_records", "record"),
        ({"paced": "h100", "device": "cuda"}, "paced_device", "device"),
        ({"paced": "h100", "save_every": 2}, "does_not_apply", "save_every"),
        ({"paced": "h100", "resume": "run:2"}, "does_not_apply", "resume"),
        ({"paced": "h100", "epochs": 2}, "does_not_apply", "epochs"),
        ({"dilation": 2.0}, "dilation_of_paced", "dilation"),
    ],
)
def test_what_cannot_be_paced_is_refused(settings: dict, code: str, setting: str) -> None:
    with pytest.raises(SpecError) as refused:
        prepare(Spec(**({"model": "mlp"} | settings)))
    assert (refused.value.code, refused.value.setting) == (code, setting)
    if code == "paced_mode":  # every mode that is named takes the model and the devices
        assert set(refused.value.suggest) == {*MODES} - {"data_parallel", "single", "sequence", "context", "expert"}
        assert prepare(Spec(model="mlp", paced="h100", mode=refused.value.suggest[-1]))
    if setting == "paced":
        assert prepare(Spec(model="mlp", paced=refused.value.suggest[0])).spec.machine == refused.value.suggest[0]


def test_a_step_longer_than_a_rank_waits_is_refused_with_a_factor_that_works() -> None:
    spec = Spec(mode="pipeline", devices=4, model="gpt", microbatches=8, paced="unit", dilation=2.0)
    with pytest.raises(SpecError) as refused:
        at_scale(prepare(spec))
    assert refused.value.code == "paced_too_slow"
    at_scale(prepare(spec.with_(dilation=refused.value.suggest[0])))


def test_any_other_run_trains_what_was_asked_for() -> None:
    job = prepare(Spec(model="mlp"))
    assert trained(job) is job and at_scale(job) is job
    assert machine(job.spec.machine).cores
