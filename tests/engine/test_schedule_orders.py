"""Orders are those of PyTorch's own schedules, cell by cell, and of their papers; rules say what each one needs."""

from __future__ import annotations

import itertools

import pytest

from engine import schedules
from engine.schedules import Action, csv_form, messages, zb_2p

TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def sizes(name: str, ranks=(1, 2, 3, 4, 6), microbatches=(1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 16)):
    """(ranks, stages a rank, microbatches) that the schedule allows."""
    stages = schedules.TABLE[name].stages_per_rank
    grid = itertools.product(ranks, (stages,) if stages else (1, 2, 3), microbatches)
    return [size for size in grid if schedules.check(name, *size) is None]


def order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    return schedules.order(name, ranks, microbatches, stages)


def text(actions) -> str:
    """`F0 I0 W0`, with the letters of torch; stages are left out."""
    return " ".join(csv_form.LETTERS[action.kind] + str(action.microbatch) for action in actions)


# What PyTorch does


class Stage:
    """What a schedule asks of a stage: the numbers it is made for, and a note of what it is told to compute."""

    submod, has_backward, is_first, is_last = None, True, False, False

    def __init__(self, rank: int, ranks: int, stages: int):
        self.stage_index = self.group_rank = rank
        self.group_size, self.num_stages = ranks, ranks * stages
        self.done: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *args, **kwargs) -> None:
        self.done.append(Action("forward", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs) -> None:
        self.done.append(Action("backward", self.stage_index, microbatch))

    def get_fwd_recv_ops(self, microbatch: int) -> list:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, factor: int) -> None:
        pass


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def build(module, name: str, ranks: int, stages: int, microbatches: int, *, rank: int = 0):
    """torch's own schedule, without processes."""
    of_rank = [Stage(rank, ranks, stages) for _ in range(stages)]
    single = schedules.TABLE[name].stages_per_rank == 1
    return getattr(module, TORCH_CLASSES[name])(of_rank[0] if single else of_rank, microbatches)


def from_torch(rows) -> list[list[Action]]:
    """torch's actions as ours, without idle steps; through text, which both can read and write."""
    return csv_form.parse_order("\n".join(",".join(str(a) for a in row if a is not None) for row in rows))


@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_an_order_with_its_messages_is_the_one_that_torch_runs(torch_schedules, name):
    """`pipeline_order`; and `pipeline_order_with_comms`, which its runtime goes through action by action."""
    for size in sizes(name):
        of_torch = build(torch_schedules, name, *size)
        ours = order(name, *size)
        assert ours == from_torch(of_torch.pipeline_order.values()), size
        lowered = from_torch(of_torch.pipeline_order_with_comms.values())
        computing = [[a for a in row if a.kind not in schedules.MESSAGES] for row in lowered]
        assert messages.add_early(computing, schedules.pipelines(name, *size[:2])) == lowered, size


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_rank_with_one_stage_computes_what_torch_makes_it_compute(torch_schedules, name):
    """torch has no list to read there: its own loop is run, on a stage that takes note."""
    for ranks, stages, microbatches in sizes(name):
        for rank in range(ranks):
            of_torch = build(torch_schedules, name, ranks, stages, microbatches, rank=rank)
            of_torch._initialize_stage = lambda *args: None
            of_torch._step_microbatches([()] * microbatches, [{}] * microbatches)
            assert of_torch._stage.done == order(name, ranks, stages, microbatches)[rank]


def test_the_list_that_torch_draws_for_1f1b_is_wrong_on_its_last_rank(torch_schedules):
    """Of torch 2.13's `_get_pipeline_order`, which its visualizer uses: F1, F2, ... and never F0."""
    listed = build(torch_schedules, "1f1b", 4, 1, 8)._get_pipeline_order().values()
    listed = [[str(action) for action in row if action.is_compute_op] for row in listed]
    ours = [line.split(",") for line in csv_form.format_order(order("1f1b", 4, 1, 8)).splitlines()]
    assert listed[:3] == ours[:3]
    if listed[3] != ours[3]:  # it may be put right one day
        assert listed[3][:4] == ["3F1", "3B0", "3F2", "3B1"] and "3F0" not in listed[3]


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_rules_allow_what_torch_allows(torch_schedules, name):
    single = schedules.TABLE[name].stages_per_rank == 1
    for size in itertools.product((1, 2, 3, 4, 5), (1,) if single else (1, 2, 3), range(1, 13)):
        try:
            build(torch_schedules, name, *size)
        except ValueError as error:
            assert schedules.check(name, *size), (size, error)
        else:
            assert schedules.check(name, *size) is None, size


def test_stages_are_placed_where_torch_places_them(torch_schedules):
    utils = pytest.importorskip("torch.distributed.pipelining._utils")
    for name, shape in schedules.TABLE.items():
        stages = shape.stages_per_rank or 3
        of_torch = utils.generate_rank_to_stage_mapping(4, 4 * stages, style=shape.placement)
        assert schedules.placement(name, 4, stages) == [tuple(of_torch[rank]) for rank in range(4)]


# What papers say


