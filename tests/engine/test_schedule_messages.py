"""Messages meet, no schedule deadlocks, and each takes the time and holds the activations that its paper says."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from engine import schedules
from engine.cost.machine import machine
from engine.graph.matching import PlanError
from engine.graph.scheduler import DeadlockError
from engine.plan import Mesh, Op, Plan, Program
from engine.schedules import PASSES, Action, csv_form, messages, rendezvous
from engine.simulation import Simulation, simulate

UNIT = machine("unit")
SECONDS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def sizes(name: str, ranks=(1, 2, 3, 4, 6), microbatches=(1, 2, 3, 4, 6, 8, 12, 16)):
    """(ranks, stages a rank, microbatches) that the schedule allows."""
    stages = schedules.TABLE[name].stages_per_rank
    grid = itertools.product(ranks, (stages,) if stages else (1, 2, 3), microbatches)
    return [size for size in grid if schedules.check(name, *size) is None]


def order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    return schedules.order(name, ranks, microbatches, stages)


def plan(rows: list[list[Action]]) -> Plan:
    """An order with its messages as a plan: an op a pass, 10 bytes after stage 0, 11 after stage 1, ..."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    compute = {(kind, s): [Op(kind=kind, stage=s, saved=int(kind == "forward"))] for kind in PASSES for s in rank_of}
    sizes = {stage: 10 + stage for stage in rank_of}
    programs = tuple(Program(messages.unrolled(row, compute, sizes, rank_of)) for row in rows)
    return Plan(Mesh(("pp",), (len(rows),)), programs, tuple(range(len(rows))))


def run(name: str, ranks: int, stages: int, microbatches: int, add=messages.add_late) -> Simulation:
    rows = add(order(name, ranks, stages, microbatches), schedules.pipelines(name, ranks, stages))
    return simulate(plan(rows), UNIT)


