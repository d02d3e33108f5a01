"""Schedules are legal orders, hold as few activations as their papers say, and look like the papers' figures."""

from __future__ import annotations

import pytest

from engine import schedules
from engine.spec import SCHEDULES

ONE_STAGE = ("gpipe", "1f1b")  # the other schedules are in test_schedule_orders.py
GRID = [(stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 7, 8, 16)]


def text(actions) -> str:
    return " ".join(f"{action.kind[0].upper()}{action.microbatch}" for action in actions)


def test_every_schedule_that_can_be_asked_for_is_here():
    assert set(SCHEDULES) == set(schedules.TABLE)


def test_gpipe_is_every_forward_then_every_backward():
    """Figure 2c of Huang et al. 2019."""
    assert [text(stage) for stage in schedules.order("gpipe", 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_is_the_figure_of_its_paper():
    """Figure 4 of Narayanan et al. 2021: four stages, eight microbatches (numbered from 1 there)."""
    assert [text(stage) for stage in schedules.order("1f1b", 4, 8)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def is_legal(actions, microbatches: int) -> bool:
    """Every microbatch once forward, later once backward; and in rising order, since a link keeps its order too."""
    actions = [(action.kind, action.microbatch) for action in actions]
    place = {action: i for i, action in enumerate(actions)}
    wanted = {(kind, m) for kind in ("forward", "backward") for m in range(microbatches)}
    in_order = all(
        [m for k, m in actions if k == kind] == list(range(microbatches)) for kind in ("forward", "backward")
    )
    return (
        len(actions) == len(place)
        and place.keys() == wanted
        and in_order
        and all(place["forward", m] < place["backward", m] for m in range(microbatches))
    )


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_every_stage_does_every_microbatch_once_forward_and_then_once_backward(schedule, stages, microbatches):
    order = schedules.order(schedule, stages, microbatches)
    assert [{action.stage for action in actions} for actions in order] == [{stage} for stage in range(stages)]
    assert all(is_legal(actions, microbatches) for actions in order)


def test_orders_that_are_not_legal_are_told_from_those_that_are():
    last = schedules.order("1f1b", 2, 3)[1]
    assert text(last) == "F0 B0 F1 B1 F2 B2" and is_legal(last, 3)
    assert not is_legal([last[1], last[0], *last[2:]], 3)  # backward before forward
    assert not is_legal(last[:-1], 3) and not is_legal([*last, last[0]], 3)  # one missing, one twice
    assert not is_legal([last[2], last[0], last[1], *last[3:]], 3)  # out of order


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_a_stage_holds_as_many_microbatches_as_its_paper_says(schedule, stages, microbatches):
    """GPipe: all M. 1F1B: min(M, P - stage)."""
    for stage, actions in enumerate(schedules.order(schedule, stages, microbatches)):
        held = most = 0
        for action in actions:
            held += 1 if action.kind == "forward" else -1
            most = max(most, held)
        assert most == (microbatches if schedule == "gpipe" else min(microbatches, stages - stage))
