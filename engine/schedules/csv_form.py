"""An order <-> CSV as PyTorch writes it: a row a rank, a cell an action: `0F0`, `3I2`, `3W2`, `(0F7;7B3)OVERLAP_F_B`.

A cell is a stage, a letter and a microbatch: F forward, B backward, I and W its halves for the input and for the
weights. Orders with messages have `0SEND_F1`, `1RECV_F1`, `1SEND_B1`, `0RECV_B1` too, and those of sharded stages
`0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`, which have no microbatch. The files are those of `_dump_csv` and `_load_csv` in
torch.distributed.pipelining.schedules. Empty cells, its idle time steps, are left out: what a rank waits for follows
from the order.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise

from engine.schedules import MESSAGES, Action, other_end
from engine.schedules.grid import show

LETTERS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "send_forward": "SEND_F",
    "recv_forward": "RECV_F",
    "send_backward": "SEND_B",
    "recv_backward": "RECV_B",
    "unshard": "UNSHARD",
    "reshard": "RESHARD",
    "reduce_grad": "REDUCE_GRAD",
}
KINDS = {letter: kind for kind, letter in LETTERS.items()}
OF_A_STAGE = ("unshard", "reshard", "reduce_grad")  # these have no microbatch
OVERLAP = "OVERLAP_F_B"
CELL = re.compile(r"([0-9]{1,6})([A-Z_]+?)([0-9]{0,6})")
SHOWN = 40  # characters of a cell in an error
# What a pass needs of its own stage, what cannot be in the same order, and what must follow the last that is done.
NEEDS = {"forward": "", "backward": "forward", "backward_input": "forward", "backward_weight": "backward_input"}
EXCLUDES = {"backward": "backward_input", "backward_input": "backward"}
UNFINISHED = {"forward": "its backward (B, or I and W) is missing", "backward_input": "the W after it is missing"}


class ScheduleFileError(ValueError):
    """A file that is not a schedule: the row and the column (both from 1), the reason, and the cells around it."""

    def __init__(self, row: int, column: int, reason: str, cells: Sequence[Sequence[str]]):
        self.row, self.column, self.reason = row, column, reason
        short = [[textwrap.shorten(text, SHOWN, placeholder="...") for text in line] for line in cells]
        super().__init__(f"row {row}, column {column}: {reason}\n{show(short, {row - 1: column - 1})}")


def parse_order(text: str) -> list[list[Action]]:
    """The order of a whole step that a CSV stands for, or ScheduleFileError.

    Each rank could follow it on its own: every microbatch of every stage goes forward and, unless the file has no
    backward at all, later backward. Whether ranks get from each other what they need is asked of
    `engine.schedules.messages` and `engine.simulation`.
    """
    return _parse(text, (_check_ranks, _check_messages, _check_completeness))


def parse_part(text: str) -> list[list[Action]]:
    """Like `parse_order`, but of a part of a step: what comes after its end may be missing."""
    return _parse(text, (_check_ranks, _check_messages))


def _parse(text: str, checks: Sequence[Callable[[Sequence[Sequence[Action]]], None]]) -> list[list[Action]]:
    cells = _cells(text)
    order, columns = [], []
    for row, line in enumerate(cells):
        actions, places = [], []
        for column, word in enumerate(line):
            try:
                found = _parse_cell(word)
            except _Wrong as wrong:
                raise ScheduleFileError(row + 1, column + 1, str(wrong), cells) from None
            actions += found
            places += [column] * len(found)
        order.append(actions)
        columns.append(places or [0])
    try:
        for check in checks:
            check(order)
    except _WrongAt as wrong:
        column = columns[wrong.rank][wrong.place]
        raise ScheduleFileError(wrong.rank + 1, column + 1, str(wrong), cells) from None
    return order


def format_order(order: Sequence[Sequence[Action]]) -> str:
    """The CSV of an order; `parse_order` makes an equal order of it, and torch's `_load_csv` reads it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for actions in order:
        words, group = [], []
        for action in actions:
            group.append(cell(action))
            if not action.overlaps_next:
                words.append(group[0] if len(group) == 1 else f"({';'.join(group)}){OVERLAP}")
                group = []
        writer.writerow(words + group)
    return out.getvalue()


def cell(action: Action) -> str:
    return f"{action.stage}{LETTERS[action.kind]}{'' if action.microbatch is None else action.microbatch}"


class _Wrong(Exception):
    """What is wrong with a cell."""


class _WrongAt(Exception):
    """What is wrong with an action, and where it is."""

    def __init__(self, rank: int, place: int, reason: str):
        self.rank, self.place = rank, place
        super().__init__(reason)


def _cells(text: str) -> list[list[str]]:
    """The words of each row, without spaces around them; empty lines at the end do not count."""
    rows: list[list[str]] = []
    try:
        for line in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")):
            rows.append([word.strip() for word in line])
    except csv.Error as error:
        raise ScheduleFileError(len(rows) + 1, 1, f"this is not CSV: {error}", [*rows, [""]]) from None
    while rows and rows[-1] in ([], [""]):
        rows.pop()
    if not rows:
        raise ScheduleFileError(1, 1, "there is nothing in it; a schedule has a row a rank", [[""]])
    return rows