def longest_path(rows: list[list[Action]], pipelines: list[range]) -> int:
    """The makespan with free links, from the order alone: a pass starts when its rank is free and what it needs of its
    neighbour is done; of two that run as one, both wait for what either needs."""
    end: dict[tuple, int] = {}
    neighbours = {(a, "forward"): b for p in pipelines for a, b in zip(p[1:], p, strict=False)}
    neighbours |= {(a, "backward"): b for p in pipelines for a, b in itertools.pairwise(p)}
    at, now = [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                group = row[at[rank] : at[rank] + 1 + row[at[rank]].overlaps_next]
                needs = []
                for kind, stage, m, _ in group:
                    way = "forward" if kind == "forward" else "backward"
                    if kind != "backward_weight" and (stage, way) in neighbours:
                        needs.append((way, neighbours[stage, way], m))
                if any(need not in end for need in needs):
                    break
                start = max([now[rank], *(end[need] for need in needs)])
                now[rank] = start + sum(SECONDS[action.kind] for action in group)
                for kind, stage, m, _ in group:
                    if kind != "backward_weight":
                        end["forward" if kind == "forward" else "backward", stage, m] = now[rank]
                at[rank] += len(group)
                moved = True
    assert at == [len(row) for row in rows]
    return max(now)


def waits(result: Simulation) -> list[float]:
    """For each rank, the time that it computes nothing between its first op and its last."""
    ranks: dict[int, list] = defaultdict(list)
    for span in result.timeline.spans():
        if span.lane == "compute":
            ranks[span.rank].append(span)
    return [spans[-1].end - spans[0].start - sum(span.duration for span in spans) for _, spans in sorted(ranks.items())]


# Times


@pytest.mark.parametrize("name", [n for n in schedules.TABLE if not n.startswith("dualpipe")])
def test_no_schedule_deadlocks_and_messages_make_nobody_wait_for_more_than_he_needs(name):
    """Planned with its messages, a schedule takes as long as its order alone says."""
    for size in sizes(name):
        assert run(name, *size).makespan == longest_path(order(name, *size), schedules.pipelines(name, *size[:2])), size


@pytest.mark.parametrize("name", ["dualpipev", "dualpipe"])
def test_so_does_one_with_pairs_that_send_when_both_are_done(name):
    for size in sizes(name):
        most = longest_path(order(name, *size), schedules.pipelines(name, *size[:2]))
        assert run(name, *size).makespan == most, size


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_idles_for_the_depth_of_the_pipeline(name):
    """(M + P - 1)(F + B), with F = 1 and B = 2 (Narayanan et al. 2021, section 2.2)."""
    for ranks, stages, count in sizes(name):
        assert run(name, ranks, stages, count).makespan == 3 * (count + ranks - 1)


@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_1f1b"])
def test_with_several_stages_a_rank_idles_for_one_of_them(name):
    """V M (F + B) + (P - 1)(F + B) of a stage: the idle time over the ideal is (P - 1) / (V M) (section 2.3 there).

    Both need M >= P; interleaved 1F1B needs P to divide M.
    """
    for ranks, stages, count in sizes(name):
        if count % ranks == 0:
            assert run(name, ranks, stages, count).makespan == 3 * (stages * count + ranks - 1)


def test_interleaved_zero_bubble_idles_a_third_of_that():
    """(P - 1)(F + I - W) of a stage, with F = I = W = 1 (Qi et al. 2023, table 2, for one stage a rank)."""
    for ranks, stages, count in sizes("interleaved_zero_bubble"):
        if count % ranks == 0:
            assert run("interleaved_zero_bubble", ranks, stages, count).makespan == 3 * stages * count + ranks - 1


@pytest.mark.parametrize("name", ["zb_h2", "zbv"])
def test_in_a_zero_bubble_schedule_no_rank_waits_once_it_has_begun(name):
    """With F = I = W and at least 2P - 1 microbatches. The step still has the ramp, P - 1 forwards of a stage."""
    for ranks, stages, count in sizes(name):
        result = run(name, ranks, stages, count)
        if count >= 2 * ranks - 1:
            assert waits(result) == [0] * ranks
            assert result.makespan == 3 * stages * count + ranks - 1
        elif ranks > 1:
            assert max(waits(result)) > 0


def test_dualpipe_idles_as_its_authors_say():
    """(PP/2 - 1)(F&B + B - 3W), in the README of deepseek-ai/DualPipe: with F = W = 1, B = 2, F&B = 3 that is PP - 2.

    PP is the number of stages: P of DualPipe, 2P of DualPipeV. A rank of DualPipe works on M/2 of each copy.
    """
    for ranks, stages, count in sizes("dualpipe", ranks=(2, 4, 6, 8)):
        assert run("dualpipe", ranks, stages, count).makespan == 3 * count + ranks - 2
    for ranks, stages, count in sizes("dualpipev"):
        assert run("dualpipev", ranks, stages, count).makespan == 3 * 2 * count + 2 * ranks - 2


# Activations


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("gpipe", lambda p, v, m: [m] * p),
        ("1f1b", lambda p, v, m: [p - r for r in range(p)]),
        ("looped_bfs", lambda p, v, m: [v * m] * p),
        ("interleaved_1f1b", lambda p, v, m: [(v - 1) * p + 2 * (p - 1 - r) + 1 for r in range(p)]),
        ("interleaved_zero_bubble", lambda p, v, m: [v * p] * p),  # one stage a rank: as 1F1B's first
        ("zb_h2", lambda p, v, m: [2 * p - 1] * p),  # section 2.2 of Qi et al. 2023
        ("zbv", lambda p, v, m: [2 * p] * p),  # of half the size each: as 1F1B's first, section 6 there
        ("dualpipev", lambda p, v, m: [2 * p + 1] * p),  # PP + 1, in the README of deepseek-ai/DualPipe
        ("dualpipe", lambda p, v, m: [p + 1] * p),
    ],
)
def test_a_rank_holds_as_many_activations_as_its_paper_says(name, most):
    """Counted until the weights' half of the backward; with enough microbatches to fill the pipeline."""
    for ranks, stages, count in sizes(name, ranks=(2, 4, 6), microbatches=(12, 24)):
        if count >= 2 * ranks:
            assert run(name, ranks, stages, count).peak_in_flight == most(ranks, stages, count)


# Messages


