"""Where devices stand: in order, apart from each other, with their layers in them."""

import math
import re

import pytest

from engine import modes
from engine.asking.settings import DATA_MODES
from engine.plan import Mesh, Op, Plan, Program
from tests.viz.examples import TWO, predicted
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.figures.places import BELOW, GAP, MARGIN, MAX_BOXES, OUTSIDE, drawn, places, segment
from viz.locales import text
from viz.theme import FROZEN, stage_colour

EN = text("en")


def test_pipeline_stages_stand_left_to_right_in_one_row():
    plan, layers, _ = predicted("pipeline", 4)
    where = places(plan, [layer.name for layer in layers])
    assert [box.centre[0] for box in where.boxes] == [125, 375, 625, 875]
    assert len({box.y0 for box in where.boxes}) == 1
    assert where.links == ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_ranks_stand_side_by_side(devices):
    plan, layers, _ = predicted("tensor", devices, model="gpt")
    boxes = places(plan, [layer.name for layer in layers]).boxes
    assert [box.centre[0] for box in boxes] == [(i + 0.5) * 1000 / devices for i in range(devices)]
    assert len({box.y0 for box in boxes}) == 1


SEVERAL = {"model": "mlp", "layers": 7, "hidden": 16}


def test_a_pipeline_that_goes_round_stands_on_a_ring_and_a_v_in_a_row():
    plan, _, _ = predicted("pipeline", 4, schedule="interleaved_1f1b", **SEVERAL)
    corners = [box.centre for box in places(plan, ["a"]).boxes]
    assert corners[0][0] == corners[3][0] < corners[1][0] == corners[2][0]
    assert corners[0][1] == corners[1][1] > corners[3][1] == corners[2][1]
    plan, _, _ = predicted("pipeline", 4, schedule="zbv", **SEVERAL)
    assert len({box.y0 for box in places(plan, ["a"]).boxes}) == 1


@pytest.mark.parametrize(
    "mode, settings",
    [
        ("tensor", {"devices": 4}),
        ("sequence", {"devices": 4}),
        ("hybrid", {"devices": 8, "pp": 2, "fsdp": 2, "tp": 2}),
        ("hybrid", {"devices": 8, "fsdp": 4, "tp": 2}),
        ("fsdp", {"devices": 4}),
    ],
)
def test_what_a_device_holds_of_a_layer_is_as_wide_as_its_share_and_within_the_layer(mode, settings):
    plan, layers, _ = predicted(mode, **settings, model="gpt")
    for box in places(plan, [layer.name for layer in layers]).boxes:
        program = plan.program(box.rank)
        for layer, share in zip(program.holds, program.shares or (1.0,) * len(program.holds), strict=True):
            cell = box.cells[layer]
            assert cell.x0 - 1e-6 <= cell.kept[0] <= cell.kept[1] <= cell.x1 + 1e-6
            assert cell.kept[1] - cell.kept[0] == pytest.approx(share * (cell.x1 - cell.x0))


def test_an_owner_lights_only_what_it_updates():
    plan, layers, timeline = predicted("zero1", 2)
    payload = moving_picture(picture_info(plan, layers, timeline), EN)
    (owner, other), names = payload["boxes"], [layer.name for layer in layers]
    widths = [[x1 - x0 for x0, x1 in box["updated"]] for box in (owner, other)]
    # The largest parameter, the weight of fc1, is nearly the whole model: its owner gets nothing else.
    assert [name for name, width in zip(names, widths[0], strict=True) if width] == ["fc1"]
    assert widths[1][names.index("fc1")] < 2 < 50 < widths[1][names.index("conv2")]
    # Together they update every layer once, and nothing twice.
    assert [sum(pair) for pair in zip(*widths, strict=True)] == pytest.approx(
        [x1 - x0 for x0, x1, *_ in owner["cells"]], abs=0.3
    )
    # In DDP everybody updates everything.
    plan, layers, timeline = predicted("ddp", 2)
    box = moving_picture(picture_info(plan, layers, timeline), EN)["boxes"][1]
    assert box["updated"] == box["kept"] == [cell[:2] for cell in box["cells"]]


