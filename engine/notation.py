"""A Plan <-> its text: one line an op, so that plans can be written by hand, printed and compared line by line.

    mesh pp=2
    layers fc1 fc2
    role 0: ranks 0 holds 0 memory parameters=400 gradients=400
    forward s0 m0 fc1 flops=12 bytes=3 saved=3
    send activation s0 m0 pp>1 bytes=4096 async
    role 1: ranks 1 holds 1
    recv activation s1 m0 pp<0 bytes=4096
    all_reduce gradient dp "second bucket" bytes=400 async

An op is its kind, then in any order: what moves, `s` stage, `m` microbatch, the axis (`pp>1`: to coordinate 1 on it,
`pp<1`: from there), the part, sizes that are not 0, and `async`. A word that could be mistaken, or has spaces, stands
in quotes, as in JSON. Ranks are ranges, `0-6:2` for every second. Empty lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from engine.plan import AXES, COLLECTIVES, KINDS, PAYLOADS, Mesh, Op, Plan, Program
from engine.spec import closest

SIZES = ("flops", "bytes", "saved")
TOKEN = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*")+')  # a word, of which pieces may be quoted
PLAIN = re.compile(r"[A-Za-z_][\w.\-]*")  # a part that needs no quotes, unless it is a word with a meaning
NUMBERED = re.compile(r"([sm])(\d+)")
PEER = re.compile(r"(\w+)([<>])(\d+)")
RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


class NotationError(ValueError):
    """A text that is not a plan: says the line, what is wrong with it, and what would be right."""

    def __init__(self, line: int, text: str, reason: str):
        self.line, self.text, self.reason = line, text, reason
        super().__init__(f"line {line}: {reason}: {text.strip()}")


class _Wrong(Exception):
    """What is wrong with a line, before it is known which line that is."""


def format_plan(plan: Plan) -> str:
    """The text of a plan; `parse_plan` gives the plan back, equal."""
    degrees = (f"{axis}={n}" for axis, n in zip(plan.mesh.axes, plan.mesh.degrees, strict=True))
    lines = [" ".join(["mesh", *degrees])]
    lines += [" ".join(["layers", *map(_name, plan.layers)])] if plan.layers else []
    for role, program in enumerate(plan.programs):
        lines.append(_format_role(role, program, [rank for rank, played in enumerate(plan.roles) if played == role]))
        lines += map(format_op, program.ops)
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> Plan:
    """The plan that a text stands for. Raises NotationError; whether the plan can run is asked in `engine.matching`."""
    mesh, layers, roles = None, None, []
    for number, line in enumerate(text.splitlines(), 1):
        first, *words = TOKEN.findall(line) or [""]
        if not first or first.startswith("#"):
            continue
        try:
            if first == "mesh":
                _once(mesh, "mesh")
                mesh = _parse_mesh(words)
            elif first == "layers":
                _once(layers, "layers")
                layers = tuple(map(_unquoted, words))
            elif first == "role":
                roles.append((*_parse_role(len(roles), words), []))
            elif not roles:
                raise _Wrong("an op stands below the line of its role, `role 0: ranks 0`")
            else:
                roles[-1][-1].append(parse_op(line))
        except _Wrong as wrong:
            raise NotationError(number, line, str(wrong)) from None
    programs = tuple(Program(tuple(ops), holds, memory) for _, holds, memory, ops in roles)
    played = {rank: role for role, (ranks, *_) in enumerate(roles) for rank in ranks}

'''