def ends(rows: list[list[Action]]) -> dict[tuple[int, int], tuple[list, list]]:
    """By (source, target): what is sent and what is received, each as (way, the stage it is for, microbatch)."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    links = defaultdict(lambda: ([], []))
    for rank, row in enumerate(rows):
        for kind, stage, microbatch, _ in row:
            if kind in schedules.MESSAGES:
                verb, way = kind.split("_")
                other = stage + (1 if (verb == "send") == (way == "forward") else -1)
                if verb == "send":
                    links[rank, rank_of[other]][0].append((way, other, microbatch))
                else:
                    links[rank_of[other], rank][1].append((way, stage, microbatch))
    return links


@pytest.mark.parametrize("add", [messages.add_late, messages.add_early])
@pytest.mark.parametrize("name", schedules.TABLE)
def test_a_link_delivers_in_the_order_in_which_it_is_given(name, add):
    for ranks, stages, count in sizes(name, ranks=(1, 2, 4), microbatches=(1, 2, 4, 8)):
        rows = add(order(name, ranks, stages, count), schedules.pipelines(name, ranks, stages))
        for (source, target), (sent, received) in ends(rows).items():
            assert sent == received and len(set(sent)) == len(sent)
            assert source != target
        computing = [[action for action in row if action.kind in PASSES] for row in rows]
        assert computing == order(name, ranks, stages, count)


def test_a_receive_comes_before_what_needs_it_and_a_send_after_what_made_it():
    rows = messages.add_late(order("1f1b", 2, 1, 2), [range(2)])
    assert csv_form.format_order(rows).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
    ]


def test_neighbours_on_one_rank_send_nothing():
    """Stages 1 and 2 of a V on two ranks."""
    rows = messages.add_late(order("zbv", 2, 2, 4), [range(4)])
    sends = {(action.kind, action.stage) for row in rows for action in row if action.kind.startswith("send")}
    assert sends == {("send_forward", 0), ("send_forward", 2), ("send_backward", 1), ("send_backward", 3)}
    assert not any(
        a.kind in schedules.MESSAGES for row in messages.add_late(order("zbv", 1, 2, 4), [range(2)]) for a in row
    )


def test_of_two_that_run_as_one_both_receive_first_and_send_last():
    """On rank 1 of 4, which has a neighbour on either side for both of its stages."""
    row = messages.add_late(order("dualpipev", 4, 2, 10), schedules.pipelines("dualpipev", 4, 2))[1]
    pairs = [i for i, action in enumerate(row) if action.overlaps_next]
    assert len(pairs) == 10  # 2 (M - 2P + rank + 1), and P - 1 - rank
    for i in pairs:
        forward, backward = row[i : i + 2]
        assert row[i + 2 : i + 4] == [
            forward._replace(kind="send_forward", overlaps_next=False),
            backward._replace(kind="send_backward"),
        ]
        assert forward._replace(kind="recv_forward", overlaps_next=False) in row[:i]
        assert backward._replace(kind="recv_backward") in row[:i]


def test_early_receives_that_hold_up_a_rank_make_a_step_longer():
    """pytorch/pytorch#188833: P = 8, V = 2. Links carry the same in the same order; only receives stand elsewhere."""
    late, early = run("interleaved_1f1b", 8, 2, 16), run("interleaved_1f1b", 8, 2, 16, messages.add_early)
    assert late.makespan == 3 * (2 * 16 + 7) < early.makespan
    assert late.bytes_sent == early.bytes_sent


def test_messages_become_ops_with_their_peer_and_size():
    """Rank 1 of a loop over two ranks has stages 1 and 3; stage 1 receives 10 bytes from stage 0 and sends 11."""
    rows = messages.add_late(order("interleaved_1f1b", 2, 2, 2), [range(4)])
    ops = plan(rows).programs[1].ops
    first = [(op.kind, op.payload, op.stage, op.peer, op.bytes, op.asynchronous) for op in ops[:3]]
    assert first == [
        ("recv", "activation", 1, 0, 10, False),
        ("forward", "", 1, None, 0, False),
        ("send", "activation", 1, 0, 11, True),
    ]
    gradients = {(op.kind, op.stage, op.bytes) for op in ops if op.payload == "gradient"}
    assert gradients == {("send", 3, 12), ("recv", 1, 11), ("send", 1, 10)}
    assert {op.axis for op in ops} == {"", "pp"}


def test_other_ops_stand_before_and_after():
    load, update = Op(kind="load"), Op(kind="optimizer")
    compute = {("forward", 0): [Op(kind="forward", stage=0)], ("backward", 0): [Op(kind="backward", stage=0)]}
    ops = messages.unrolled(order("gpipe", 1, 1, 1)[0], compute, {}, {0: 0}, before=[load], after=[update])
    assert [op.kind for op in ops] == ["load", "forward", "backward", "optimizer"]


