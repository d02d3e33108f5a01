"""Critical path and causes of idle time: of plans drawn by hand, in closed forms, and of random plans in other ways."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from engine.analysis.critical_path import critical_path, seconds_by_kind, seconds_by_rank
from engine.analysis.idle import CAUSES, idle, seconds_by_cause
from engine.analysis.ran import NotJoined, Ran, measured, simulated
from engine.analysis.shares import shares
from engine.analysis.summary import of_run, summary
from engine.analysis.words import NAMES, SENTENCES, largest, sentence
from engine.graph.notation import parse_plan
from engine.plan import COLLECTIVES, Plan, Program
from engine.predict import predict
from engine.simulation import simulate
from engine.spec import Spec
from engine.timeline import Span, Timeline
from tests.engine.test_relaxation import PLAIN, random_plan

MODES = {
    "ddp": {"mode": "ddp"},
    "fsdp": {"mode": "fsdp", "model": "gpt"},
    "zero1": {"mode": "zero1"},
    "tensor": {"mode": "tensor", "model": "gpt"},
    "context": {"mode": "context", "model": "gpt"},
    "expert": {"mode": "expert", "model": "moe"},
    "layer_split": {"mode": "layer_split"},
    "data_parallel": {"mode": "data_parallel"},
    "1f1b": {"mode": "pipeline", "schedule": "1f1b"},
    "zbv": {"mode": "pipeline", "schedule": "zbv", "model": "mlp", "layers": 9},
}


SLOW = replace(PLAIN, memory_rate=1.0)  # and a byte of memory takes a second too


def ran_of(text: str) -> Ran:
    return simulated(simulate(parse_plan(text), SLOW))


def pieces(ran: Ran) -> list[tuple]:
    """(rank, cause, start, end, the rank that was waited for) of every piece of a gap."""
    found = idle(ran)
    rows = zip(found.role, found.cause, found.start, found.end, found.other, strict=True)
    ranks = ran.graph.representative
    return [(ranks[r], CAUSES[c], a, b, None if o < 0 else ran.rank(o)) for r, c, a, b, o in rows]


def test_round_a_ring_one_waits_for_the_rank_before_it():
    """Not for the lowest one that does what that one does: ranks 1 and 3 are late, and rank 0 hears from 3."""
    ring = "forward flops={}\nsend cp>+1 async\nrecv cp<-1\nforward flops=1\n"
    ran = ran_of(f"mesh cp=4\nrole 0: ranks 0,2\n{ring.format(1)}role 1: ranks 1,3\n{ring.format(5)}")
    (gap,) = [gap for gap in largest(ran, idle(ran)) if gap["code"] == "message"]
    assert (gap["rank"], gap["ranks"], gap["other"], gap["seconds"]) == (0, 2, 3, 4.0)


MESSAGE = """
mesh pp=2
role 0: ranks 0
load bytes=1
forward m0 flops=3
send pp>1 m0 bytes=2 async
role 1: ranks 1
recv pp<0 m0 bytes=2
forward m0 flops=4
"""


def test_a_wait_for_a_message_is_cut_where_its_sender_loads_computes_and_sends():
    """0 loads to 1, computes to 4, its message arrives at 6; 1 computes from 6 to 10."""
    ran = ran_of(MESSAGE)
    assert pieces(ran) == [
        (0, "communication", 4, 6, None),
        (0, "drain", 6, 10, None),
        (1, "loading", 0, 1, 0),
        (1, "fill", 1, 4, 0),
        (1, "communication", 4, 6, None),
    ]
    path = critical_path(ran)
    assert [(p.kind, p.start, p.end) for p in path] == [
        ("load", 0, 1), ("forward", 1, 4), ("send", 4, 6), ("forward", 6, 10)
    ]  # fmt: skip
    assert seconds_by_kind(path) == {"forward": 7, "send": 2, "load": 1}
    assert seconds_by_rank(ran, path) == {0: 4, 1: 4}


def test_the_longest_pieces_of_a_path_say_what_they_waited_for():
    """In the plan above: the forward on rank 1 for the message from rank 0, which waited for the forward there."""
    longest = summary([ran_of(MESSAGE)])["critical_path"]["longest"]
    told = [
        (p["rank"], p["kind"], p["seconds"], p["waited_for"] and (p["waited_for"]["rank"], p["waited_for"]["kind"]))
        for p in longest
    ]
    assert told == [
        (1, "forward", 4, (1, "recv")),
        (0, "forward", 3, (0, "load")),
        (0, "send", 2, (0, "forward")),
        (0, "load", 1, None),
    ]


def test_who_comes_late_to_a_collective_is_waited_for_and_its_transfer_is_exposed():
    """Ranks 0 and 1 come at 2 and 5; a ring of two sends each byte once: the call lasts from 5 to 9."""
    ran = ran_of(
        """
