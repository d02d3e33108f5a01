"""An order and its CSV are the same; what is not a schedule is refused, with its row, its column and what is around."""

from __future__ import annotations

import pytest

from engine import schedules
from engine.schedules import Action, messages
from engine.schedules.csv_form import ScheduleFileError, format_order, parse_order, parse_part

# A V on two ranks, as torch writes it: idle steps are empty cells, and two actions in brackets run as one.
WITH_IDLE_STEPS = """\
0F0,0F1,,3F0,3F1,3I0,3W0,(0F2;3B1)OVERLAP_F_B,3F2,3B2,0B0,0B1,0B2
,1F0,2F0,1F1,2F1,,2B0,1B0,2B1,1B1,1F2,2F2,2B2,1B2
"""


def orders():
    for name, shape in schedules.TABLE.items():
        for size in ((1, 4), (2, 4), (4, 8)):
            stages = shape.stages_per_rank or 2
            if schedules.check(name, size[0], stages, size[1]) is None:
                yield name, schedules.order(name, *size, stages), schedules.pipelines(name, size[0], stages)


def test_cells_are_a_stage_a_letter_and_a_microbatch():
    assert parse_order("0F0,0B0\n1F0,1I0,1W0") == [
        [Action("forward", 0, 0), Action("backward", 0, 0)],
        [Action("forward", 1, 0), Action("backward_input", 1, 0), Action("backward_weight", 1, 0)],
    ]


def test_idle_steps_are_left_out_and_pairs_are_kept():
    order = parse_order(WITH_IDLE_STEPS)
    assert [action.kind for action in order[0][:6]] == ["forward"] * 4 + ["backward_input", "backward_weight"]
    assert order[0][6:8] == [Action("forward", 0, 2, overlaps_next=True), Action("backward", 3, 1)]
    assert format_order(order).splitlines() == [
        "0F0,0F1,3F0,3F1,3I0,3W0,(0F2;3B1)OVERLAP_F_B,3F2,3B2,0B0,0B1,0B2",
        "1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,1F2,2F2,2B2,1B2",
    ]


def test_every_order_is_read_as_it_was_written():
    for name, order, pipelines in orders():
        assert parse_order(format_order(order)) == order, name
        lowered = messages.add_late(order, pipelines)
        assert parse_order(format_order(lowered)) == lowered, name


def test_what_a_sharded_stage_does_is_read_too():
    line = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n"
    (row,) = parse_order(line)
    assert [action.kind for action in row] == ["unshard", "forward", "backward", "reshard", "reduce_grad"]
    assert [action.microbatch for action in row] == [None, 0, 0, None, None]
    assert format_order([row]) == line


@pytest.mark.parametrize(
    "text", ["\ufeff0F0,0B0", " 0F0 , 0B0 \n", "0F0,0B0\r\n\r\n", '"0F0","0B0",,', ",0F0,,0B0\n\n\n"]
)
def test_spaces_and_line_ends_make_no_difference(text):
    assert parse_order(text) == parse_order("0F0,0B0")


def test_forwards_alone_are_a_schedule():
    assert parse_order("0F0,0F1") == [[Action("forward", 0, 0), Action("forward", 0, 1)]]


def test_torch_reads_cells_as_they_are_meant():
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name, order, pipelines in orders():
        for line in format_order(messages.add_late(order, pipelines)).splitlines():
            read = [torch_schedules._Action.from_str(word) for word in line.split(",")]
            assert ",".join(map(str, read)) == line, name
            assert all(action.sub_actions or action.microbatch_index is not None for action in read)


