"""A plan and its text are the same thing, whatever the parts are called; a slip of the pen is named with its line."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine import modes
from engine.graph.notation import NotationError, format_op, format_plan, parse_plan
from engine.job import prepare
from engine.plan import AXES, KINDS, PAYLOADS, Mesh, Op, Plan, Program
from engine.spec import Spec

BY_HAND = """
# Two stages, one microbatch.
mesh pp=2
layers fc1 "fc 2"

role 0: ranks 0 holds 0 memory parameters=400 gradients=400
  load batch bytes=64
  forward s0 m0 fc1 flops=12 bytes=3 saved=5
  send activation s0 m0 pp>1 bytes=4096 async
role 1: ranks 1 holds 1
  recv s1 m0 pp<0 bytes=4096 activation
  forward s1 "fc 2" m0
"""


def test_a_plan_written_by_hand_is_read_as_meant():
    first = (
        Op(kind="load", payload="batch", bytes=64),
        Op(kind="forward", stage=0, microbatch=0, part="fc1", flops=12, bytes=3, saved=5),
        Op(
            kind="send",
            stage=0,
            microbatch=0,
            payload="activation",
            axis="pp",
            peer=1,
            bytes=4096,
            asynchronous=True,
        ),
    )
    second = (
        Op(kind="recv", stage=1, microbatch=0, payload="activation", axis="pp", peer=0, bytes=4096),
        Op(kind="forward", stage=1, microbatch=0, part="fc 2"),
    )
    programs = (Program(first, (0,), {"parameters": 400, "gradients": 400}), Program(second, (1,)))
    assert parse_plan(BY_HAND) == Plan(Mesh(("pp",), (2,)), programs, (0, 1), ("fc1", "fc 2"))


def test_an_op_is_one_short_line():
    collective = Op(kind="all_reduce", payload="gradient", axis="dp", part="bucket0", bytes=400, asynchronous=True)
    assert format_op(collective) == "all_reduce gradient dp bucket0 bytes=400 async"
    recv = Op(kind="recv", stage=0, microbatch=1, payload="gradient", axis="pp", peer=1, bytes=4096)
    assert format_op(recv) == "recv gradient s0 m1 pp<1 bytes=4096"
    assert format_op(Op(kind="forward", part="output gradients")) == 'forward "output gradients"'
    assert format_op(Op(kind="send", axis="cp", peer=1, ring=True, bytes=8)) == "send cp>+1 bytes=8"
    assert format_op(Op(kind="recv", axis="cp", peer=-1, ring=True)) == "recv cp<-1"


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "single", "devices": 1},
        {"mode": "data_parallel", "devices": 4},
        {"mode": "ddp", "devices": 4, "model": "mlp", "layers": 3},
        {"mode": "zero1", "devices": 4},
        {"mode": "fsdp", "devices": 3, "global_batch": 48},
        {"mode": "hsdp", "devices": 8},
        {"mode": "layer_split", "devices": 3},
        {"mode": "tensor", "devices": 2, "model": "mlp", "layers": 3},
        {"mode": "sequence", "devices": 4, "model": "gpt"},
        {"mode": "context", "devices": 4, "model": "gpt"},
        {"mode": "expert", "devices": 4, "model": "moe"},
        {"mode": "pipeline", "devices": 4, "schedule": "gpipe", "microbatches": 8},
        {"mode": "pipeline", "devices": 4, "schedule": "1f1b", "microbatches": 8},
    ],
    ids=lambda settings: f"{settings['mode']}-{settings.get('schedule', '')}",
)
def test_the_plan_of_every_mode_comes_back_equal(settings, step):
    plan = modes.plan(prepare(Spec(**settings)), step)
    read = parse_plan(format_plan(plan))
    assert read == plan
    assert plan == read


def test_a_plan_that_differs_in_one_byte_is_not_equal():
    plan = parse_plan(BY_HAND)
    one_more = parse_plan(BY_HAND.replace("bytes=64", "bytes=65"))
    assert one_more != plan
    assert [a == b for a, b in zip(plan.programs, one_more.programs, strict=True)] == [False, True]


# Parts that could be taken for something else, and what a name can do to a line.
PARTS = ["gradient", "dp", "async", "s0", "m-1", "s07", "pp>1", "pp<0", "bytes=3", "a b", " ", '"', "\\", "#x", "1st"]
PARTS += [
    "a\nb",
    "a\tb",
    "a\u2028b",
    "\x0c",
    "层 1",
    "层1",
    "é",
    "x.weight",
    "all_reduce",
    "forward",
    '"quoted"',
    "0-3",
]


def test_ops_with_any_values_come_back_equal():
    """Every field, drawn at random from all that it can be, with parts that look like other fields."""
    draw = random.Random(0)
    for _ in range(2000):
        kind, axis = draw.choice(KINDS), draw.choice(("", *AXES))
        op = Op(
            kind=kind,
            stage=draw.choice((None, 0, 3, 1000)),
            microbatch=draw.choice((None, 0, 7, 65_535)),
            part=draw.choice(("", "bucket0", *PARTS)),
            payload=draw.choice(("", *PAYLOADS)),
            axis=axis,
            peer=(peer := draw.choice((None, 0, 2, -1, 3)) if axis else None),
            ring=peer is not None and (peer < 0 or draw.random() < 0.5),
            asynchronous=draw.random() < 0.5,
            bytes=draw.choice((0, 1, 10**15)),
            flops=draw.choice((0, 10**18 - 1)),
            saved=draw.choice((0, 12)),
        )
        plan = Plan(Mesh(), (Program((op,)),), (0,))
        assert parse_plan(format_plan(plan)).programs[0].ops == (op,), format_op(op)


@pytest.mark.parametrize("part", PARTS)
def test_layers_and_memory_may_have_any_name(part):
    plan = Plan(Mesh(), (Program((), (0,), {part: 3, "b": 0}),), (0,), (part, "b", part))
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize(
    ("roles", "ranks"),
    [
        ((0, 0, 0, 0), ["ranks 0-3"]),
        ((0, 1, 0, 1, 0, 1), ["ranks 0-4:2", "ranks 1-5:2"]),
        ((0, 0, 1, 1), ["ranks 0,1", "ranks 2,3"]),
        ((0, 1, 1, 1, 0, 1, 0, 0), ["ranks 0,4,6,7", "ranks 1-3,5"]),
        ((1, 0), ["ranks 1", "ranks 0"]),
    ],
)
def test_ranks_are_written_as_ranges(roles, ranks):
    programs = tuple(Program((Op(kind="load", bytes=role),)) for role in range(max(roles) + 1))
    plan = Plan(Mesh(("dp",), (len(roles),)), programs, roles)
    text = format_plan(plan)
    assert [line.split(": ")[1] for line in text.splitlines() if line.startswith("role")] == ranks
    assert parse_plan(text) == plan


def test_sixteen_thousand_ranks_of_two_roles_are_two_short_lines():
    roles = tuple(rank // 16 % 2 for rank in range(16_384))
    plan = Plan(Mesh(("dp", "pp", "tp"), (512, 2, 16)), (Program(()), Program(())), roles)
    assert parse_plan(format_plan(plan)) == plan


def test_holds_keep_their_order():
    plan = Plan(Mesh(), (Program((), (5, 3, 1, 0, 2, 4, 9)),), (0,))
    assert parse_plan(format_plan(plan)) == plan


HEAD = "mesh dp=2\nrole 0: ranks 0-1\n"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "begins with its mesh"),
        ("role 0: ranks 0\n", 1, "begins with its mesh"),
        ("mesh dp=2\nmesh dp=2", 2, "one mesh"),
        ("mesh dp=0", 1, "not an axis with its degree"),
        ("mesh dp=two", 1, "not an axis with its degree"),
        ("mesh xx=2", 1, "not an axis with its degree"),
        ("mesh dp=2 dp=2", 1, "at most once"),
        ("mesh dp=999999 pp=999999", 1, "at most 1000000 ranks"),
        ("mesh dp=1\nlayers a\nlayers b", 3, "one line of layers"),
        ("mesh dp=2\nforward", 2, "below the line of its role"),
        ("mesh dp=2\nrole 1: ranks 0-1", 2, "`role 0:`"),
        ("mesh dp=2\nrole 0: ranks 0-1\nrole 1: ranks 1", 3, "rank 1 plays role 0 already"),
        ("# a comment\nmesh dp=4\nrole 0: ranks 0-1", 2, "not so: 2,3"),
        ("mesh dp=2\nrole 0: ranks 0-2", 1, "not so: 2"),
        ("mesh dp=2\nrole 0: ranks 1-0", 2, "must rise"),
        ("mesh dp=2\nrole 0: ranks 0-4:0", 2, "must rise"),
        ("mesh dp=2\nrole 0: ranks x", 2, "x is not a number or a range"),
        ("mesh dp=2\nrole 0: 0-1", 2, "before any of `ranks`"),
        ("mesh dp=2\nrole 0: ranks 0-1 memory parameters=-4", 2, "-4 stands where a whole number"),
        (HEAD + "\n\nfoward s0", 5, "no kind of op called foward; try forward"),
        (HEAD + "forward s0 s1", 3, "s1 gives the stage a second time"),
        (HEAD + "forward fc1 fc2", 3, "fc2 gives the part a second time"),
        (HEAD + "forward s-1", 3, "-1 stands where a whole number"),
        (HEAD + "send dp<1", 3, "else `pp>1`"),
        (HEAD + "recv dp>1", 3, "`pp<1` where something is received"),
        (HEAD + "send xx>1", 3, "not an axis and a peer"),
        (HEAD + "send pp>+", 3, "nothing stands where a whole number must"),
        ("mesh pp=2\ntokens a b", 2, "a name for each coordinate on the axis cp"),
        ("mesh cp=2\ntokens a", 2, "a name for each coordinate on the axis cp"),
        (HEAD + "send dp>one", 3, "one stands where a whole number"),
        (HEAD + "load bytes=-1", 3, "-1 stands where a whole number"),
        (HEAD + "load bytes=nan", 3, "nan stands where a whole number"),
        (HEAD + "load bytes=1.5", 3, "1.5 stands where a whole number"),
        (HEAD + "load bytes=", 3, "nothing stands where a whole number"),
        (HEAD + "load bytes=" + "9" * 5000, 3, "18 digits"),
        (HEAD + "load size=3", 3, "size=3 is nothing that an op has"),
        (HEAD + 'load "open', 3, "a quote is not closed"),
        (HEAD + 'load "a\\q"', 3, "not a quoted text as in JSON"),
        (HEAD + 'load "a"b', 3, "not a quoted text as in JSON"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_line(text, line, reason):
    with pytest.raises(NotationError) as refusal:
        parse_plan(text)
    assert refusal.value.line == line
    assert reason in str(refusal.value)
    assert str(refusal.value).startswith(f"line {line}, `")


@pytest.mark.parametrize("wrong", [{"kind": "think"}, {"payload": "coffee"}, {"axis": "zz"}])
def test_names_that_a_plan_cannot_have_are_not_written(wrong):
    op = replace(Op(kind="send", axis="dp", payload="gradient"), **wrong)
    with pytest.raises(ValueError, match=next(iter(wrong.values()))):
        format_op(op)
