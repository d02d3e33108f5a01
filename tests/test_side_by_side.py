"""Tests that run side by side -> one that measures a time is alone: what `alone` and slow.txt promise."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from tests.conftest import Room, mark_slow


def test_who_asks_to_be_alone_waits_for_those_inside_and_they_for_it(tmp_path: Path):
    """Two tests are inside; one asks the other out. What is written in the order in which it happens says who was."""
    rooms = [Room(tmp_path), Room(tmp_path)]
    for room in rooms:
        room.enter(fcntl.LOCK_SH)  # both at once
    happened, asked = [], threading.Event()

    def measure() -> None:
        asked.set()
        with rooms[0].alone():
            happened.append("measured")

    thread = threading.Thread(target=measure)
    thread.start()
    asked.wait()
    thread.join(0.2)
    assert happened == [] and thread.is_alive()  # the other one is still inside
    happened.append("the other leaves")
    rooms[1].leave()
    thread.join(10)
    assert happened == ["the other leaves", "measured"]
    rooms[0].leave()


class Item:
    """As much of a collected test as is looked at."""

    def __init__(self, nodeid: str):
        self.nodeid, self.marks = nodeid, []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_a_line_marks_the_tests_that_begin_with_it_and_one_that_names_none_is_an_error():
    items = [Item("tests/a.py::test_x[1-2]"), Item("tests/a.py::test_x[3-2]"), Item("tests/b.py::test_y")]
    mark_slow(items, ["tests/a.py::test_x[1", "tests/c.py::test_gone"], whole=True)  # c.py was not collected
    assert [item.marks for item in items] == [["slow"], [], []]
    with pytest.raises(pytest.UsageError, match=r"test_x\[9"):
        mark_slow(items, ["tests/a.py::test_x[9"], whole=True)
    mark_slow(items, ["tests/a.py::test_x[9"], whole=False)  # single tests were asked for