def test_a_frozen_layer_is_hatched_and_said_to_be_and_no_update_lights_it():
    plan, layers, timeline = predicted("ddp", 2, model="mlp", freeze="fc1,fc2")
    payload = moving_picture(picture_info(plan, layers, timeline), EN)
    trained = [name not in ("fc1", "fc2") for name in payload["boxes"][0]["layers"]]
    assert 0 < sum(trained) < len(trained)
    for box in payload["boxes"]:
        assert [x1 > x0 for x0, x1 in box["updated"]] == trained
        assert [x1 > x0 for x0, x1 in box["kept"]] == [True] * len(trained)
    shapes = payload["figure"]["layout"]["shapes"]
    assert [shape.get("fillcolor") for shape in shapes].count(FROZEN) == 4
    hatched = [shape["path"] for shape in shapes if shape["type"] == "path"]
    cell = picture_info(plan, layers, timeline).places.boxes[0].cells[0]
    ends = [float(number) for number in re.findall(r"[\d.]+", hatched[0])]
    assert len(hatched) == 4
    assert (min(ends[::2]), max(ends[::2])) == pytest.approx(cell.kept, abs=0.1)
    assert (min(ends[1::2]), max(ends[1::2])) == pytest.approx((cell.y0, cell.y1), abs=0.1)
    assert payload["caption"] == EN("figure.frozen")
    plan, layers, timeline = predicted("ddp", 2, model="mlp")
    payload = moving_picture(picture_info(plan, layers, timeline), EN)
    assert not [shape for shape in payload["figure"]["layout"]["shapes"] if shape["type"] == "path"]
    assert payload["caption"] == ""


@pytest.mark.parametrize(("mode", "devices"), [("context", 8), ("fsdp", 4), ("ddp", 16)])
def test_layers_of_a_gpt_have_room_for_their_names_in_several_rows(mode, devices):
    """Letters of 13 pixels; a name is left out of less than 12."""
    plan, layers, _ = predicted(mode, devices, model="gpt")
    cells = places(plan, [layer.name for layer in layers]).boxes[0].cells
    assert min(cell.y1 - cell.y0 for cell in cells) > 12


def test_a_device_with_several_stages_shows_which_layers_are_whose():
    plan, layers, _ = predicted("pipeline", 4, schedule="zbv", **SEVERAL)
    info = picture_info(plan, layers, *(predicted("pipeline", 4, schedule="zbv", **SEVERAL)[2:]))
    assert [box.stages for box in info.places.boxes] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [cell.stage for cell in info.places.boxes[1].cells] == [-1, 1, -1, -1, -1, -1, 6, -1]
    payload = moving_picture(info, EN)
    assert [box["titles"][0] for box in payload["boxes"]][::3] == ["rank 0 · stages 0, 7", "rank 3 · stages 3, 4"]
    assert payload["boxes"][1]["held"] == [0, 2, 0, 0, 0, 0, 7, 0]
    drawn = next(trace for trace in payload["figure"]["data"] if trace.get("name") == "later stages")
    ops = [bar.span for bar in info.rows.bars if bar.computes and bar.span.kind in ("forward", "backward_input")]
    # Each of 4 ranks does each of its passes for as many microbatches at its first stage as at its second.
    assert drawn["x"].count(None) == len(info.later_stages)
    for kind in ("forward", "backward_input"):
        of = [bar for bar in info.later_stages if bar.span.kind == kind]
        assert 2 * len(of) == sum(span.kind == kind for span in ops) > 0
        assert {bar.span.stage for bar in of} == {4, 5, 6, 7}
    assert payload["caption"] == EN("figure.later_stages")
    filled = [shape.get("fillcolor") for shape in payload["figure"]["layout"]["shapes"]]
    assert filled.count(stage_colour(0)) == 2 * filled.count(stage_colour(2))  # 0 and 6 share a colour, 2 has its own