def test_zb_h1_and_zb_h2_are_the_figure_of_their_paper():
    """Figure 3 of Qi et al. 2023: four stages, eight microbatches (numbered from 1 there, and I is called B)."""
    h1 = order("interleaved_zero_bubble", 4, 1, 8)
    assert text(h1[0]) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    assert text(h1[3]) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
    h2 = order("zb_h2", 4, 1, 8)
    assert text(h2[0]) == "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7"
    assert text(h2[3]) == "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7"


def test_looped_bfs_finishes_a_stage_before_the_next():
    assert csv_form.format_order(order("looped_bfs", 2, 2, 2)).split() == [
        "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0",
        "1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0",
    ]


def test_interleaved_1f1b_takes_a_round_through_a_stage_and_then_through_the_next():
    """P = 4, V = 2: the first rank does (V-1) P + 2 (P-1) = 10 forwards, then one of each (Megatron's warm-up)."""
    first = order("interleaved_1f1b", 4, 2, 8)[0]
    assert [(a.stage, a.microbatch) for a in first[:10]] == [
        *[(0, 0), (0, 1), (0, 2), (0, 3), (4, 0), (4, 1), (4, 2), (4, 3), (0, 4), (0, 5)]
    ]
    assert [a.kind for a in first[10:]] == ["forward", "backward"] * 6 + ["backward"] * 10
    assert [(a.stage, a.microbatch) for a in first if a.kind == "backward"][:5] == [
        (4, 0),
        (4, 1),
        (4, 2),
        (4, 3),
        (0, 0),
    ]


def test_dualpipe_is_two_mirror_images():
    """What rank r does for one copy of the model, rank P-1-r does for the other, at the same time."""
    ranks, microbatches = 6, 16
    both = order("dualpipe", ranks, 2, microbatches)
    for one, other in zip(both, reversed(both), strict=True):
        mirrored = [
            a._replace(
                stage=(a.stage + ranks) % (2 * ranks), microbatch=(a.microbatch + microbatches // 2) % microbatches
            )
            for a in other
        ]
        assert one == mirrored
    assert {a.microbatch for row in both for a in row if a.stage < ranks} == set(range(8))
    assert schedules.pipelines("dualpipe", ranks, 2) == [range(6), range(6, 12)]


@pytest.mark.parametrize("name", ["dualpipev", "dualpipe"])
def test_dualpipe_overlaps_a_forward_with_the_backward_of_the_other_stage(name):
    for row in order(name, 4, 2, 16):
        pairs = [pair for pair in itertools.pairwise(row) if pair[0].overlaps_next]
        assert pairs and not row[-1].overlaps_next
        assert all((one.kind, two.kind, two.overlaps_next) == ("forward", "backward", False) for one, two in pairs)
        assert all(one.stage != two.stage for one, two in pairs)


# What is true of all


def broken(actions: list[Action], stages: tuple[int, ...], microbatches) -> str:
    """What is wrong with a rank's order, in a word; empty if each pass is there once and after what it needs."""
    done: set[tuple] = set()
    for kind, stage, microbatch, _ in actions:
        need = {"forward": None, "backward_weight": "backward_input"}.get(kind, "forward")
        if (kind, stage, microbatch) in done or (need and (need, stage, microbatch) not in done):
            return f"{kind} {stage} {microbatch}"
        done.add((kind, stage, microbatch))
    halves = {("backward", s, m) for k, s, m in done if k == "backward_weight"}
    whole = {key for key in done if key[0] == "backward"}
    if halves & whole or sum(k == "backward_input" for k, *_ in done) != len(halves):
        return "halves"
    wanted = {(s, m) for s in stages for m in microbatches(s)}
    return "" if {k[1:] for k in halves | whole} == wanted == {k[1:] for k in done if k[0] == "forward"} else "missing"


@pytest.mark.parametrize("name", schedules.TABLE)
def test_a_rank_does_every_pass_of_its_stages_once_and_after_what_it_needs(name):
    for ranks, stages, count in sizes(name):
        pipelines = schedules.pipelines(name, ranks, stages)
        share = count // len(pipelines)
        starts = {stage: i * share for i, pipeline in enumerate(pipelines) for stage in pipeline}
        rows = zip(order(name, ranks, stages, count), schedules.placement(name, ranks, stages), strict=True)
        for actions, placed in rows:
            assert not broken(actions, placed, lambda s, n=share, at=starts: range(at[s], at[s] + n))


def test_orders_that_are_wrong_would_be_seen():
    row = order("zbv", 2, 2, 3)[0]
    assert not broken(row, (0, 3), lambda stage: range(3))
    first_half = next(i for i, action in enumerate(row) if action.kind == "backward_input")
    swapped = [*row[:first_half], row[first_half + 1], row[first_half], *row[first_half + 2 :]]
    assert broken(swapped, (0, 3), lambda stage: range(3)).startswith("backward_weight")
    assert broken(row[1:], (0, 3), lambda stage: range(3)) == "backward_input 0 0"
    assert broken(row[:-1], (0, 3), lambda stage: range(3)) == "halves"
    assert broken(row, (0, 3), lambda stage: range(4)) == "missing"


# Placement


def test_a_v_lays_the_last_stage_beside_the_first():
    assert schedules.placement("zbv", 4, 2) == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert schedules.placement("interleaved_1f1b", 4, 2) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert schedules.placement("1f1b", 3) == [(0,), (1,), (2,)]
    assert schedules.ranks_of([(0, 3), (1, 2)]) == {0: 0, 1: 1, 2: 1, 3: 0}


# Rules


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("gpipe", 1),
        ("looped_bfs", 1),
        ("interleaved_1f1b", 1),
        ("interleaved_zero_bubble", 1),
        ("zb_h2", 1),
        ("zb_2p", 1),
        ("zbv", 1),
        ("1f1b", 4),  # as many as stages
        ("dualpipev", 8),  # two stages a rank
        ("dualpipe", 8),  # twice the ranks
    ],
)
def test_the_fewest_microbatches_of_each_schedule_on_four_ranks(name, least):
    stages = schedules.TABLE[name].stages_per_rank or 2
    assert next(m for m in itertools.count(1) if schedules.check(name, 4, stages, m) is None) == least
    if least > 1:
        too_few = schedules.check(name, 4, stages, least - 1)
        assert (too_few.setting, too_few.value) == ("microbatches", least - 1) and least in too_few.suggest


