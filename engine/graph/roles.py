"""A Plan -> the same with roles split until all ranks of a role talk to the same roles: what is true of one is of all.

Partition refinement, on a mesh made small first: where two coordinates on an axis have the same roles throughout, and
no op names a peer there, one stands for both; along a ring only where all are alike. So 16,384 ranks that play 16
roles are refined as 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.graph.columns import Ops
from engine.plan import FLAT, Mesh, Op, Plan


def uniform(plan: Plan, apart: Sequence[int] | None = None) -> Plan:
    """Mostly `plan` itself. Ranks of one role that name a peer also share their coordinate on its axis, unless they
    count from there, round a ring.

    `apart`: a number for each rank; ranks with different ones never share a role, though they do the same.
    """
    if not plan.roles:
        return plan
    program = np.array(plan.roles, dtype=np.int64)
    role = program if apart is None else numbered(program, np.asarray(apart))
    talks = [sorted(said_of(p.ops), key=str) for p in plan.programs]
    said = {one for of_role in talks for one in of_role}
    named = {one.axis for one in said if one.peer is not None and (not one.ring or one.axis in FLAT)}
    mesh, corner, of_rank = _small(plan.mesh, role, named, {one.axis for one in said if one.ring})
    small, program = role[corner], program[corner]
    axes = {one.axis for one in said}
    count = int(role.max()) + 1
    while count < len(small):
        small = _split(small, program, talks, mesh, axes)
        if small.max() + 1 == count:
            break
        count = int(small.max()) + 1
    if count == len(plan.programs):
        return plan
    role = small[of_rank]
    names, first_rank, role = np.unique(role, return_index=True, return_inverse=True)
    order = np.argsort(first_rank)
    number = np.empty(len(names), dtype=np.int64)
    number[order] = np.arange(len(names))
    programs = tuple(plan.programs[plan.roles[rank]] for rank in first_rank[order].tolist())
    return replace(plan, programs=programs, roles=tuple(number[role].tolist()))


class Said(NamedTuple):
    """With whom a rank talks: with all of its group along an axis, or with one of them (`Op`)."""

    axis: str
    peer: int | None
    ring: bool


def said_of(ops: Sequence[Op]) -> set[Said]:
    return {Said(op.axis, op.peer, op.ring) for op in Ops.of(ops).templates if op.axis}


def group_of(mesh: Mesh, rank: int, axis: str) -> Sequence[int]:
    """The ranks of a rank's group along an axis, in rising order."""
    if axis in FLAT:
        return mesh.group(rank, axis)
    stride, degree = mesh.stride(axis), mesh.degree(axis)
    lowest = rank - rank // stride % degree * stride
    return range(lowest, lowest + degree * stride, stride)


def _small(mesh: Mesh, role: np.ndarray, named: set[str], rings: set[str]) -> tuple[Mesh, np.ndarray, np.ndarray]:
    """(the mesh without coordinates like others, a rank of each of its cells, the cell of each rank)"""
    fixed = {each for axis in named for each in FLAT.get(axis, (axis,))}
    grid = role.reshape(mesh.degrees)
    ranks, cells, degrees = np.arange(mesh.size).reshape(mesh.degrees), [], []
    for i, (axis, degree) in enumerate(zip(mesh.axes, mesh.degrees, strict=True)):
        if axis in fixed:
            first, cell = np.arange(degree), np.arange(degree)
        else:
            slices = np.moveaxis(grid, i, 0).reshape(degree, -1)
            if (slices == slices[0]).all():  # mostly; and quicker to see than to sort
                first, cell = np.zeros(1, dtype=np.int64), np.zeros(degree, dtype=np.int64)
            elif axis in rings:
                first, cell = np.arange(degree), np.arange(degree)
            else:
                first, cell = np.unique(slices, axis=0, return_index=True, return_inverse=True)[1:]
        grid, ranks = grid.take(first, axis=i), ranks.take(first, axis=i)
        cells.append(cell.reshape(-1))
        degrees.append(len(first))
    numbers = np.arange(ranks.size).reshape(ranks.shape)
    return Mesh(mesh.axes, tuple(degrees)), ranks.reshape(-1), numbers[np.ix_(*cells)].reshape(-1)


def numbered(*columns: np.ndarray) -> np.ndarray:
    """Equal numbers, from 0, where all columns are equal."""
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


def _split(role: np.ndarray, program: np.ndarray, talks: list, mesh: Mesh, axes: set[str]) -> np.ndarray:
    """Roles split once, by the roles that their ranks talk to."""
    groups = {axis: _group_kinds(role, mesh, axis) for axis in axes}
    out, count = np.empty_like(role), 0
    by_role = np.argsort(role, kind="stable")
    for ranks in np.split(by_role, np.flatnonzero(np.diff(role[by_role])) + 1):
        if len(ranks) == 1:
            out[ranks], count = count, count + 1
            continue
        seen = [np.zeros(len(ranks), dtype=np.int64)]
        for axis, peer, ring in talks[program[ranks[0]]]:
            if peer is None:
                seen.append(groups[axis][ranks])
                continue
            place = mesh.coordinate(ranks, axis)
            if ring:
                seen.append(role[mesh.peer(ranks, axis, (place + peer) % mesh.degree(axis))])
            else:
                seen += [place, role[mesh.peer(ranks, axis, peer)]]
        kind = numbered(*seen)
        out[ranks] = count + kind
        count += int(kind.max()) + 1
    return out


def _group_kinds(role: np.ndarray, mesh: Mesh, axis: str) -> np.ndarray:
    """For every rank a number that is equal where the groups along an axis have the same roles in them.

    How many ranks play each does not matter: a group waits for the last of them.
    """
    by_group = np.lexsort((role, mesh.peer(np.arange(len(role)), axis, 0)))
    roles = role[by_group].reshape(-1, mesh.degree(axis))
    roles[:, 1:][roles[:, 1:] == roles[:, :-1]] = -1
    _, kind = np.unique(np.sort(roles, axis=1), axis=0, return_inverse=True)
    out = np.empty_like(role)
    out[by_group] = np.repeat(kind.reshape(-1), mesh.degree(axis))
    return out
