"""What the figures compute: exact values for small, empty, partial and odd timelines, and their size for large ones."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

import viz.figures
from engine import modes
from engine.cost.machine import machine
from engine.job import prepare
from engine.plan import Mesh, Op, Plan, Program
from engine.simulate import simulate
from engine.spec import Spec
from engine.timeline import Span, Timeline
from viz.figures import words
from viz.figures.compare import Pair, compare_info, plot_compare
from viz.figures.flights import Flight, bucket_of, flights, paths
from viz.figures.losses import POINTS, losses_info, plot_losses
from viz.figures.moving import WHOLE, moving_picture
from viz.figures.picture import picture_info, typical_step
from viz.figures.places import GAP, MARGIN, MAX_BOXES, OUTSIDE, places, segment
from viz.figures.rows import rows
from viz.figures.still import plot_picture
from viz.locales import text

EN, ZH = text("en"), text("zh")


def predicted(mode, devices, machine_name="local", **settings):
    settings.setdefault("global_batch", 240 if mode in ("ddp", "data_parallel") else 64)
    job = prepare(Spec(mode=mode, devices=devices, **settings))
    simulation = simulate(modes.plan(job), machine(machine_name))
    return simulation.plan, job.layers, simulation.timeline


def message(kind, rank, peer, start, end, *, lane="pp:0>1", microbatch=0, payload="activation", step=0):
    return Span(rank, lane, kind, step, start, end, rank, microbatch, "", payload, "pp", peer, 400)


def compute(kind, rank, start, end, *, microbatch=0, part="", step=0):
    return Span(rank, "compute", kind, step, start, end, 0, microbatch, part)


def all_reduce(rank, start, end, part="bucket0", step=0):
    return Span(rank, "dp", "all_reduce", step, start, end, -1, -1, part, "gradient", "dp", -1, 800)


TWO = Plan(Mesh(("pp",), (2,)), (Program((), (0,), {"parameters": 30}), Program((), (1,), {"parameters": 60})), (0, 1))
REPLICAS = Mesh(("dp",), (4,))


# --- where devices stand -----------------------------------------------------------------------------------------


def test_pipeline_stages_stand_left_to_right_in_one_row():
    plan, layers, _ = predicted("pipeline", 4)
    where = places(plan, [layer.name for layer in layers])
    assert [box.centre[0] for box in where.boxes] == [125, 375, 625, 875]
    assert len({box.y0 for box in where.boxes}) == 1
    assert where.links == ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))


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
    ("mode", "devices"), [(m, n) for m in modes.MODES for n in range(1, 17) if m != "single" or n == 1]
)
def test_boxes_lie_apart_and_on_the_stage(mode, devices):
    settings = {"model": "mlp", "layers": 16, "microbatches": 32} if mode == "pipeline" else {}
    settings |= {"model": "mlp", "layers": 16} if mode == "layer_split" else {}
    if mode in ("ddp", "data_parallel"):
        settings["global_batch"] = devices * 4
    plan, layers, _ = predicted(mode, devices, **settings)
    where = places(plan, [layer.name for layer in layers])
    for i, a in enumerate(where.boxes):
        assert 0 <= a.x0 < a.x1 <= 1000
        assert MARGIN <= a.y0 < a.y1 <= where.height - MARGIN + 1e-6
        assert all(a.x0 <= c.x0 < c.x1 <= a.x1 and a.y0 <= c.y0 < c.y1 <= a.y1 for c in a.cells)
        for b in where.boxes[i + 1 :]:
            assert a.x1 < b.x0 or b.x1 < a.x0 or a.y1 < b.y0 or b.y1 < a.y0


def test_of_many_devices_the_first_are_drawn_and_the_rest_counted():
    plan, layers, timeline = predicted("ddp", 60)
    info = picture_info(plan, layers, timeline)
    assert [box.rank for box in info.places.boxes] == list(range(MAX_BOXES))
    assert (info.places.hidden, info.total) == (44, 60)
    assert {bar.span.rank for bar in info.rows.bars} == set(range(MAX_BOXES))
    assert moving_picture(info, EN)["caption"] == "The first 16 of 60 devices are drawn."


def test_a_device_shows_which_layers_it_holds():
    plan, layers, _ = predicted("pipeline", 2, split=(3, 1))
    where = places(plan, [layer.name for layer in layers])
    assert [cell.held for cell in where.boxes[0].cells] == [True, True, True, False]
    assert [cell.held for cell in where.boxes[1].cells] == [False, False, False, True]
    assert [cell.name for cell in where.boxes[0].cells] == ["conv1", "conv2", "fc1", "fc2"]
    assert [box.stages for box in where.boxes] == [(0,), (1,)]


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


# --- what travels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_an_all_reduce_goes_round_the_ring_in_2n_minus_2_rounds(n):
    """Patarasuk & Yuan 2009: in every round each rank passes one piece on to its neighbour."""
    ways = paths("all_reduce", range(n), rooted=False)
    assert [len(way) for way in ways] == [2 * (n - 1)] * n
    for k in range(2 * (n - 1)):
        assert sorted(way[k] for way in ways) == [(i, (i + 1) % n) for i in range(n)]
    for way in ways:
        assert all(a[1] == b[0] for a, b in pairwise(way))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_half_an_all_reduce_takes_half_the_rounds(kind):
    assert [len(way) for way in paths(kind, range(4), rooted=False)] == [3] * 4


def test_rooted_collectives_go_straight_and_a_broadcast_goes_down_the_ring():
    assert paths("scatter", [0, 1, 2], rooted=True) == [((0, 1),), ((0, 2),)]
    assert paths("broadcast", [0, 1, 2], rooted=True) == [((0, 1),), ((0, 2),)]
    assert paths("gather", [0, 1, 2], rooted=True) == [((1, 0),), ((2, 0),)]
    assert paths("reduce", [0, 1, 2], rooted=True) == [((1, 0),), ((2, 0),)]
    assert paths("broadcast", [0, 1, 2], rooted=False) == [((0, 1), (1, 2))]


def test_one_rank_alone_sends_nothing():
    assert paths("all_reduce", [0], rooted=False) == []


def test_a_message_flies_from_the_start_of_its_send_to_the_end_of_its_receive():
    spans = [
        compute("forward", 0, 0.0, 1.0), compute("forward", 0, 1.0, 2.0, microbatch=1),
        message("send", 0, 1, 1.0, 3.0), message("recv", 1, 0, 2.0, 4.0),
        message("send", 0, 1, 3.0, 5.0, microbatch=1), message("recv", 1, 0, 4.0, 6.0, microbatch=1),
    ]  # fmt: skip
    assert flights(spans, TWO.mesh, 10.0) == (
        Flight(1.0, 4.0, "activation", 0, ((0, 1),)),
        Flight(3.0, 6.0, "activation", 1, ((0, 1),)),
    )


def test_a_message_whose_receive_was_never_recorded_flies_until_its_send_ends():
    spans = [compute("forward", 1, 0.0, 0.1), message("send", 0, 1, 1.0, 3.0)]
    assert flights(spans, TWO.mesh, 10.0) == (Flight(1.0, 3.0, "activation", -1, ((0, 1),)),)


def test_a_message_to_a_rank_that_is_not_drawn_is_left_out():
    assert flights([message("send", 0, 1, 1.0, 3.0)], TWO.mesh, 10.0) == ()


@pytest.mark.parametrize("at", [0.0, 5.0, 10.0])
def test_a_message_that_takes_no_time_is_still_seen_and_stays_on_the_clock(at):
    spans = [message("send", 0, 1, at, at), message("recv", 1, 0, at, at)]
    (flight,) = flights(spans, TWO.mesh, 10.0)
    assert flight.end - flight.start == pytest.approx(0.3)
    assert 0 <= flight.start <= at <= flight.end + 1e-9 <= 10.0 + 1e-6


def test_a_collective_moves_once_its_last_member_has_joined():
    spans = [all_reduce(rank, start, 6.0) for rank, start in enumerate((1.0, 2.0, 4.0, 3.0))]
    found = flights(spans, REPLICAS, 10.0)
    assert len(found) == 4
    assert {(f.start, f.end, f.payload, len(f.path)) for f in found} == {(4.0, 6.0, "gradient", 6)}


def test_buckets_are_numbered_where_there_are_several():
    spans = [
        all_reduce(rank, at, at + 2, part) for at, part in ((0.0, "bucket0"), (3.0, "bucket1")) for rank in range(4)
    ]
    assert [f.number for f in flights(spans, REPLICAS, 10.0)] == [0] * 4 + [1] * 4
    assert {f.number for f in flights(spans[:4], REPLICAS, 10.0)} == {-1}
    assert (bucket_of("bucket12"), bucket_of("block12")) == (12, -1)


def test_a_batch_comes_from_outside():
    load = Span(1, "compute", "load", 0, 0.0, 1.0, payload="batch")
    assert flights([load], TWO.mesh, 10.0) == (Flight(0.0, 1.0, "batch", -1, ((OUTSIDE, 1),)),)


def test_the_numbers_of_flights_of_a_pipeline_have_a_closed_form():
    """p stages, m microbatches: (p-1)m activations and as many gradients; two devices load."""
    plan, layers, timeline = predicted("pipeline", 4, "unit", microbatches=8)
    info = picture_info(plan, layers, timeline)
    count = {p: sum(f.payload == p for f in info.flights) for p in ("activation", "gradient", "batch")}
    assert count == {"activation": 24, "gradient": 24, "batch": 2}


# --- rows of bars ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "devices"), [("pipeline", 4), ("ddp", 3), ("data_parallel", 3), ("layer_split", 2)])
def test_bars_of_a_lane_do_not_overlap_and_stay_in_their_row(mode, devices):
    _, _, timeline = predicted(mode, devices, "h100")
    spans = list(timeline.spans())
    out = rows(range(devices), spans)
    assert sorted(bar.span for bar in out.bars) == sorted(spans)
    lanes = {}
    for bar in out.bars:
        row = out.rows[bar.row]
        assert row.rank == bar.span.rank
        assert row.y0 <= bar.y0 < bar.y1 <= row.y1 <= out.height
        lanes.setdefault((bar.y0, bar.row), []).append((bar.span.start, bar.span.end))
    for bars in lanes.values():
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(sorted(bars)))


def test_compute_lies_above_communication_and_measured_above_predicted():
    front = [compute("forward", 0, 0.0, 2.0), all_reduce(0, 1.0, 2.0)]
    behind = [compute("forward", 0, 0.0, 1.0)]
    bars = sorted(rows([0], front, behind).bars, key=lambda bar: bar.y0)
    assert [(bar.span.kind, bar.behind) for bar in bars] == [
        ("forward", False),
        ("all_reduce", False),
        ("forward", True),
    ]


# --- the picture -------------------------------------------------------------------------------------------------


def test_the_clock_starts_with_the_timeline_and_ends_with_its_last_span():
    spans = [compute("forward", 0, 7.0, 9.0), compute("backward", 1, 9.0, 13.0)]
    info = picture_info(TWO, ["a", "b"], Timeline.of(spans, "simulated", 2))
    assert [(bar.span.start, bar.span.end) for bar in info.rows.bars] == [(0.0, 2.0), (2.0, 6.0)]
    assert (info.end, info.unit, info.stops, info.pauses) == (6.0, (1.0, "s"), (0.0, 2.0, 6.0), (6.0,))


def test_both_share_one_clock_and_only_the_measured_moves():
    plan, layers, timeline = predicted("pipeline", 2, "unit")
    measured = Timeline.of([compute("forward", 0, 0.0, 100.0)], "measured", 2)
    info = picture_info(plan, layers, timeline, measured, "both")
    assert info.end == 100.0
    assert info.flights == ()
    assert sum(bar.behind for bar in info.rows.bars) == len(timeline)
    assert picture_info(plan, layers, timeline, measured, "measured").rows.bars[0].behind is False


def test_every_step_ends_with_a_pause():
    spans = [compute("forward", 0, 0.0, 1.0), compute("forward", 0, 2.0, 3.0, step=1)]
    info = picture_info(TWO, ["a", "b"], Timeline.of(spans, "simulated", 2))
    assert info.pauses == (1.0, 3.0)
    assert info.seconds == 16.0


def test_an_empty_timeline_is_a_picture_that_says_so():
    info = picture_info(TWO, ["a", "b"], Timeline.of([], "measured", 2))
    assert info.is_empty
    assert (info.rows.bars, info.flights, info.end, info.stops, info.pauses) == ((), (), 1.0, (1.0,), ())
    payload = moving_picture(info, EN)
    assert payload["caption"] == EN("figure.empty")
    assert payload["spans"]["t0"] == []
    plot_picture(info, EN)


def test_a_stopped_run_is_drawn_as_far_as_it_came():
    plan, layers, timeline = predicted("pipeline", 2, "local", microbatches=4)
    half = timeline.where(timeline["start"] < timeline.makespan / 2)
    info = picture_info(plan, layers, timeline, half, "measured")
    assert len(info.rows.bars) == len(half) < len(timeline)
    moving_picture(info, EN)


def test_where_nothing_takes_time_the_clock_still_has_a_length():
    spans = [compute("forward", 0, 0.0, 0.0), message("send", 0, 1, 0.0, 0.0), message("recv", 1, 0, 0.0, 0.0)]
    info = picture_info(TWO, ["a", "b"], Timeline.of(spans, "simulated", 2))
    assert info.end == 1.0
    assert [f.end > f.start for f in info.flights] == [True]
    moving_picture(info, EN)


def test_one_device_without_communication():
    plan, layers, timeline = predicted("single", 1)
    info = picture_info(plan, layers, timeline)
    assert {f.path for f in info.flights} == {((OUTSIDE, 0),)}
    assert info.places.links == ()


@pytest.mark.parametrize(
    ("view", "needs"), [("predicted", "predicted"), ("measured", "measured"), ("both", "predicted")]
)
def test_a_view_needs_its_timeline(view, needs):
    with pytest.raises(ValueError, match=f"needs a {needs} timeline"):
        picture_info(TWO, [], None, None, view)


def test_an_unknown_view_is_refused():
    with pytest.raises(ValueError, match="view must be one of predicted, measured, both; it is sideways"):
        picture_info(TWO, [], None, None, "sideways")


def test_the_typical_step_is_the_median_of_those_after_the_warm_up():
    spans = [compute("forward", 0, 0.0, length, step=step) for step, length in enumerate((9.0, 9.0, 3.0, 1.0, 2.0))]
    assert typical_step(Timeline.of(spans, "measured", 1)) == 4
    assert typical_step(Timeline.of(spans[:1], "measured", 1)) == 0


# --- figure and payload ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["predicted", "both"])
@pytest.mark.parametrize(
    ("mode", "devices"), [("single", 1), ("data_parallel", 4), ("ddp", 4), ("layer_split", 2), ("pipeline", 4)]
)
def test_a_figure_has_at_most_ten_traces_and_plain_numbers(mode, devices, view):
    plan, layers, timeline = predicted(mode, devices)
    info = picture_info(plan, layers, timeline, timeline, view)
    payload = moving_picture(info, EN)
    json.dumps(payload, allow_nan=False)
    assert len(payload["figure"]["data"]) <= 10
    assert len(plot_picture(info, EN).data) <= 10
    spans = payload["spans"]
    assert {len(column) for name, column in spans.items() if name != "lanes"} == {len(info.rows.bars)}
    assert max(spans["label"]) < len(payload["strings"])
    assert {len(column) for column in payload["flights"].values()} == {len(info.flights)}


def test_a_thousand_spans_take_at_most_300_kilobytes():
    plan, layers, timeline = predicted("pipeline", 8, "h100", model="gpt", layers=8, microbatches=32)
    assert len(timeline) > 1000
    size = len(
        json.dumps(
            moving_picture(picture_info(plan, layers, timeline), ZH), separators=(",", ":"), ensure_ascii=False
        ).encode()
    )
    assert size <= 300_000


def test_the_cell_of_the_layer_that_is_computed_lights_up():
    plan, layers, timeline = predicted("ddp", 2)
    payload = moving_picture(picture_info(plan, layers, timeline), EN)
    lit = {payload["strings"][w]: c for w, c in zip(payload["spans"]["words"], payload["spans"]["cell"], strict=True)}
    assert (lit["forward · conv1"], lit["backward · fc2"], lit["optimizer"]) == (0, 3, WHOLE)


def test_a_still_figure_says_under_the_mouse_what_each_span_is():
    plan, layers, timeline = predicted("pipeline", 2, "unit", microbatches=4)
    figure = plot_picture(picture_info(plan, layers, timeline), EN)
    hover = next(trace for trace in figure.data if trace.name == "spans").hovertext
    assert "<b>forward · microbatch 0</b><br>rank 0 · stage 0<br>1 s · starts at 0 s" in [
        re.sub(r"<br>[\d.]+ .?B", "", h) for h in hover
    ]


@pytest.mark.parametrize("language", [EN, ZH], ids=["en", "zh"])
def test_every_text_of_the_figures_and_the_player_is_in_both_catalogues(language):
    folder = Path(viz.figures.__file__).parent
    sources = [*folder.glob("*.py"), folder.parent / "export.py"]
    keys = {
        key
        for source in sources
        for key in re.findall(r'\b(?:text|words)\("([^"]+)"', source.read_text(encoding="utf-8"))
    }
    keys |= {*words.OP_KEYS.values(), *words.PAYLOAD_KEYS.values(), *words.LOOK_KEYS.values()}
    assert len(keys) > 40
    assert not [key for key in keys if key not in language]
    assert EN.entries.keys() == ZH.entries.keys()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (1.5, "1.5 s"),
        (0.0123, "12.3 ms"),
        (4.56e-6, "4.56 µs"),
        (2e-9, "2 ns"),
        (3600, "3600 s"),
        (0.9999, "1000 ms"),
    ],
)
def test_seconds_are_shown_in_a_unit_that_reads_well(seconds, shown):
    assert words.show_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_724_320, "1.72 MB"), (3e12, "3 TB")]
)
def test_bytes_are_shown_in_powers_of_a_thousand(size, shown):
    assert words.show_bytes(size) == shown


# --- other charts ------------------------------------------------------------------------------------------------


def test_losses_leave_out_what_is_not_a_number():
    info = losses_info([2.5, None, float("nan"), 2.0, float("inf")])
    assert (info.steps, info.losses, info.skipped) == ((0, 3), (2.5, 2.0), 3)
    assert plot_losses(info, EN).data[0].y == (2.5, 2.0)


def test_without_losses_the_chart_says_so():
    assert plot_losses(losses_info([]), EN).layout.annotations[0].text == EN("figure.losses.empty")


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    info = losses_info([float(i) for i in range(5000)])
    assert (len(info.steps), info.steps[0], info.steps[-1]) == (POINTS, 0, 4999)


def test_predicted_and_measured_seconds_are_means_over_ranks_and_steps():
    one = Timeline.of([compute("forward", 0, 0.0, 1.0), compute("forward", 1, 0.0, 3.0)], "simulated", 2)
    two = Timeline.of(
        [compute("forward", r, s, s + 4.0, step=s) for r in (0, 1) for s in (0, 1)] + [compute("load", 0, 0.0, 0.4)],
        "measured",
        2,
    )
    info = compare_info(one, two)
    assert info.pairs == (Pair("load", None, pytest.approx(0.1)), Pair("forward", 2.0, 4.0))
    assert [pair.error for pair in info.pairs] == [None, -0.5]
    figure = plot_compare(info, EN)
    assert "forward: predicted 2 s, measured 4 s (-50%)" in figure.data[1].hovertext


def test_nothing_compared_is_an_empty_chart():
    nothing = Timeline.of([], "measured", 1)
    assert compare_info(nothing, nothing).pairs == ()
    plot_compare(compare_info(nothing, nothing), EN)