mesh dp=2
role 0: ranks 0
forward flops=2
all_reduce dp bytes=4
optimizer flops=1
role 1: ranks 1
forward flops=5
all_reduce dp bytes=4
optimizer flops=2
"""
    )
    assert pieces(ran) == [
        (0, "straggler", 2, 5, 1),
        (0, "communication", 5, 9, None),
        (0, "end", 10, 11, None),
        (1, "communication", 5, 9, None),
    ]
    assert [(p.kind, p.start, p.end, ran.rank(p.node)) for p in critical_path(ran)] == [
        ("forward", 0, 5, 1), ("all_reduce", 5, 9, 1), ("optimizer", 9, 11, 1)
    ]  # fmt: skip


def test_the_queue_behind_an_earlier_collective_is_communication_too():
    """Two asynchronous calls of 4 s, begun at 1 and 2, run 1-5 and 5-9, and the optimizer waits from 2 on."""
    ran = ran_of(
        """
mesh dp=2
role 0: ranks 0-1
backward flops=1
all_reduce dp bytes=4 a async
backward flops=1
all_reduce dp bytes=4 b async
optimizer flops=1
"""
    )
    assert {(rank, cause, a, b) for rank, cause, a, b, _ in pieces(ran)} == {
        (0, "communication", 2, 5), (0, "communication", 5, 9)
    }  # fmt: skip
    assert seconds_by_kind(critical_path(ran)) == {"all_reduce": 8, "backward": 1, "optimizer": 1}


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (6, 8)])
def test_the_bubble_of_a_pipeline_is_fill_and_drain_in_closed_form(stages, microbatches):
    """Forward 1 s, backward 2 s. GPipe: rank r waits r for its first input and 3 (P-1-r) for its first gradient, and is
    done 2 r before rank 0. 1F1B: P-1-r less for the first gradient, which comes while others still go forward, and as
    much for the last ones, which come 1 s later each than they could."""
    for schedule, late in (("gpipe", 0), ("1f1b", 1)):
        spec = Spec(mode="pipeline", devices=stages, model="mlp", layers=7, schedule=schedule, machine="unit")
        ran = simulated(predict(spec.with_(microbatches=microbatches)).simulation)
        found = seconds_by_cause(ran, idle(ran))
        for rank in range(stages):
            after = stages - 1 - rank
            seconds = {CAUSES[i]: found[rank, i] for i in np.flatnonzero(found[rank])}
            expected = {"fill": rank + (3 - late) * after, "drain": 2 * rank + late * after}
            assert seconds == pytest.approx({cause: value for cause, value in expected.items() if value}, abs=1e-12)


@pytest.mark.parametrize("where", ["a100", "local"])
@pytest.mark.parametrize("mode", MODES)
def test_causes_add_up_to_the_idle_time_and_the_path_to_the_makespan(mode, where):
    prediction = predict(Spec(devices=4, machine=where, **MODES[mode]))
    simulation = prediction.simulation
    ran = simulated(simulation)
    (share,) = shares(simulation.timeline)
    total = seconds_by_cause(ran, idle(ran)).sum(axis=1)[list(simulation.plan.roles)]
    makespan = simulation.makespan
    np.testing.assert_allclose(total, makespan - share.computing, rtol=1e-9, atol=1e-12 * makespan)
    summary = prediction.summary()  # before its first op a rank of this machine idles too
    assert summary["bubble_fraction"] == pytest.approx(total.sum() / (4 * summary["step_time"]), abs=1e-9)
    path = critical_path(ran)
    assert path[0].start == 0 and path[-1].end == makespan
    assert all(a.end == b.start for a, b in itertools.pairwise(path))
    if where == "local":  # where Python takes its time between ops
        assert "overhead" in pieces_causes(ran)
        return
    assert share.makespan == makespan
    assert not set(pieces_causes(ran)) & {"overhead", "contention", "start"}
    assert not {piece.kind for piece in path} & {"overhead", "start"}
    # Whole ops, each once: what the path takes is what its ops take.
    assert len({piece.node for piece in path}) == len(path)
    assert sum(float((ran.end - ran.start)[piece.node]) for piece in path) == pytest.approx(simulation.makespan)


def pieces_causes(ran: Ran) -> list[str]:
    return [CAUSES[cause] for cause in idle(ran).cause]


def longer(plan: Plan, role: int, place: int, by: int) -> Plan:
    program = plan.programs[role]
    ops = list(program.ops)
    ops[place] = replace(ops[place], flops=ops[place].flops + by)
    return replace(plan, programs=(*plan.programs[:role], Program(tuple(ops)), *plan.programs[role + 1 :]))


@pytest.mark.parametrize("seed", range(25))
def test_an_op_on_the_critical_path_that_takes_a_second_longer_makes_the_step_a_second_longer(seed):
    """Independent of how the path was found: by simulating again. One that is not on it and has time to spare does not,
    or at the most as far as it had none."""
    plan = random_plan(random.Random(seed))
    simulation = simulate(plan, PLAIN)
    ran, plan = simulated(simulation), simulation.plan
    path = critical_path(ran)
    assert sum(piece.duration for piece in path) == pytest.approx(simulation.makespan, abs=1e-9)
    on_it = {piece.node for piece in path if ran.is_compute[piece.node] and piece.duration}
    for node in on_it:
        role = int(ran.role[node])
        after = simulate(longer(plan, role, node - ran.graph.first[role], 1), PLAIN).makespan
        assert after == pytest.approx(simulation.makespan + 1)


def test_an_op_off_the_critical_path_has_time_to_spare():
    """The negative control of the test above: rank 1's wait is spare time of what it does before."""
    text = MESSAGE.replace("recv pp<0 m0", "backward flops=2\nrecv pp<0 m0")
    ran = ran_of(text)
    assert 3 not in {piece.node for piece in critical_path(ran)} and ran.kind(3) == "backward"
    assert simulate(longer(parse_plan(text), 1, 0, 1), SLOW).makespan == ran.makespan == 10