def test_interleaved_schedules_go_in_whole_rounds():
    """P = 4: 10 microbatches are 2 rounds of 5, 3 are one, 9 would be two of 4.5."""
    for name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        assert [m for m in range(1, 17) if schedules.check(name, 4, 2, m)] == [9, 11, 13, 14]
        rule = schedules.check(name, 4, 2, 9)
        assert rule.suggest == (7, 8, 10)
        assert str(rule).startswith(f"The schedule {name} runs microbatches in rounds") and "here 2; it is 9." in str(
            rule
        )


@pytest.mark.parametrize(
    ("size", "code", "suggest"),
    [
        (("zbv", 4, 1, 8), "stages_of_schedule", (2,)),
        (("dualpipev", 4, 3, 8), "stages_of_schedule", (2,)),
        (("1f1b", 4, 2, 8), "stages_of_schedule", (1,)),
        (("1f1b", 4, 1, 3), "too_few_microbatches", (4,)),
        (("dualpipev", 4, 2, 7), "too_few_microbatches", (8,)),
        (("interleaved_1f1b", 4, 2, 13), "rounds_of_microbatches", (10, 12, 15)),
        (("dualpipe", 3, 2, 8), "two_way_devices", (2, 4)),
        (("dualpipe", 1, 2, 8), "two_way_devices", (2, 4)),
        (("dualpipe", 4, 2, 9), "two_way_microbatches", (8, 10, 12)),
        (("dualpipe", 4, 2, 6), "two_way_microbatches", (8, 10, 12)),
        (("gpipe", 512, 1, 65_536), "forwards_of_plan", (2_048,)),
    ],
)
def test_a_broken_rule_says_what_would_keep_it(size, code, suggest):
    rule = schedules.check(*size)
    assert (rule.code, rule.suggest) == (code, suggest)
    assert str(rule.value) in str(rule) and f"Try: {', '.join(map(str, suggest))}." in str(rule)
    place = {"devices": 1, "stages_per_rank": 2, "microbatches": 3}[rule.setting]
    for value in suggest:
        after = schedules.check(*size[:place], value, *size[place + 1 :])
        assert after is None or after.code != code


@pytest.mark.parametrize(
    "size", [("zbv", 4, 1, 8), ("dualpipev", 2, 2, 3), ("dualpipe", 3, 2, 8), ("interleaved_1f1b", 4, 2, 9)]
)
def test_there_is_no_order_where_a_rule_leaves_none(size):
    with pytest.raises(ValueError, match=f"The schedule {size[0]}"):
        order(*size)


# Table 4 of Qi et al. 2023, ZB-2p: ranks, microbatches, times of F, B, W and a message in ms (table 7), idle part.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337), 0.601, 0.0433),
    (8, 32, (18.522, 18.086, 9.337), 0.601, 0.0039),
    (8, 24, (29.718, 29.444, 19.927), 0.527, 0.0029),
    (8, 64, (29.718, 29.444, 19.927), 0.527, 0.0010),
    (16, 48, (11.347, 11.248, 8.132), 0.377, 0.0066),
    (32, 96, (10.419, 10.207, 7.715), 0.408, 0.0038),
]


@pytest.mark.parametrize(("ranks", "microbatches", "times", "message", "idle"), PUBLISHED)
def test_the_search_of_zb_2p_finds_orders_as_good_as_the_published(ranks, microbatches, times, message, idle):
    """Idle: of the longest time from a rank's first op to its last, what it does not work; the paper's definition."""
    rows = zb_2p.search(ranks, microbatches, times, message)
    takes = dict(zip(zb_2p.SECONDS, times, strict=True))
    longest = max(row[-1][2] + takes[row[-1][0]] - row[0][2] for row in rows)
    assert (longest - microbatches * sum(times)) / longest == pytest.approx(idle, abs=0.0035)