@pytest.mark.parametrize("devices", [3, 4, 5, 6, 8, 12, 16])
def test_replicas_stand_in_a_ring_so_that_neighbours_are_side_by_side(devices):
    plan, _, _ = predicted("ddp", devices)
    where = places(plan, ["a"])
    assert where.links == tuple(sorted((i, (i + 1) % devices) for i in range(devices)))
    column = 1000 / math.ceil((devices + 1) / 2) if devices % 2 else 2000 / devices
    for a, b in where.links:
        (ax, ay), (bx, by) = where.boxes[a].centre, where.boxes[b].centre
        assert abs(ax - bx) <= column + 1e-6
        assert abs(ay - by) <= where.boxes[0].y1 - where.boxes[0].y0 + GAP


def test_the_device_that_all_goes_through_stands_above_the_others():
    plan, _, _ = predicted("data_parallel", 4)
    where = places(plan, ["a"])
    assert where.boxes[0].y0 > where.boxes[1].y1
    assert len({box.y0 for box in where.boxes[1:]}) == 1
    assert where.boxes[0].centre[0] == where.boxes[2].centre[0]
    assert where.links == ((0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0))


def test_stages_in_columns_and_their_replicas_in_rows():
    op = Op(kind="forward", stage=0)
    plan = Plan(Mesh(("pp", "dp"), (2, 2)), (Program((op,)),), (0,) * 4)
    corners = [box.centre for box in places(plan, ["a"]).boxes]
    assert corners[0][0] == corners[1][0] < corners[2][0] == corners[3][0]
    assert corners[0][1] == corners[2][1] > corners[1][1] == corners[3][1]


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        (m, n)
        for m in modes.MODES
        for n in range(1, 17)
        if (m != "single" or n == 1) and (m not in ("tensor", "sequence") or 48 % n == 0)  # 48 divides the vocabulary
    ],
)
def test_boxes_lie_apart_and_on_the_stage(mode, devices):
    settings = {"model": "mlp", "layers": 16, "microbatches": 32} if mode == "pipeline" else {}
    settings |= {"model": "mlp", "layers": 16} if mode == "layer_split" else {}
    if mode in ("tensor", "sequence"):
        settings = {"model": "gpt", "hidden": devices * 8, "heads": devices, "context": devices * 2}
    if mode == "context":
        settings = {"model": "gpt", "context": devices * 2}
    if mode == "expert":
        settings = {"model": "moe", "experts": devices, "top_k": 1}
    if mode in (*DATA_MODES, "hybrid"):
        settings["global_batch"] = devices * 4
    plan, layers, _ = predicted(mode, devices, **settings)
    where = places(plan, [layer.name for layer in layers])
    below = MARGIN if len({box.y0 for box in where.boxes}) > 1 else BELOW
    for i, a in enumerate(where.boxes):
        assert 0 <= a.x0 < a.x1 <= 1000
        assert below <= a.y0 < a.y1 <= where.height - MARGIN + 1e-6
        assert all(a.x0 <= c.x0 < c.x1 <= a.x1 and a.y0 <= c.y0 < c.y1 <= a.y1 for c in a.cells)
        for b in where.boxes[i + 1 :]:
            assert a.x1 < b.x0 or b.x1 < a.x0 or a.y1 < b.y0 or b.y1 < a.y0


def test_of_many_devices_the_first_are_drawn_and_the_rest_counted():
    plan, layers, timeline = predicted("ddp", 60)
    info = picture_info(plan, layers, timeline)
    assert [box.rank for box in info.places.boxes] == list(range(MAX_BOXES))
    assert (info.places.hidden, info.total) == (44, 60)
    assert {bar.span.rank for bar in info.rows.bars} == set(range(MAX_BOXES))
    assert moving_picture(info, EN)["caption"] == "16 of 60 devices are drawn."