def _parse_cell(word: str) -> list[Action]:
    """The actions of a cell: none if it is empty, several if they run as one."""
    if not word:
        return []
    if not word.startswith("("):
        return [_parse_action(word)]
    inner, _, name = word[1:].partition(")")
    parts = [_parse_action(part.strip()) for part in inner.split(";")]
    if name != OVERLAP or len(parts) < 2:
        raise _Wrong(f"actions that run as one are written like (0F7;7B3){OVERLAP}")
    return [part._replace(overlaps_next=i < len(parts) - 1) for i, part in enumerate(parts)]


def _parse_action(word: str) -> Action:
    match = CELL.fullmatch(word)
    if not match or match[2] not in KINDS:
        raise _Wrong("a cell is a stage, a kind of action and a microbatch, like 2F0; kinds are " + ", ".join(KINDS))
    kind = KINDS[match[2]]
    if (kind in OF_A_STAGE) == bool(match[3]):
        raise _Wrong(f"{match[2]} is about {'a stage, and has no' if kind in OF_A_STAGE else 'a'} microbatch")
    return Action(kind, int(match[1]), int(match[3]) if match[3] else None)


def _check_ranks(order: Sequence[Sequence[Action]]) -> None:
    """Every rank has something to do; a stage is on one rank; a pass is done once, and after what it needs of its own
    stage; stages count from 0."""
    homes: dict[int, tuple[int, int]] = {}  # where a stage is first seen: (rank, place)
    done: set[tuple[str, int, int | None]] = set()
    for rank, actions in enumerate(order):
        if not actions:
            raise _WrongAt(rank, 0, f"rank {rank} has nothing to do")
        for place, action in enumerate(actions):
            home = homes.setdefault(action.stage, (rank, place))[0]
            if home != rank:
                raise _WrongAt(rank, place, f"stage {action.stage} is on rank {home} already")
            if action.kind in NEEDS:
                if reason := _out_of_turn(action, done):
                    raise _WrongAt(rank, place, reason)
                done.add(action[:3])
    for before, stage in pairwise([-1, *sorted(homes)]):
        if stage != before + 1:
            raise _WrongAt(*homes[stage], f"stages count from 0, and there is no stage {before + 1}")


def _out_of_turn(action: Action, done: set[tuple[str, int, int | None]]) -> str:
    """Why a pass cannot come after those that are done, in words; empty when it can."""
    kind, stage, microbatch, _ = action
    if (kind, stage, microbatch) in done:
        return "the same stands before it already"
    if kind == "backward_weight" and ("backward", stage, microbatch) in done:
        return "B is the whole backward, and W its second half. Its first half is I (older files have B for it)"
    if kind in EXCLUDES and (EXCLUDES[kind], stage, microbatch) in done:
        return f"the backward is whole (B) or in halves (I, W), and {LETTERS[EXCLUDES[kind]]} stands before it already"
    if NEEDS[kind] and (NEEDS[kind], stage, microbatch) not in done:
        return f"{stage}{LETTERS[NEEDS[kind]]}{microbatch} must stand before it, in the same row"
    return ""


def _check_messages(order: Sequence[Sequence[Action]]) -> None:
    """A message goes to, or comes from, a neighbouring stage on another rank."""
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    for rank, actions in enumerate(order):
        for place, (kind, stage, *_) in enumerate(actions):
            if kind in MESSAGES:
                other = other_end(kind, stage)
                if other not in rank_of:
                    raise _WrongAt(rank, place, f"there is no stage {other} at the other end")
                if rank_of[other] == rank:
                    raise _WrongAt(rank, place, f"stage {other}, at the other end, is on the same rank")


def _check_completeness(order: Sequence[Sequence[Action]]) -> None:
    """Microbatches count from 0; a stage has those of the stage before it or, where another pipeline begins, none of
    them; and none is left half done."""
    homes: dict[int, tuple[int, int]] = {}
    last: dict[int, dict[int, tuple[int, int, str]]] = {}  # stage, microbatch -> where its last pass is, and its kind
    for rank, actions in enumerate(order):
        for place, action in enumerate(actions):
            homes.setdefault(action.stage, (rank, place))
            if action.kind in NEEDS:
                last.setdefault(action.stage, {})[action.microbatch] = (rank, place, action.kind)
    has_backward = any(kind != "forward" for of_stage in last.values() for *_, kind in of_stage.values())
    for stage in sorted(homes):
        mine, before = last.get(stage, {}), last.get(stage - 1, {})
        odd = sorted(mine.keys() ^ before.keys()) if mine.keys() & before.keys() or not mine else []
        for microbatch in odd:
            if microbatch in before:
                raise _WrongAt(
                    *homes[stage], f"stage {stage} lacks microbatch {microbatch}, which stage {stage - 1} has"
                )
            raise _WrongAt(*mine[microbatch][:2], f"stage {stage - 1} lacks this microbatch")
        for rank, place, kind in mine.values():
            if has_backward and kind in UNFINISHED:
                raise _WrongAt(rank, place, UNFINISHED[kind])
    numbers = {m: place for of_stage in last.values() for m, (*place, _) in of_stage.items()}
    for before, microbatch in pairwise([-1, *sorted(numbers)]):
        if microbatch != before + 1:
            raise _WrongAt(*numbers[microbatch], f"microbatches count from 0, and there is no microbatch {before + 1}")
