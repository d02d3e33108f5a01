"""A Plan -> where its devices stand: boxes with the model's layers in them, and the links that packets run along.

Coordinates are pixels on a stage that is `WIDTH` wide at full width: narrower pages squeeze x, never y.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import networkx as nx

from engine.graph.columns import Ops
from engine.plan import Mesh, Plan

WIDTH = 1000
MAX_BOXES = 16
DRAWN_FIRST = ("pp", "tp", "cp", "ep", "fsdp", "dp")  # axes of a mesh that has not room for all of its ranks
MAX_COLUMNS = 8
MAX_CELLS = 24
OUTSIDE = -1  # where a batch comes from
NOT_HELD = -1  # instead of a stage

BOX_WIDTHS, BOX_SHARE = (56, 250), 0.64  # narrowest and widest; part of a column that its box takes
MARGIN, GAP = 44, 58  # above all boxes, and below several rows, where batches enter; between two rows of boxes
BELOW = 16  # a single row
TITLE, FOOT, PAD = 34, 26, 10  # inside a box: above the cells, below them, at their sides
CELL_HEIGHTS, MAX_COLUMN = (
    (16, 26),
    8,
)  # room for a name; of cells stacked in a column; more than these stand in one row
FRAME = 9  # between boxes and the frame round them
LANE = 7  # how far each direction of a link lies from the middle


class Cell(NamedTuple):
    """One layer of the model in one device, or a few where there are many: those from `layers[0]` up to `layers[1]`.

    `stage`: of the layers that the device holds of it; -1 when it holds none.
    """

    layers: tuple[int, int]
    name: str  # of a block's experts, where they have a cell of their own: block1.experts
    stage: int
    x0: float
    x1: float
    y0: float
    y1: float
    kept: tuple[float, float]  # from x to x: the part of the cell that stands for what the device holds of it
    updated: tuple[float, float]  # likewise: what its optimizer updates
    experts: tuple[int, int, int] = (0, 0, 0)  # those held, from the first up to the second, of how many
    frozen: bool = False  # it is not trained

    @property
    def held(self) -> bool:
        return self.stage >= 0


class Box(NamedTuple):
    """One device. `memory`: bytes that it is planned to hold; `loads`: what it has of each sample, if not all."""

    rank: int
    stages: tuple[int, ...]
    memory: int
    x0: float
    x1: float
    y0: float
    y1: float
    cells: tuple[Cell, ...]
    loads: str = ""

    @property
    def centre(self) -> tuple[float, float]:
        return (self.x0 + self.x1) / 2, (self.y0 + self.y1) / 2


class Places(NamedTuple):
    """`boxes` of the ranks that are drawn; `hidden`: how many are not. y counts upwards from 0 to `height`."""

    boxes: tuple[Box, ...]
    hidden: int
    height: float
    links: tuple[tuple[int, int], ...]  # pairs of drawn ranks between which something can move
    frames: tuple[tuple[float, float, float, float], ...] = ()  # x0, x1, y0, y1: round ranks that share one frame

    def of(self, rank: int) -> Box:
        return next(box for box in self.boxes if box.rank == rank)


def places(
    plan: Plan,
    layers: Sequence[str],
    memory: Sequence[int] | None = None,
    experts: Sequence[int] = (),
    frozen: Collection[int] = (),
) -> Places:
    """`memory`: bytes of each rank; without it, what the plan says stays in memory for the whole step. `experts`: how
    many each layer has. `frozen`: places of the layers that are not trained."""
    ranks = drawn(plan)
    graph = device_graph(plan, ranks)
    spots = grid(graph)
    columns = 1 + max(column for column, _ in spots.values())
    rows = 1 + math.floor(max(row for _, row in spots.values()))
    num_cells = min(len(layers), MAX_CELLS)
    stacked = num_cells <= MAX_COLUMN and (rows == 1 or num_cells <= MAX_COLUMN - 2)
    zone = num_cells * min(CELL_HEIGHTS[1], max(CELL_HEIGHTS[0], 150 / rows / max(num_cells, 1))) if stacked else 30
    high = TITLE + zone + FOOT
    pitch = WIDTH / columns
    wide = min(BOX_WIDTHS[1], max(BOX_WIDTHS[0], BOX_SHARE * pitch))
    below = MARGIN if rows > 1 else BELOW
    height = MARGIN + rows * high + (rows - 1) * GAP + below
    boxes, expert_axis = [], _expert_axis(plan)
    for rank in ranks:
        column, row = spots[rank]
        x, y = (column + 0.5) * pitch, height - MARGIN - row * (high + GAP) - high
        program = plan.program(rank)
        ops = Ops.of(program.ops).templates
        stages = sorted({op.stage for op in ops if op.stage is not None})
        loads = next((op.part for op in ops if op.kind == "load"), "")
        held = sum(program.memory.values()) if memory is None else memory[rank]
        inner = (x - wide / 2 + PAD, x + wide / 2 - PAD, y + FOOT, y + FOOT + zone)
        stage_of = dict.fromkeys(program.holds, stages[0] if stages else 0)
        stage_of |= zip(program.holds, program.stages, strict=False)
        updated = _updated(plan, rank) | dict.fromkeys(frozen, (0.0, 0.0))
        cells = _cells(layers, stage_of, _held(plan, rank), updated, frozen, inner, stacked)
        if stacked and expert_axis:
            cells = _with_experts(cells, experts, plan.mesh, rank, expert_axis)
        boxes.append(Box(rank, tuple(stages), held, x - wide / 2, x + wide / 2, y, y + high, cells, loads))
    hidden, links = plan.world_size - len(ranks), tuple(sorted(graph.edges))
    return Places(tuple(boxes), hidden, height, links, _frames(plan, boxes))


def drawn(plan: Plan) -> tuple[int, ...]:
    """The ranks that have a box: all, or those of a mesh as small as there is room for, with stages before all else."""
    mesh, room, shown = plan.mesh, MAX_BOXES, {}
    if plan.world_size <= MAX_BOXES or mesh.size != plan.world_size:
        return tuple(range(min(plan.world_size, MAX_BOXES)))
    across, columns = _across(mesh), MAX_COLUMNS
    for axis in sorted(mesh.axes, key=DRAWN_FIRST.index):
        most = max(1, columns) if axis in across and axis != "pp" else room
        shown[axis] = min(mesh.degree(axis), most, room)
        room //= shown[axis]
        columns //= shown[axis] if axis in across else 1
    places = itertools.product(*(range(shown[axis]) for axis in mesh.axes))
    return tuple(sum(i * mesh.stride(axis) for i, axis in zip(at, mesh.axes, strict=True)) for at in places)


def _frames(plan: Plan, boxes: Sequence[Box]) -> tuple[tuple[float, float, float, float], ...]:
    """Round the tensor ranks of each group, where there are several: they hold one shard of everything together."""
    if not 1 < plan.mesh.degree("tp") < plan.world_size:
        return ()
    box_of = {box.rank: box for box in boxes}
    groups = dict.fromkeys(plan.mesh.group(rank, "tp") for rank in box_of)
    drawn = [[box_of[rank] for rank in group if rank in box_of] for group in groups]
    return tuple(
        (
            min(box.x0 for box in of) - FRAME,
            max(box.x1 for box in of) + FRAME,
            min(box.y0 for box in of) - FRAME,
            max(box.y1 for box in of) + FRAME,
        )
        for of in drawn
        if len({box.y0 for box in of}) == 1
    )


def device_graph(plan: Plan, ranks: Sequence[int]) -> nx.DiGraph:
    """Some ranks, with an edge wherever something can move, and `column` and `row` of each.

    Pipeline stages stand left to right, unless some are linked past others: then on a ring, as replicas do, neighbours
    side by side. Tensor ranks stand left to right. Where everything comes from one device (nn.DataParallel), that one
    stands above the others.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(ranks)
    kinds: dict[str, set[str]] = {}
    for rank in ranks:
        for op in Ops.of(plan.program(rank).ops).templates:
            if not op.axis:
                continue
            kinds.setdefault(op.axis, set()).add(op.kind)
            peer = plan.peer_rank(rank, op)
            if peer is not None and peer in graph:
                graph.add_edge(*((rank, peer) if op.kind == "send" else (peer, rank)))
    rooted = False
    for axis, of in kinds.items():
        if of <= {"send", "recv"}:
            continue
        for rank in ranks:
            group = [other for other in plan.mesh.group(rank, axis) if other in graph]
            if is_rooted(of):
                rooted = True
                graph.add_edges_from((a, b) for m in group[1:] for a, b in ((group[0], m), (m, group[0])))
            elif len(group) > 1:
                graph.add_edges_from(zip(group, group[1:] + group[:1], strict=True))
    graph.graph["lines"] = "row" if rooted and len(ranks) > 2 else "column"
    order = {rank: i for i, rank in enumerate(ranks)}
    in_line = plan.mesh.degree("pp") > 1 and all(abs(order[a] - order[b]) == 1 for a, b in graph.edges)
    for rank, (column, row) in _spots(plan, ranks, rooted, in_line).items():
        graph.nodes[rank].update(column=column, row=row)
    return graph