def test_a_device_shows_which_layers_it_holds():
    plan, layers, _ = predicted("pipeline", 2, split=(3, 1))
    where = places(plan, [layer.name for layer in layers])
    assert [cell.held for cell in where.boxes[0].cells] == [True, True, True, False]
    assert [cell.held for cell in where.boxes[1].cells] == [False, False, False, True]
    assert [cell.name for cell in where.boxes[0].cells] == ["conv1", "conv2", "fc1", "fc2"]
    assert [box.stages for box in where.boxes] == [(0,), (1,)]


def test_a_device_tells_which_tokens_it_has():
    plan, layers, timeline = predicted("context", 4, model="gpt", context=64)
    boxes = moving_picture(picture_info(plan, layers, timeline), EN)["boxes"]
    assert [box["titles"][0] for box in boxes] == [
        "rank 0 · tokens 0:8 56:64", "rank 1 · tokens 8:16 48:56", "rank 2 · tokens 16:24 40:48",
        "rank 3 · tokens 24:40",
    ]  # fmt: skip


def test_shards_of_a_layer_lie_side_by_side_and_add_up_to_it():
    """Ten rows of the last layer on four ranks: three, three, three and one; other layers are cut evenly."""
    plan, layers, _ = predicted("fsdp", 4, model="mlp")
    cells = [box.cells for box in places(plan, [layer.name for layer in layers]).boxes]
    for i, shares in enumerate([(0.25,) * 4, (0.25,) * 4, (0.3, 0.3, 0.3, 0.1)]):
        end = 0.0
        for rank, share in enumerate(shares):
            cell = cells[rank][i]
            left, right = ((x - cell.x0) / (cell.x1 - cell.x0) for x in cell.kept)
            assert (left, right) == pytest.approx((end, end + share))
            end = right
        assert end == pytest.approx(1.0)


def test_three_rows_on_four_ranks_leave_the_last_one_hollow():
    """torch.chunk gives 1, 1, 1 and 0 rows of the hidden layers, and of the last one's ten 3, 3, 3 and 1."""
    plan, layers, timeline = predicted("fsdp", 4, model="mlp", hidden=3)
    info = picture_info(plan, layers, timeline)
    cells = [box.cells for box in info.places.boxes]
    for i, layer in enumerate(layers[:-1]):
        assert [cells[rank][i].held for rank in range(4)] == [True, True, True, False], layer.name
        parts = [[(x - c.x0) / (c.x1 - c.x0) for x in c.kept] for c in (cells[rank][i] for rank in range(4))]
        assert parts[:3] == [pytest.approx([rank / 3, (rank + 1) / 3]) for rank in range(3)]
        assert parts[3][0] == parts[3][1]
    assert [cells[rank][-1].held for rank in range(4)] == [True] * 4
    drawn = [s for s in moving_picture(info, EN)["figure"]["layout"]["shapes"] if s.get("fillcolor") == stage_colour(0)]
    assert len(drawn) == 3 * (len(layers) - 1) + 4


@pytest.mark.parametrize("devices", [2, 4])
def test_experts_have_a_cell_beside_the_rest_of_their_block_and_each_device_a_run_of_them(devices):
    plan, layers, timeline = predicted("expert", devices, model="moe", layers=1)
    info = picture_info(plan, layers, timeline)
    for rank, box in enumerate(info.places.boxes):
        assert [cell.name for cell in box.cells] == ["embed", "block1", "block1.experts", "head"]
        _, block, experts, _ = box.cells
        assert block.kept == (block.x0, block.x1) and block.x1 < experts.x0
        each = 8 // devices
        assert experts.experts == (rank * each, (rank + 1) * each, 8)
        part = [(x - experts.x0) / (experts.x1 - experts.x0) for x in experts.kept]
        assert part == pytest.approx([rank / devices, (rank + 1) / devices])
    payload = moving_picture(info, EN)
    lit = {(payload["strings"][w], c) for w, c in zip(payload["spans"]["words"], payload["spans"]["cell"], strict=True)}
    assert ("forward · block1.experts", 2) in lit and ("forward · block1.attention", 1) in lit
    assert payload["boxes"][1]["titles"][0] == {2: "rank 1 · experts 4–7", 4: "rank 1 · experts 2–3"}[devices]
    assert payload["boxes"][1]["layers"] == ["embed", "block1", "", "head"]