@pytest.mark.parametrize("seed", range(25))
def test_in_random_plans_a_rank_waits_for_what_its_program_stands_at(seed):
    """Looked at in the middle between any two events: the first communication in the program that holds a rank up and
    has not ended. Where all its members have come it is under way or queued; else one of them is waited for."""
    simulation = simulate(random_plan(random.Random(1000 + seed)), PLAIN)
    ran = simulated(simulation)
    found = idle(ran)
    events = np.unique(np.concatenate([ran.start, ran.end, ran.ready, [0.0, ran.makespan]]))
    for moment in (events[1:] + events[:-1]) / 2:
        for role in range(len(ran.graph.plan.programs)):
            nodes = range(ran.graph.first[role], ran.graph.first[role + 1])
            holds = [n for n in nodes if ran.is_compute[n] or not ran.op(n).asynchronous]
            stands = next((n for n in holds if ran.end[n] > moment), None)
            if stands is None or ran.is_compute[stands] or ran.op(stands).kind == "send":
                continue
            hit = np.flatnonzero((found.role == role) & (found.start < moment) & (found.end > moment))
            assert len(hit) == 1
            until = int(found.until[hit[0]])  # what waits for several things is told of the last of them
            if until in ran.graph.waits or (until < 0 and any(ran.op(n).asynchronous for n in nodes)):
                continue
            op, ends = ran.op(stands), ran.graph.meets == ran.graph.meets[stands]
            members = np.flatnonzero(ends) if op.kind in COLLECTIVES else [ran.graph.meets[stands]]
            came = max(float(ran.ready[n]) for n in members)
            queued = op.kind in COLLECTIVES and ran.ahead[stands] >= 0 and ran.end[ran.ahead[stands]] > moment
            if not queued:
                assert (CAUSES[int(found.cause[hit[0]])] == "communication") == (came < moment)
                if came > moment:
                    assert ran.ready[found.other[hit[0]]] == came


