"""A plan and a machine's nodes -> which ranks do not lie alike, though they do the same.

A message or a collective costs what the tiers cost that it crosses (`engine.cost.collectives`). Most groups along an
axis lie on nodes alike; those of a degree that divides no node do not, nor do neighbours round a ring of several nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.cost.machine import EVERYBODY, Machine
from engine.graph.roles import said_of
from engine.plan import FLAT, Mesh, Plan


def apart(plan: Plan, machine: Machine) -> list[np.ndarray]:
    """Columns with a number for each rank: where all are equal ranks lie alike. Columns that tell none apart are left
    out."""
    reaches = [reach for reach, _ in machine.tiers if reach != EVERYBODY and reach < plan.world_size]
    if not reaches or machine.local is not None:
        return []
    said = {one for program in plan.programs for one in said_of(program.ops) if plan.mesh.has(one.axis)}
    columns = []
    for axis in sorted({one.axis for one in said}):
        members = _groups(plan.mesh, axis)
        hops = sorted({one.peer for one in said if one.ring and one.axis == axis})
        for reach in reaches:
            for kinds in _kinds(members // reach, hops):
                column = np.empty(plan.world_size, dtype=np.int64)
                column[members] = kinds
                columns.append(column)
    return columns


def _groups(mesh: Mesh, axis: str) -> np.ndarray:
    """The groups along an axis, a row each, of ranks in rising order."""
    along = [mesh.axes.index(each) for each in FLAT.get(axis, (axis,)) if each in mesh.axes]
    ranks = np.arange(mesh.size).reshape(mesh.degrees)
    return np.moveaxis(ranks, along, range(-len(along), 0)).reshape(-1, mesh.degree(axis))


def _kinds(nodes: np.ndarray, hops: list[int]) -> Iterator[np.ndarray]:
    """Of groups whose members are on these nodes, how they lie; and of each member, whether it is a hop from there to
    another node."""
    pattern = nodes - nodes[:, :1]
    if (pattern != pattern[0]).any():
        yield np.unique(pattern, axis=0, return_inverse=True)[1].reshape(-1, 1)
    for hop in hops:
        far = nodes != np.roll(nodes, -hop, axis=1)
        if far.any() and not far.all():
            yield far
