"""Expert parallelism: what travels by closed forms, what was routed by what was measured, and what real runs did."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine import modes
from engine.asking.rules import SpecError
from engine.cost.collectives import EXCHANGE_RATE
from engine.cost.machine import machine
from engine.graph.matching import PlanError, match
from engine.job import Job, prepare
from engine.outcome.finish import finish
from engine.plan import Op
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished, holds

HIDDEN, CONTEXT, BATCH, EXPERTS, TOP_K = 32, 16, 16, 8, 2
SMALL = {
    "model": "moe", "layers": 2, "hidden": HIDDEN, "heads": 2, "context": CONTEXT, "global_batch": BATCH,
    "experts": EXPERTS, "top_k": TOP_K, "dataset": "synthetic",
}  # fmt: skip
VOCABULARY = 96  # of the dataset synthetic, padded
SHORT = {"steps": 4, "device": "cpu"}
BLOCKS = ("block1", "block2")


def job_of(devices: int, **settings) -> Job:
    return prepare(Spec(mode="expert", devices=devices, **(SMALL | settings)))


def exchanges(ops: tuple[Op, ...]) -> list[tuple[str, str, int]]:
    return [(op.part, op.payload, op.bytes) for op in ops if op.kind == "all_to_all"]


# What travels


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_tokens_go_there_and_back_in_every_block_and_so_do_gradients(devices):
    """A rank sends each of its tokens top_k times; where all experts get the same, as many come to its own."""
    plan = modes.plan(job_of(devices))
    assert plan.roles == (0,) * devices
    size = 4 * BATCH // devices * CONTEXT * TOP_K * HIDDEN
    wanted = []
    for block in BLOCKS:
        wanted.append((f"{block}.counts", "control", 8 * EXPERTS))
        wanted += [(f"{block}.{way}", "tokens", size) for way in ("dispatch", "combine")]
    for block in reversed(BLOCKS):
        wanted += [(f"{block}.{way}", "gradient", size) for way in ("combine", "dispatch")]
    assert exchanges(plan.programs[0].ops) == wanted


def test_only_what_every_rank_has_is_all_reduced():
    dense = 4 * HIDDEN**2 + 2 * HIDDEN + EXPERTS * HIDDEN
    whole = 4 * (2 * dense + (VOCABULARY + CONTEXT) * HIDDEN + HIDDEN + VOCABULARY * HIDDEN)
    for devices, experts in ((1, 2 * EXPERTS * 8 * HIDDEN**2), (2, 0), (4, 0)):
        ops = modes.plan(job_of(devices)).programs[0].ops
        assert sum(op.bytes for op in ops if op.kind == "all_reduce") == whole + 4 * experts


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_rank_holds_its_experts_and_all_of_the_rest(devices):
    dense = 2 * (4 * HIDDEN**2 + 2 * HIDDEN + EXPERTS * HIDDEN) + (2 * VOCABULARY + CONTEXT + 1) * HIDDEN
    size = 4 * (dense + 2 * EXPERTS // devices * 8 * HIDDEN**2)
    memory = modes.plan(job_of(devices, optimizer="adamw")).programs[0].memory
    counters = 4 * (2 * (5 + 2 * EXPERTS // devices) + 4)  # AdamW's, of steps: one a tensor, two an expert
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (size, size, 2 * size + counters)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_rank_computes_as_much_as_one_of_as_many_replicas(devices):
    jobs = {mode: prepare(Spec(mode=mode, devices=devices, **SMALL)) for mode in ("ddp", "expert")}
    ops = {mode: modes.plan(job).programs[0].ops for mode, job in jobs.items()}
    for kind in ("forward", "backward"):
        ddp, expert = (sum(op.flops for op in ops[mode] if op.kind == kind) for mode in ("ddp", "expert"))
        assert ddp == expert > 0


# Tokens that are not shared out evenly


def crooked(devices: int) -> tuple[Job, list[list[int]]]:
    """A job in which rank r gives expert e a number of tokens that depends on both, and expert 0 gets none."""
    job = job_of(devices)
    counts = [[(r + 1) * e for e in range(EXPERTS)] for r in range(devices)]
    return dataclasses.replace(job, routed=tuple({block: [row] for block in BLOCKS} for row in counts)), counts


@pytest.mark.parametrize("devices", [2, 4])
def test_what_was_routed_decides_what_comes_to_a_rank(devices):
    job, counts = crooked(devices)
    plan = modes.plan(job)
    each, sent = EXPERTS // devices, 4 * BATCH // devices * CONTEXT * TOP_K * HIDDEN
    for rank in range(devices):
        came = 4 * HIDDEN * sum(sum(row[rank * each : (rank + 1) * each]) for row in counts)
        found = {(part, payload): size for part, payload, size in exchanges(plan.program(rank).ops)}
        for block in BLOCKS:
            assert found[f"{block}.combine", "tokens"] == found[f"{block}.dispatch", "gradient"] == came
            assert found[f"{block}.dispatch", "tokens"] == found[f"{block}.combine", "gradient"] == sent


def test_an_uneven_exchange_meets_and_takes_as_long_as_the_most():
    """On unequal links of one machine: every rank leaves when the fullest rank has sent what it has."""
    job, _ = crooked(2)
    plan = modes.plan(job)
    timeline = simulate(plan, machine("h100")).timeline
    chosen = timeline.where((timeline["part"] == "block1.combine") & (timeline["payload"] == "tokens"))
    (first, second), sizes = chosen["end"] - chosen["start"], chosen["bytes"].tolist()
    assert first == second and sizes[0] < sizes[1]
    link = machine("h100")
    rate = EXCHANGE_RATE * link.link_rate
    assert first == pytest.approx(link.call_overhead + link.link_chunk + max(sizes) / 2 / rate)
    others = {"all_to_all": "all_gather"}  # which take equal tensors, as any collective but this one
    one, two = (
        tuple(dataclasses.replace(op, kind=others.get(op.kind, op.kind)) for op in program.ops)
        for program in plan.programs
    )
    programs = tuple(dataclasses.replace(p, ops=o) for p, o in zip(plan.programs, (one, two), strict=True))
    with pytest.raises(PlanError):
        match(dataclasses.replace(plan, programs=programs))


@pytest.mark.parametrize(("devices", "experts", "works"), [(3, 8, (1, 2, 4, 8)), (4, 6, (1, 2, 3, 6)), (6, 9, (1, 3))])
def test_experts_that_cannot_be_shared_out_are_refused_with_degrees_that_work(devices, experts, works):
    with pytest.raises(SpecError) as refused:
        job_of(devices, experts=experts, global_batch=24)
    assert (refused.value.code, refused.value.suggest) == ("devices_divide", works)
    for better in works:
        job_of(better, experts=experts, global_batch=24)


# --- real runs ------------------------------------------------------------------------------------------------------


def counted(result: dict) -> dict[str, list[int]]:
    """Of the last step; every token went to top_k experts."""
    spec, tokens = result["spec"], result["expert_tokens"]
    total = spec["global_batch"] * spec["context"] * spec["top_k"]
    for counts in (*tokens["last"].values(), *tokens["mean"].values()):
        assert sum(counts) == pytest.approx(total) and len(counts) == spec["experts"]
    assert tokens["even"] * spec["experts"] == total
    return tokens["last"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (1, {}),
        (2, {"bucket_mb": 0.001, "optimizer": "adamw"}),
        (3, {"experts": 6, "global_batch": 12}),
        (4, {"top_k": 1}),
        (8, {"dataset": "text"}),
    ],
)
def test_experts_on_several_ranks_equal_one_device_and_do_what_was_planned(devices, settings, launcher, runs_dir):
    result = finished(Spec(mode="expert", devices=devices, **(SMALL | settings), **SHORT), launcher, runs_dir)
    holds(result)
    assert result["conformance"]["routed"] is (devices > 1)
    assert list(counted(result)) == ["block1", "block2"]


FEW = SMALL | {"context": 2, "global_batch": 4, "top_k": 1, "layers": 3}  # 8 tokens for 8 experts


@pytest.fixture(scope="module")
def alone(launcher, tmp_path_factory) -> dict[str, list[int]]:
    """Tokens that each expert gets where there is one device."""
    return counted(finished(Spec(mode="single", devices=1, **FEW, **SHORT), launcher, tmp_path_factory.mktemp("runs")))


@pytest.mark.real
@pytest.mark.parametrize(
    ("mode", "devices", "settings"),
    [
        ("expert", 4, {}),
        ("data_parallel", 2, {}),
        ("ddp", 2, {}),
        ("zero1", 2, {}),
        ("fsdp", 2, {}),
        ("pipeline", 2, {"schedule": "interleaved_zero_bubble", "microbatches": 4}),
    ],
)
def test_an_expert_without_a_token_changes_nothing_in_any_mode(mode, devices, settings, alone, launcher, runs_dir):
    """The counts are those of one device, expert by expert, and some are 0."""
    result = finished(Spec(mode=mode, devices=devices, **FEW, **SHORT, **settings), launcher, runs_dir)
    holds(result)
    assert counted(result) == alone
    assert all(0 in counts for counts in alone.values())


@pytest.fixture(scope="module")
def uneven(launcher, tmp_path_factory):
    """A run on 4 ranks: its folder and its result."""
    runs_dir = tmp_path_factory.mktemp("runs")
    result = finished(Spec(mode="expert", devices=4, **SMALL, **SHORT), launcher, runs_dir)
    return runs_dir / result["run_id"], result


@pytest.mark.real
def test_all_that_is_sent_is_received(uneven):
    """By the sizes of the tensors that gloo was given: of a block's dispatch and combine, over all ranks."""
    timeline = Timeline.load(uneven[0] / "timeline.parquet")
    sizes: dict[tuple, list[int]] = {}
    for span in timeline.spans():
        if span.kind == "all_to_all" and span.payload != "control":
            sizes.setdefault((span.step, *span.part.split("."), span.payload), []).append(span.bytes)
    for step in range(4):
        for block in BLOCKS:
            for payload, goes, comes in (("tokens", "dispatch", "combine"), ("gradient", "combine", "dispatch")):
                sent, received = (sizes[step, block, way, payload] for way in (goes, comes))
                assert sum(sent) == sum(received) == 4 * BATCH * CONTEXT * TOP_K * HIDDEN
                assert len(set(sent)) == 1 and len(set(received)) > 1