def is_rooted(kinds: set[str]) -> bool:
    """Whether collectives go from one device to the others and back, rather than round a ring."""
    return bool(kinds & {"scatter", "gather", "reduce"})


def _spots(plan: Plan, ranks: Sequence[int], rooted: bool, in_line: bool) -> dict[int, tuple[int, int]]:
    """(column, row) of each rank, counted within its column or row. `in_line`: stages have links to neighbours only."""
    drawn, head = len(ranks), list(enumerate(ranks))
    if rooted and drawn > 2:
        lines = math.ceil((drawn - 1) / 8)
        per_line = math.ceil((drawn - 1) / lines)
        return {ranks[0]: (0, 0)} | {rank: ((i - 1) % per_line, 1 + (i - 1) // per_line) for i, rank in head[1:]}
    if across := _across(plan.mesh):
        places = [tuple(plan.mesh.coordinate(rank, axis) for axis in across) for rank in ranks]
        columns = {place: column for column, place in enumerate(sorted(set(places)))}
        if len(columns) <= MAX_COLUMNS:
            return {ranks[i]: (columns[place], places[:i].count(place)) for i, place in enumerate(places)}
    if drawn <= (8 if in_line or plan.mesh.degree("tp") > 1 else 2):
        return {rank: (i, 0) for i, rank in head}
    # Out along the top and back along the bottom; an odd one stands alone in the first column.
    odd, columns = drawn % 2, math.ceil(drawn / 2)
    return {rank: (i, 0) if i < columns else (drawn - 1 - i + odd, 1) for i, rank in head}


def _across(mesh: Mesh) -> list[str]:
    """Of a mesh of several axes, those that run from left to right. Stages do, and in them tensor ranks and
    those that share experts out; replicas stand below each other, and so do shards, unless they are shared out within
    replicas."""
    axes = [axis for axis in mesh.axes if mesh.degree(axis) > 1]
    shards = "dp" in axes and "pp" not in axes
    return [axis for axis in axes if axis in ("pp", "ep", "tp") or (axis == "fsdp" and shards)] if len(axes) > 1 else []


def grid(graph: nx.DiGraph) -> dict[int, tuple[float, float]]:
    """(column, row) of each device, from 0: what is shorter than the rest stands in the middle, so fractions occur."""
    key, other = ("row", "column") if graph.graph["lines"] == "row" else ("column", "row")
    lines: dict[int, list[int]] = {}
    for rank in sorted(graph, key=lambda n: (graph.nodes[n][key], graph.nodes[n][other])):
        lines.setdefault(graph.nodes[rank][key], []).append(rank)
    spots = nx.multipartite_layout(graph, subset_key=lines, align="horizontal" if key == "row" else "vertical")
    # networkx puts neighbours 1 apart, then scales all to one size.
    xs, ys = ([spot[i] for spot in spots.values()] for i in (0, 1))
    most = max(len(lines), *(len(members) for members in lines.values())) - 1
    unit = max(max(xs) - min(xs), max(ys) - min(ys)) / most if most else 1.0
    return {n: (round((x - min(xs)) / unit, 6), round((y - min(ys)) / unit, 6)) for n, (x, y) in sorted(spots.items())}


def _held(plan: Plan, rank: int) -> dict[int, tuple[float, float]]:
    """Of each layer that a rank holds some of, the part of it, from 0 to 1: shards lie side by side in their group.

    A layer is cut for tensor ranks first, and what each of these has of it is sharded further; some it leaves whole.
    Where a part of the layer is on every rank, such as a GPT's positions, shards overlap by as much.
    """
    program, mesh = plan.program(rank), plan.mesh
    if not program.shares:
        return dict.fromkeys(program.holds, (0.0, 1.0))

    def members(of: int, axis: str) -> tuple[int, ...]:
        return mesh.group(of, axis) if axis in mesh.axes else (of,)

    def shares(ranks: Iterable[int]) -> dict[int, float]:
        total: dict[int, float] = {}
        for program in map(plan.program, ranks):
            for layer, share in zip(program.holds, program.shares or (1.0,) * len(program.holds), strict=True):
                total[layer] = total.get(layer, 0.0) + share
        return total

    shards, cut = members(rank, "fsdp"), members(rank, "tp")
    before, own = shares(shards[: shards.index(rank)]), shares(shards)
    left = shares(member for other in cut[: cut.index(rank)] for member in members(other, "fsdp"))
    of_all = shares(member for other in cut for member in members(other, "fsdp"))
    held = {}
    for layer, share in zip(program.holds, program.shares, strict=True):
        is_cut = own[layer] < 1 - 1e-9
        start = before.get(layer, 0.0) + (left.get(layer, 0.0) if is_cut else 0.0)
        total = (of_all if is_cut else own)[layer]
        if total > 1:
            start *= (1 - share) / (total - share)
        held[layer] = (start, min(1.0, start + share)) if share < 1.0 else (0.0, 1.0)
    return held


def _updated(plan: Plan, rank: int) -> dict[int, tuple[float, float]]:
    """Of each layer that a rank holds but does not update all of, the part that it does: owners stand side by side."""
    program, found = plan.program(rank), {}
    if program.updates:
        earlier = [plan.program(other).updates for other in plan.mesh.group(rank, "dp") if other < rank]
        for i, (layer, part) in enumerate(zip(program.holds, program.updates, strict=True)):
            start = sum(updates[i] for updates in earlier)
            found[layer] = (min(1.0, start), min(1.0, start + part))
    return found


def _cells(
    layers: Sequence[str],
    stage_of: dict[int, int],
    held: dict[int, tuple[float, float]],
    updated: dict[int, tuple[float, float]],
    frozen: Collection[int],
    inner: tuple,
    stacked: bool,
) -> tuple[Cell, ...]:
    """The model from first to last layer: top to bottom when stacked, else left to right.

    `stage_of`, `held`, `updated`: of each layer that the device holds, its stage, which part of it, and which part it
    updates where that is another.
    """
    x0, x1, y0, y1 = inner
    count, cells = min(len(layers), MAX_CELLS), []
    for i in range(count):
        first, end = i * len(layers) // count, (i + 1) * len(layers) // count
        parts = [held[layer] for layer in range(first, end) if layer in held]
        stage = next((stage_of[layer] for layer in range(first, end) if layer in stage_of), NOT_HELD)
        name = layers[first] if end == first + 1 else f"{layers[first]} – {layers[end - 1]}"
        if stacked:
            step = (y1 - y0) / count
            spot = (x0, x1, y1 - (i + 1) * step + 3, y1 - i * step)
        else:
            step = (x1 - x0) / count
            spot = (x0 + i * step, x0 + (i + 1) * step - min(3, step / 4), y0 + 4, y1)
        left, right = spot[:2]
        part = parts[0] if parts else (0.0, 0.0)
        spans = part, updated.get(next((layer for layer in range(first, end) if layer not in frozen), first), part)
        kept, new = ((left + (right - left) * a, left + (right - left) * b) for a, b in spans)
        still = all(layer in frozen for layer in range(first, end))
        cells.append(Cell((first, end), name, stage, *spot, kept, new, frozen=still))
    return tuple(cells)


def _expert_axis(plan: Plan) -> str:
    """The axis along which tokens travel to experts; none where they do not."""
    ops = (op for program in plan.programs for op in Ops.of(program.ops).templates)
    return next((op.axis for op in ops if op.kind == "all_to_all" and op.payload == "tokens"), "")


def _with_experts(cells: Sequence[Cell], experts: Sequence[int], mesh: Mesh, rank: int, axis: str) -> tuple[Cell, ...]:
    """Where experts are shared out over ranks, each block's have the right half of its cell: there, a run is held. Of
    both halves tensor ranks have as much as each other, unless each has experts of its own; and in each of these parts
    ranks on fsdp."""
    ranks, place = mesh.degree(axis), mesh.coordinate(rank, axis)

    def own(begin: float, end: float, *cut: str) -> tuple[float, float]:
        for each in (*cut, "fsdp"):
            part = (end - begin) / mesh.degree(each)
            begin += mesh.coordinate(rank, each) * part
            end = begin + part
        return begin, end

    of_experts = () if "tp" in axis else ("tp",)

    found: list[Cell] = []
    for cell in cells:
        count = experts[cell.layers[0]] if experts else 0
        if not count:
            found.append(cell)
            continue
        middle = (cell.x0 + cell.x1) / 2
        step, each = (cell.x1 - middle - 2) / count, count // ranks * cell.held
        right = own(middle + 2 + place * each * step, middle + 2 + (place + 1) * each * step, *of_experts)
        left = own(cell.x0, middle - 2, "tp") if cell.held else cell.kept
        found += [
            cell._replace(x1=middle - 2, kept=left, updated=left),
            cell._replace(
                name=f"{cell.name}.experts",
                x0=middle + 2,
                kept=right,
                updated=right,
                experts=(place * each, (place + 1) * each, count),
            ),
        ]
    return tuple(found)


def segment(places: Places, source: int, target: int) -> tuple[float, float, float, float]:
    """The way from one device to another, from border to border; each direction keeps to its own side."""
    box = places.of(target)
    x, y = box.centre
    if source == OUTSIDE:  # from above, or from below where boxes are above
        below = y < places.height / 2 and any(b.y0 > box.y1 and b.x0 < x < b.x1 for b in places.boxes)
        edge, far = (box.y0, box.y0 - MARGIN + 10) if below else (box.y1, box.y1 + MARGIN - 10)
        return x, far, x, edge
    other = places.of(source)
    (ax, ay), (bx, by) = other.centre, box.centre
    length = math.hypot(bx - ax, by - ay)
    ux, uy = (bx - ax) / length, (by - ay) / length
    dx, dy = LANE * -uy, LANE * ux  # to the left of the way: rightwards runs above, leftwards below
    half_x, half_y = (other.x1 - other.x0) / 2, (other.y1 - other.y0) / 2
    leave = min(half_x / abs(ux) if ux else math.inf, half_y / abs(uy) if uy else math.inf)
    return ax + ux * leave + dx, ay + uy * leave + dy, bx - ux * leave + dx, by - uy * leave + dy