def test_a_measured_step_is_told_like_the_simulated_one_that_it_repeats():
    """A pipeline without queues on its links: its simulated spans, taken for measured ones."""
    spec = Spec(mode="pipeline", devices=4, model="gpt", machine="a100", schedule="1f1b")
    simulation = predict(spec).simulation
    one, two = simulated(simulation), measured(simulation.timeline, simulation.plan)
    assert two.measured and not one.measured
    np.testing.assert_allclose(
        seconds_by_cause(two, idle(two)), seconds_by_cause(one, idle(one)), atol=1e-9 * one.makespan
    )
    assert seconds_by_kind(critical_path(two)) == pytest.approx(seconds_by_kind(critical_path(one)))


# Two ranks that share one collective, as a run notes it. Rank 1 begins 3 s late; between its ops nothing is done 4-5.
NOTED = (
    Span(0, "compute", "forward", 7, 0.0, 2.0),
    Span(0, "dp", "all_reduce", 7, 2.0, 7.1, payload="gradient", part="bucket0"),
    Span(0, "compute", "optimizer", 7, 7.5, 8.0),
    Span(1, "compute", "forward", 7, 3.0, 4.0),
    Span(1, "dp", "all_reduce", 7, 5.0, 7.0, payload="gradient", part="bucket0"),
    Span(1, "compute", "optimizer", 7, 7.0, 10.0),
)
NOTED_PLAN = """
mesh dp=2
role 0: ranks 0-1
forward flops=1
all_reduce dp gradient bytes=4 bucket0
optimizer flops=1
"""


def test_what_no_op_explains_in_a_measured_step_is_said_to_be_so():
    step, plan = Timeline.of(NOTED, "measured", 2).step(7), parse_plan(NOTED_PLAN)
    ran = measured(step, plan)
    rounded = [(rank, cause, round(a, 9), round(b, 9), other) for rank, cause, a, b, other in pieces(ran)]
    assert rounded == [
        (0, "straggler", 2, 5, 1),
        (0, "communication", 5, 7.1, None),
        (0, "overhead", 7.1, 7.5, None),
        (0, "end", 8, 10, None),
        (1, "start", 0, 3, None),
        (1, "overhead", 4, 5, None),
        (1, "communication", 5, 7, None),
    ]
    assert {CAUSES[c] for c in idle(ran, crowded=True).cause} >= {"contention", "start"}
    assert "overhead" not in {CAUSES[c] for c in idle(ran, crowded=True).cause}
    assert [(p.kind, round(p.start, 9), round(p.end, 9), ran.rank(p.node)) for p in critical_path(ran)] == [
        ("start", 0, 3, 1),
        ("forward", 3, 4, 1),
        ("overhead", 4, 5, 1),
        ("all_reduce", 5, 7, 1),
        ("optimizer", 7, 10, 1),
    ]


def test_a_step_with_other_ops_than_its_plan_is_not_told():
    plan, step = parse_plan(NOTED_PLAN), Timeline.of(NOTED, "measured", 2)
    for wrong in (
        step.where(np.arange(6) != 2),
        Timeline.of([*NOTED[:2], NOTED[2]._replace(kind="forward"), *NOTED[3:]], "measured", 2),
    ):
        with pytest.raises(NotJoined):
            measured(wrong.step(7), plan)
        told = of_run(wrong, lambda step: plan, [7], crowded=False)
        assert told["critical_path"] is None and told["analysis_reason"]