@pytest.mark.real
def test_counts_that_are_not_what_was_sent_do_not_conform(uneven):
    """The negative control of conformance where sizes depend on the data: a token more here, and one less there."""
    folder, result = uneven
    holds(result)
    path = folder / "rank2.steps.jsonl"
    before = path.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[3]["routed"]["block2"][0][0] += 1
    rows[3]["routed"]["block2"][0][EXPERTS - 1] -= 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        difference = finish(folder, "finished")["conformance"]["first_difference"]
    finally:
        path.write_text(before)
        finish(folder, "finished")
    assert (difference["step"], difference["rank"], difference["lane"]) == (3, 0, "ep")
    assert difference["planned"].startswith("all_to_all tokens block2.combine")


@pytest.mark.real
def test_compute_does_not_count_the_time_in_which_tokens_travel(uneven):
    timeline = Timeline.load(uneven[0] / "timeline.parquet").step(3)
    spans = [span for span in timeline.spans() if span.rank == 1]
    moves = [span for span in spans if span.kind == "all_to_all"]
    computes = [span for span in spans if span.lane == "compute"]
    both = sum(max(0.0, min(c.end, m.end) - max(c.start, m.start)) for c in computes for m in moves)
    assert both < 0.1 * sum(m.end - m.start for m in moves)
    assert {span.part for span in computes if span.part.startswith("block1")} == {
        f"block1.{piece}" for piece in ("attention", "dispatch", "experts", "combine")
    }


@pytest.mark.real
def test_a_wrong_gradient_of_one_rank_s_experts_is_seen(launcher, runs_dir):
    """The negative control of parity: nobody else has these gradients."""
    spec = Spec(mode="expert", devices=2, fault="gradient@1:2", **SMALL, **SHORT)
    parity = finished(spec, launcher, runs_dir)["parity"]
    assert parity["ok"] is False
    assert parity["grad_max_rel_diff"] == pytest.approx(0.5, abs=1e-2)