def test_shards_of_experts_lie_side_by_side_in_their_run_and_those_of_the_rest_in_theirs():
    plan, layers, timeline = predicted("hybrid", 4, model="moe", layers=1, fsdp=2, ep=2)
    cells = [box.cells for box in picture_info(plan, layers, timeline).places.boxes]
    for rank, (shard, place) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):  # its coordinates on fsdp and ep
        rest, experts = [[(x - c.x0) / (c.x1 - c.x0) for x in c.kept] for c in cells[rank][1:3]]
        assert rest == pytest.approx([shard / 2, (shard + 1) / 2])
        assert experts == pytest.approx([place / 2 + shard / 4, place / 2 + (shard + 1) / 4])


def test_tensor_ranks_have_parts_of_the_same_experts_and_of_the_rest():
    plan, layers, timeline = predicted("hybrid", 4, model="moe", layers=1, ep=2, tp=2)
    info = picture_info(plan, layers, timeline)
    assert len(info.places.frames) == 2
    for box, (place, part) in zip(info.places.boxes, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):  # on ep and tp
        rest, experts = [[(x - c.x0) / (c.x1 - c.x0) for x in c.kept] for c in box.cells[1:3]]
        assert box.cells[2].experts == (place * 4, place * 4 + 4, 8)
        assert rest == pytest.approx([part / 2, (part + 1) / 2])
        assert experts == pytest.approx([place / 2 + part / 4, place / 2 + (part + 1) / 4])
    spans = [span for span in timeline.spans() if span.rank == 3 and span.part.startswith("block1.")]
    assert {span.lane for span in spans if span.kind == "all_to_all"} == {"ep"}
    assert {span.part for span in spans if span.lane == "tp"} == {
        f"block1.{p}" for p in ("attention", "combine", "router")
    }


def test_tensor_ranks_that_have_experts_whole_have_others_each():
    plan, layers, timeline = predicted("hybrid", 4, model="moe", layers=1, ep=2, tp=2, expert_tp=1)
    info = picture_info(plan, layers, timeline)
    for rank, box in enumerate(info.places.boxes):
        rest, experts = [[(x - c.x0) / (c.x1 - c.x0) for x in c.kept] for c in box.cells[1:3]]
        assert box.cells[2].experts == (rank * 2, rank * 2 + 2, 8)
        assert rest == pytest.approx([rank % 2 / 2, (rank % 2 + 1) / 2])
        assert experts == pytest.approx([rank / 4, (rank + 1) / 4])
    assert {span.lane for span in timeline.spans() if span.kind == "all_to_all"} == {"ep_tp"}
    assert set(info.places.links) >= {(0, 1), (1, 2), (2, 3), (3, 0)}  # one ring for tokens


def test_a_layer_that_is_whole_fills_its_cell_and_one_that_is_absent_none_of_it():
    first, second = places(TWO, ["a", "b"]).boxes[0].cells
    assert first.kept == (first.x0, first.x1)
    assert second.kept == (second.x0, second.x0)


def test_replicas_stand_below_each_other_and_their_shards_in_columns():
    plan, layers, _ = predicted("hsdp", 8)
    boxes = places(plan, [layer.name for layer in layers]).boxes
    assert len({box.y0 for box in boxes[:4]}) == len({box.y0 for box in boxes[4:]}) == 1
    assert boxes[0].y0 > boxes[4].y0
    assert [box.x0 for box in boxes[:4]] == [box.x0 for box in boxes[4:]]


