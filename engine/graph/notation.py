"""A Plan <-> its text: one line an op, so that plans can be written by hand, printed, and compared line by line.

    mesh pp=2
    layers fc1 fc2
    role 0: ranks 0 holds 0 memory parameters=400 gradients=400
    forward s0 m0 fc1 flops=12 bytes=3 saved=3
    send activation s0 m0 pp>1 bytes=4096 async
    role 1: ranks 1 holds 1
    recv activation s1 m0 pp<0 bytes=4096
    forward s1 m0 "fc2 and loss"

An op is its kind, and then in any order: what moves, `s` stage, `m` microbatch, the mesh axis (`pp>1`: to coordinate 1
on it, `pp<1`: from there; round a ring `cp>+1`: to the next one), its part, sizes that are not 0, and `async`. A part
that has spaces, or could be taken for one of the others, stands in quotes, as in JSON. Ranks may be ranges: `0-6:2` is
every second one up to 6. Lines that are empty or begin with # are skipped. `tokens`, beside `layers`, are what ranks
load of a sequence, one name for each coordinate on the axis cp.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from engine.asking.rules import closest
from engine.plan import AXES, FLAT, KINDS, PAYLOADS, Mesh, Op, Plan, Program

SIZES = ("flops", "bytes", "saved")
LISTS = ("layers", "tokens")
SHARE = re.compile(r"\d(\.\d+)?(e-\d+)?")
TOKEN = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*")+')  # up to the next space that is not in quotes
PLAIN = re.compile(r"[^\W\d][\w.\-]*")  # what needs no quotes, unless it means something else
WHOLE = re.compile(r"[0-9]{1,18}")  # what fits in the 64 bits of a column
NUMBERED = re.compile(r"[sm]-?\d+")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
MAX_RANKS = 1_000_000  # of a hand-written range: more is a slip of the pen


class NotationError(ValueError):
    """A text that is not a plan: the line, what is wrong with it, and what would be right."""

    def __init__(self, line: int, text: str, reason: str):
        self.line, self.text, self.reason = line, text, reason
        super().__init__(f"line {line}, `{text.strip()}`: {reason}")


def format_plan(plan: Plan) -> str:
    """The text of a plan; `parse_plan` makes an equal plan of it."""
    degrees = [f"{axis}={degree}" for axis, degree in zip(plan.mesh.axes, plan.mesh.degrees, strict=True)]
    lines = [" ".join(["mesh", *degrees])]
    lines += [" ".join([word, *map(_name, names)]) for word in LISTS if (names := getattr(plan, word))]
    ranks: list[list[int]] = [[] for _ in plan.programs]
    for rank, role in enumerate(plan.roles):
        ranks[role].append(rank)
    for role, program in enumerate(plan.programs):
        words = [f"role {role}:"]
        words += ["ranks", _ranges(ranks[role])] if ranks[role] else []
        words += ["holds", _ranges(program.holds)] if program.holds else []
        words += ["stages", _ranges(program.stages)] if program.stages else []
        words += ["memory", *(f"{_name(k)}={v}" for k, v in program.memory.items())] if program.memory else []
        words += ["shares", *map(repr, program.shares)] if program.shares else []
        words += ["updates", *map(repr, program.updates)] if program.updates else []
        lines.append(" ".join(words))
        lines += map(format_op, program.ops)
    return "\n".join(lines) + "\n"


def format_op(op: Op) -> str:
    """`send activation s0 m1 pp>1 bytes=4096 async`. ValueError for a name that a plan cannot have."""
    for name, known in ((op.kind, KINDS), (op.payload, ("", *PAYLOADS)), (op.axis, ("", *AXES, *FLAT))):
        if name not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}")
    words = [op.kind]
    words += [op.payload] if op.payload else []
    words += [f"s{op.stage}"] if op.stage is not None else []
    words += [f"m{op.microbatch}"] if op.microbatch is not None else []
    if op.axis:
        arrow = "" if op.peer is None else f"{'<' if op.kind == 'recv' else '>'}{op.peer:{'+' if op.ring else ''}}"
        words.append(op.axis + arrow)
    words += [_name(op.part)] if op.part else []
    words += [f"{size}={getattr(op, size)}" for size in SIZES if getattr(op, size)]
    words += ["async"] if op.asynchronous else []
    return " ".join(words)


def parse_plan(text: str) -> Plan:
    """The plan that a text stands for, or NotationError. Whether it can run is asked of `engine.graph.matching`."""
    mesh, lists, played = None, {}, {}
    roles: list[tuple[list[Op], tuple[int, ...], dict[str, int], tuple[int, ...]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            words = _words(line)
            if not words:
                continue
            if words[0] == "mesh" and mesh is None:
                mesh, mesh_line = _parse_mesh(words[1:]), number
            elif mesh is None:
                raise _Wrong("a plan begins with its mesh, as in `mesh pp=2`")
            elif words[0] == "mesh":
                raise _Wrong("a plan has one mesh")
            elif words[0] in LISTS and words[0] in lists:
                raise _Wrong(f"a plan has one line of {words[0]}")
            elif words[0] in LISTS:
                lists[words[0]] = tuple(map(_unquoted, words[1:]))
                if words[0] == "tokens" and (not mesh.has("cp") or len(words) - 1 != mesh.degree("cp")):
                    raise _Wrong("`tokens` has a name for each coordinate on the axis cp")
            elif words[0] == "role":
                ranks, *rest = _parse_role(words[1:], len(roles))
                if again := sorted(played.keys() & set(ranks)):
                    raise _Wrong(f"rank {again[0]} plays role {played[again[0]]} already")
                played |= dict.fromkeys(ranks, len(roles))
                roles.append(([], rest))
            elif not roles:
                raise _Wrong("an op stands below the line of its role, as in `role 0: ranks 0`")
            else:
                roles[-1][0].append(_parse_op(words))
        except _Wrong as wrong:
            raise NotationError(number, line, str(wrong)) from None
    if mesh is None:
        raise NotationError(1, "", "a plan begins with its mesh, as in `mesh pp=2`")
    if sorted(played) != list(range(mesh.size)):
        odd = _ranges(sorted(set(range(mesh.size)) ^ played.keys()))
        raise NotationError(
            mesh_line,
            text.split("\n")[mesh_line - 1],
            f"each rank of the mesh plays one role, and no other does; not so: {odd}",
        )
    programs = tuple(Program(tuple(ops), *rest) for ops, rest in roles)
    return Plan(mesh, programs, tuple(played[rank] for rank in range(mesh.size)), **lists)


class _Wrong(Exception):
    """What is wrong with a line, for the caller who knows which line it is."""


def _words(line: str) -> list[str]:
    if line.lstrip().startswith("#"):
        return []
    if TOKEN.sub("", line).strip():
        raise _Wrong("a quote is not closed")
    return TOKEN.findall(line)


def _parse_mesh(words: list[str]) -> Mesh:
    degrees: dict[str, int] = {}
    for word in words:
        axis, _, degree = word.partition("=")
        if axis not in AXES or axis in degrees or not WHOLE.fullmatch(degree) or int(degree) < 1:
            raise _Wrong(f"{word} is not an axis with its degree: `pp=2`, each of {', '.join(AXES)} at most once")
        degrees[axis] = int(degree)
    if math.prod(degrees.values()) > MAX_RANKS:
        raise _Wrong(f"a mesh has at most {MAX_RANKS} ranks")
    return Mesh(tuple(degrees), tuple(degrees.values()))


def _parse_role(words: list[str], number: int) -> tuple:
    """(ranks, holds, memory, shares, stages, updates) of `0: ranks 0-3 holds 0,1 stages 0,7 memory a=400 shares 0.5 1
    updates 0.0 1.0`"""
    if words[:1] != [f"{number}:"]:
        raise _Wrong(f"roles are numbered in order, this one is `role {number}:`")
    ranks, holds, stages, memory, shares, updates, place = [], (), (), {}, (), (), ""
    for word in words[1:]:
        if word in ("ranks", "holds", "stages", "memory", "shares", "updates"):
            place = word
        elif place == "ranks":
            ranks += _parse_ranges(word)
        elif place == "holds":
            holds += tuple(_parse_ranges(word))
        elif place == "stages":
            stages += tuple(_parse_ranges(word))
        elif place == "memory":
            name, _, size = word.rpartition("=")
            memory[_unquoted(name)] = _whole(size)
        elif place == "shares":
            shares += (_share(word),)
        elif place == "updates":
            updates += (0.0 if word == "0.0" else _share(word),)
        else:
            raise _Wrong(f"{word} stands before any of `ranks`, `holds`, `stages`, `memory`, `shares` and `updates`")
    if stages and len(stages) != len(holds):
        raise _Wrong(
            f"`stages` has one stage for each of the {len(holds)} layers that the role holds, not {len(stages)}"
        )
    if shares and len(shares) != len(holds):
        raise _Wrong(f"{len(holds)} layers are held, and {len(shares)} shares given")
    if updates and len(updates) != len(holds):
        raise _Wrong(f"{len(holds)} layers are held, and {len(updates)} updates given")
    return ranks, holds, memory, shares, stages, updates


def _share(word: str) -> float:
    if SHARE.fullmatch(word) and 0 < float(word) <= 1:
        return float(word)
    raise _Wrong(f"{word} is not a share: the part of a layer that is held, above 0 and up to 1")


def _parse_op(words: list[str]) -> Op:
    kind = words[0]
    if kind not in KINDS:
        near = closest(kind, KINDS)
        raise _Wrong(f"there is no kind of op called {kind}" + (f"; try {', '.join(near)}" if near else ""))
    given: dict[str, object] = {}
    for word in words[1:]:
        for name, value in _parse_word(word, kind).items():
            if name in given:
                raise _Wrong(f"{word} gives the {name} a second time; a part that looks like it needs quotes")
            given[name] = value
    return Op(kind=kind, **given)


def _parse_word(word: str, kind: str) -> dict[str, object]:
    """The fields of an op that one word of its line stands for."""
    if word.startswith('"'):
        return {"part": _unquoted(word)}
    if word == "async":
        return {"asynchronous": True}
    if word in PAYLOADS:
        return {"payload": word}
    if word in (*AXES, *FLAT):
        return {"axis": word}
    if NUMBERED.fullmatch(word):
        return {"stage" if word[0] == "s" else "microbatch": _whole(word[1:])}
    axis, arrow, peer = re.fullmatch(r"(\w*)([<>]?)(.*)", word, re.DOTALL).groups()
    if arrow:
        if axis not in AXES or (arrow == "<") != (kind == "recv"):
            raise _Wrong(f"{word} is not an axis and a peer: `pp<1` where something is received, else `pp>1`")
        ring = peer[:1] in ("+", "-")
        return {"axis": axis, "peer": int(f"{peer[0]}{_whole(peer[1:])}") if ring else _whole(peer), "ring": ring}
    size, equals, value = word.partition("=")
    if equals and size in SIZES:
        return {size: _whole(value)}
    if PLAIN.fullmatch(word):
        return {"part": word}
    raise _Wrong(f"{word} is nothing that an op has; a part like it needs quotes")


def _whole(text: str) -> int:
    if not WHOLE.fullmatch(text):
        raise _Wrong(f"{text or 'nothing'} stands where a whole number must, from 0 to 18 digits long")
    return int(text)


def _name(text: str) -> str:
    """As it is where that cannot be mistaken, else in quotes."""
    taken = text == "async" or text in PAYLOADS or text in (*AXES, *FLAT) or NUMBERED.fullmatch(text)
    return text if PLAIN.fullmatch(text) and not taken else json.dumps(text, ensure_ascii=False)


def _unquoted(word: str) -> str:
    if '"' not in word:
        return word
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        raise _Wrong(f"{word} is not a quoted text as in JSON") from None


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,8-12:2`: numbers in order, three or more that rise in equal steps as a range."""
    out, i = [], 0
    steps = [b - a for a, b in pairwise(numbers)]
    while i < len(numbers):
        end = i + 1
        while end < len(numbers) and steps[end - 1] == steps[i]:
            end += 1
        if end - i >= 3 and steps[i] > 0:
            out.append(f"{numbers[i]}-{numbers[end - 1]}" + (f":{steps[i]}" if steps[i] > 1 else ""))
        else:
            end = i + 1
            out.append(str(numbers[i]))
        i = end
    return ",".join(out)


def _parse_ranges(text: str) -> Iterable[int]:
    for piece in text.split(","):
        match = RANGE.fullmatch(piece)
        if not match:
            raise _Wrong(f"{piece or 'nothing'} is not a number or a range like 0-3 or 0-6:2")
        first, last, step = (int(group) if group else None for group in match.groups())
        last = first if last is None else last
        if last < first or last - first > MAX_RANKS or step == 0:
            raise _Wrong(f"the range {piece} must rise, in steps of 1 or more")
        yield from range(first, last + 1, step or 1)