@pytest.mark.parametrize(
    ("text", "row", "column", "reason"),
    [
        ("", 1, 1, "there is nothing in it"),
        ("\n\n", 1, 1, "there is nothing in it"),
        ("0F0,0B0\n1F0,1X0", 2, 2, "a cell is a stage, a kind of action and a microbatch, like 2F0"),
        ("0F0,0B0,oops", 1, 3, "a cell is a stage"),
        ("0f0", 1, 1, "a cell is a stage"),
        ("0F", 1, 1, "F is about a microbatch"),
        ("0UNSHARD1", 1, 1, "UNSHARD is about a stage, and has no microbatch"),
        ("-1F0", 1, 1, "a cell is a stage"),
        ("0F0;0B0", 1, 1, "a cell is a stage"),
        ("0F12345678", 1, 1, "a cell is a stage"),
        ("(0F0)OVERLAP_F_B", 1, 1, r"actions that run as one are written like \(0F7;7B3\)OVERLAP_F_B"),
        ("(0F0;1B0)", 1, 1, "actions that run as one"),
        ("(0F0;1Z0)OVERLAP_F_B", 1, 1, "a cell is a stage"),
        ("0F0,0B0\n,,", 2, 1, "rank 1 has nothing to do"),
        ("0F0,0B0\n\n1F0,1B0", 2, 1, "rank 1 has nothing to do"),
        ("0F0,0B0\n1F0,0F1", 2, 2, "stage 0 is on rank 0 already"),
        ("0F0,0B0,0F0", 1, 3, "the same stands before it already"),
        ("0B0,0F0", 1, 1, "0F0 must stand before it"),
        ("0F0,0W0,0I0", 1, 2, "0I0 must stand before it"),
        ("0F0,,0B0,0W0", 1, 4, "B is the whole backward"),  # older files: B for I
        ("0F0,0B0,0I0", 1, 3, r"the backward is whole \(B\) or in halves"),
        ("0F0,0B0\n2F0,2B0", 2, 1, "there is no stage 1"),
        ("0F0,0B0,0F1\n1F0,1B0", 1, 3, "its backward .* is missing"),
        ("0F0,0I0", 1, 2, "the W after it is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", 2, 1, "stage 1 lacks microbatch 1, which stage 0 has"),
        ("0F0,0B0\n1F0,1F1,1B0,1B1", 2, 4, "stage 0 lacks this microbatch"),
        ("0F0,0B0\n1RECV_F0", 2, 1, "stage 1 lacks microbatch 0"),
        ("0F0,0B0,0SEND_B0", 1, 3, "there is no stage -1 at the other end"),
        ("0F0,0SEND_F0,1F0", 1, 2, "stage 1, at the other end, is on the same rank"),
        ("0F1,0B1", 1, 2, "there is no microbatch 0"),
        ('0F0,"0B0\n1F0,1B0', 1, 2, "a cell is a stage"),
        ("0F0,\0", 1, 2, "a cell is a stage"),
    ],
)
def test_what_is_not_a_schedule_is_refused_where_it_is_wrong(text, row, column, reason):
    with pytest.raises(ScheduleFileError, match=f"^row {row}, column {column}: .*{reason}") as error:
        parse_order(text)
    assert (error.value.row, error.value.column) == (row, column)


def test_an_error_shows_the_cells_around_it_with_an_arrow():
    with pytest.raises(ScheduleFileError) as error:
        parse_order("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,2B2,1F3,1B3")
    assert str(error.value).splitlines()[1:] == [
        "rank 0 ...   0F2   0F3   0B0   0B1   0B2   0B3",
        "rank 1 ...   1F1   1B1   1F2 > 2B2   1F3   1B3",
    ]


def test_of_many_ranks_and_long_cells_an_error_shows_a_few():
    rows = [f"{stage}F0,{stage}B0" for stage in range(100)]
    rows[50] = "50F0," + "B" * 1000
    with pytest.raises(ScheduleFileError, match="row 51, column 2") as error:
        parse_order("\n".join(rows))
    shown = str(error.value).splitlines()[1:]
    assert len(shown) == 8 and max(map(len, shown)) < 80
    assert [line for line in shown if ">" in line] == [shown[4]]


def test_of_a_part_the_end_may_be_missing_and_nothing_else():
    assert len(parse_part("0F0,0F1,0I0\n1F0,1B0")[0]) == 3
    with pytest.raises(ScheduleFileError, match="0F1 must stand before it"):
        parse_part("0F0,0B1")