def test_a_straggler_in_most_steps_is_named_and_one_in_a_single_step_is_not():
    plan = parse_plan(NOTED_PLAN)
    shifted = [[s._replace(step=i, start=s.start + 20 * i, end=s.end + 20 * i) for s in NOTED] for i in range(3)]
    told = of_run(Timeline.of(itertools.chain(*shifted), "measured", 2), lambda step: plan, [0, 1, 2], crowded=False)
    assert told["stragglers"] == [{"rank": 1, "steps": 3, "last": 3, "calls": 3, "seconds": pytest.approx(3.0)}]
    assert told["analysed_steps"] == 3 and told["analysis_reason"] is None
    assert told["idle_causes"]["seconds"]["straggler"] == pytest.approx(3.0)
    even = [s._replace(start=2.0) if s.rank == 1 and s.kind == "all_reduce" else s for s in NOTED]
    even = [s._replace(start=0.0, end=2.0) if s.kind == "forward" else s for s in even]
    for step in (1, 2):
        shifted[step] = [s._replace(step=step, start=s.start + 20 * step, end=s.end + 20 * step) for s in even]
    told = of_run(Timeline.of(itertools.chain(*shifted), "measured", 2), lambda step: plan, [0, 1, 2], crowded=False)
    assert told["stragglers"] == []


def test_sentences_say_who_waits_how_long_for_what_from_whom_and_why():
    gap = {"code": "message", "cause": "fill", "rank": 2, "other": 1, "kind": "send", "payload": "activation"}
    gap |= {"microbatch": 4, "part": ""}
    assert (
        sentence(gap, "3.1 ms") == "rank 2 waits 3.1 ms for the activation of microbatch 4 from rank 1: pipeline fill"
    )
    whole = gap | {"code": "transfer", "kind": "reduce", "payload": "gradient", "part": "gradients"}
    assert sentence(whole, "1 s").startswith("rank 2 waits 1 s while the reduce (gradient) is on its way")
    assert set(NAMES) == set(CAUSES)
    codes = set()
    for mode in MODES.values():
        ran = simulated(predict(Spec(devices=4, machine="a100", **mode)).simulation)
        for gap in largest(ran, idle(ran), most=1000):
            codes.add(gap["code"])
            said = sentence(gap, "1 s")
            assert said.startswith(f"rank {gap['rank']} ") and said.endswith(NAMES[gap["cause"]])
            assert "None" not in said and "  " not in said
    assert codes == set(SENTENCES) - {"start", "nothing"}


def test_ranks_that_play_one_role_are_told_once():
    told = summary([simulated(predict(Spec(mode="ddp", devices=64, global_batch=64, machine="a100")).simulation)])
    assert [(row["rank"], row["ranks"]) for row in told["idle_causes"]["ranks"]] == [(0, 64)]
    row = told["idle_causes"]["ranks"][0]["seconds"]["communication"]
    assert told["idle_causes"]["seconds"]["communication"] == pytest.approx(64 * row)
    assert [gap["ranks"] for gap in told["idle_causes"]["largest"]] == [64]


def test_a_plan_without_ops_has_no_path_and_no_gaps():
    ran = ran_of("mesh dp=1\nrole 0: ranks 0\n")
    assert critical_path(ran) == [] and pieces(ran) == []
    assert summary([ran])["idle_causes"] == {
        "seconds": {}, "ranks": [{"rank": 0, "ranks": 1, "seconds": {}}], "largest": []
    }  # fmt: skip


def test_receives_that_stand_early_are_what_is_waited_for():
    """pytorch#188833: with its receives early the same order is longer, and what is added is waiting for messages."""
    base = Spec(mode="pipeline", model="mlp", layers=15, devices=8, schedule="interleaved_1f1b", machine="unit")
    found = {}
    for receives in ("late", "early"):
        simulation = predict(base.with_(microbatches=16, receives=receives)).simulation
        told = summary([simulated(simulation)])["idle_causes"]["seconds"]
        found[receives] = (simulation.makespan, told.get("imbalance", 0.0), sum(told.values()))
    added = 8 * (found["early"][0] - found["late"][0])
    assert found["late"][1] < found["early"][1]
    assert found["early"][2] - found["late"][2] == pytest.approx(added) and added > 0