# Orders that cannot be


def test_ranks_that_wait_for_each_other_are_shown():
    """Each of two ranks wants the other's second stage before it does its own first."""
    rows = csv_form.parse_part("2F0,0F0\n1F0,3F0")
    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1"):
        simulate(plan(messages.add_late(rows, [range(4)])), UNIT)
    with pytest.raises(messages.OrderError) as error:
        messages.add_early(rows, [range(4)])
    assert str(error.value).splitlines() == [
        "these ranks wait for each other:",
        "rank 0  > 2F0   0F0",
        "rank 1  > 1F0   3F0",
    ]


def test_what_is_never_sent_is_shown():
    rows = csv_form.parse_part("0F0\n1F0,1F1")
    with pytest.raises(messages.OrderError, match=r"has not been computed:\nrank 0    0F0\nrank 1    1F0 > 1F1"):
        messages.add_late(rows, [range(2)])


def test_a_stage_that_runs_before_its_neighbour_on_the_same_rank_is_shown():
    rows = csv_form.parse_part("0F0,3F0\n2F0,1F0")
    with pytest.raises(messages.OrderError, match="rank 1  > 2F0   1F0"):
        messages.add_late(rows, [range(4)])


def test_a_pipeline_has_the_stages_of_its_order():
    with pytest.raises(messages.OrderError, match=r"not those of its pipelines: \[1\]"):
        messages.add_late(csv_form.parse_order("0F0,0B0"), [range(2)])


@pytest.mark.parametrize("name", schedules.TABLE)
def test_pipelines_can_be_told_from_an_order(name):
    for ranks, stages, count in sizes(name, ranks=(1, 2, 4), microbatches=(1, 4, 8)):
        found = messages.pipelines_of(order(name, ranks, stages, count))
        assert found == schedules.pipelines(name, ranks, stages)


# Sends that wait for their receive

# pytorch/pytorch#172668: two ranks that send to each other before either receives.
BOTH_SEND_FIRST = """\
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1
"""


def test_two_ranks_that_both_send_first_block_each_other_where_a_send_waits():
    rows = csv_form.parse_part(BOTH_SEND_FIRST)
    with pytest.raises(messages.OrderError) as error:
        rendezvous.check(rows)
    assert str(error.value).splitlines() == [
        "these ranks wait for each other: 0 -> 1 -> 0",
        "rank 0    0F0        0SEND_F0   0F1      > 0SEND_F1   2RECV_F0   2F0",
        "rank 1    1RECV_F0   1F0      > 1SEND_F0   1RECV_F1   1F1",
    ]


def test_and_do_not_where_sends_are_buffered():
    """F0 F1 on rank 0, F0 of stage 1 in between, and then F0 of stage 2 beside F1 of stage 1."""
    assert simulate(plan(csv_form.parse_part(BOTH_SEND_FIRST)), UNIT).makespan == 3


def test_nor_where_the_lower_rank_receives_first():
    rows = csv_form.parse_part(BOTH_SEND_FIRST.replace("0F1,0SEND_F1,2RECV_F0", "0F1,2RECV_F0,0SEND_F1"))
    rendezvous.check(rows)


@pytest.mark.parametrize("name", schedules.TABLE)
def test_early_receives_never_block(name):
    for ranks, stages, count in sizes(name, ranks=(1, 2, 4), microbatches=(1, 2, 4, 8)):
        rendezvous.check(
            messages.add_early(order(name, ranks, stages, count), schedules.pipelines(name, ranks, stages))
        )


def test_late_receives_do_in_1f1b():
    """Why torch's Schedule1F1B hands a send and a receive over together (batch_isend_irecv)."""
    with pytest.raises(messages.OrderError, match="0 -> 1 -> 0"):
        rendezvous.check(messages.add_late(order("1f1b", 2, 1, 4), [range(2)]))


def test_a_message_without_its_other_end_is_a_mistake_of_the_plan():
    with pytest.raises(PlanError, match="no partner"):
        simulate(plan(csv_form.parse_part("0F0,0SEND_F0\n1F0")), UNIT)
    with pytest.raises(
        messages.OrderError, match=r"rank 0 waits for rank 1, which has ended\nrank 0    0F0 > 0SEND_F0"
    ):
        rendezvous.check(csv_form.parse_part("0F0,0SEND_F0\n1F0"))