def test_a_hundred_layers_share_cells_without_losing_one():
    plan = Plan(Mesh(("dp",), (1,)), (Program((), (99,)),), (0,))
    cells = places(plan, [f"l{i}" for i in range(100)]).boxes[0].cells
    assert [c.layers[0] for c in cells[1:]] == [c.layers[1] for c in cells[:-1]]
    assert (cells[0].layers[0], cells[-1].layers[1]) == (0, 100)
    assert [c.held for c in cells] == [False] * (len(cells) - 1) + [True]


def test_memory_is_what_the_plan_keeps_unless_it_is_given():
    assert [box.memory for box in places(TWO, []).boxes] == [30, 60]
    assert [box.memory for box in places(TWO, [], [5, 7]).boxes] == [5, 7]


def test_a_link_runs_from_border_to_border_and_each_direction_has_its_side():
    plan, _, _ = predicted("layer_split", 2)
    where = places(plan, ["a"])
    left, right = where.boxes
    x0, y0, x1, y1 = segment(where, 0, 1)
    assert (x0, x1) == (left.x1, right.x0)
    assert y0 == y1 > left.centre[1]
    assert segment(where, 1, 0)[1] < left.centre[1]
    assert segment(where, OUTSIDE, 0)[3] == left.y1


def test_of_a_large_mesh_a_small_one_is_drawn_with_stages_before_all_else():
    def shown(**degrees: int) -> tuple[int, ...]:
        mesh = Mesh(tuple(degrees), tuple(degrees.values()))
        ops = [Op(kind="all_reduce", axis=axis) for axis in degrees]
        return drawn(Plan(mesh, (Program(tuple(ops)),), (0,) * mesh.size))

    assert shown(pp=16, dp=128, tp=8) == tuple(range(0, 16_384, 1024))
    assert shown(pp=4, dp=8, tp=8) == tuple(64 * s + 8 * d + t for s in range(4) for d in range(2) for t in range(2))
    assert shown(dp=128, tp=8) == tuple(range(16))
    assert shown(dp=128, fsdp=16) == tuple(16 * d + i for d in range(2) for i in range(8))
    assert shown(pp=3, dp=32) == tuple(32 * stage + i for stage in range(3) for i in range(5))
    assert shown(fsdp=1000) == tuple(range(16))
    assert shown(pp=2, dp=2, tp=4) == tuple(range(16))


def test_of_more_stages_than_there_is_room_for_the_first_are_drawn_without_a_link_to_the_rest():
    plan, layers, timeline = predicted("pipeline", 20, model="mlp", layers=20, microbatches=32)
    info = picture_info(plan, layers, timeline)
    assert [box.rank for box in info.places.boxes] == list(range(16))
    assert max(rank for link in info.places.links for rank in link) == 15
    assert moving_picture(info, EN)["caption"] == "16 of 20 devices are drawn."


def test_packets_between_the_drawn_ranks_of_a_large_mesh_end_at_their_boxes():
    plan, layers, timeline = predicted(
        "hybrid",
        64,
        model="gpt",
        layers=6,
        hidden=64,
        heads=8,
        context=32,
        pp=4,
        dp=4,
        tp=4,
        global_batch=32,
        microbatches=8,
    )
    info = picture_info(plan, layers, timeline)
    ranks = [box.rank for box in info.places.boxes]
    assert ranks == [16 * s + 4 * d + t for s in range(4) for d in range(2) for t in range(2)]
    assert len({box.x0 for box in info.places.boxes}) == 8  # stages and in them tensor ranks, left to right
    assert {row.rank for row in info.rows.rows} == set(ranks)
    ends = {rank for flight in info.flights for leg in flight.path for rank in leg} - {OUTSIDE}
    assert ends == set(ranks)
    moving_picture(info, EN)
    assert len(info.places.frames) == 8  # one round the tensor ranks of each stage and replica
