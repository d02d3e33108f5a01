"""What the figures compute: exact values for small, empty, partial and odd timelines, and their size for large ones."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

import viz.figures
from engine.cost.held import OVER_TIME
from engine.cost.memory import CATEGORIES
from engine.timeline import Timeline
from tests.viz.examples import TWO, all_reduce, compute, message, predicted
from viz.figures import words
from viz.figures.compare import Pair, accuracy_info, compare_info, plot_compare
from viz.figures.experts import experts_info, plot_experts
from viz.figures.losses import POINTS, growing, losses_info, plot_losses
from viz.figures.memory import ROWS, memory_info, plot_memory
from viz.figures.moving import NO_CELL, WHOLE, moving_picture
from viz.figures.picture import picture_info, typical_step
from viz.figures.places import OUTSIDE
from viz.figures.rows import rows
from viz.figures.still import plot_picture
from viz.locales import text

EN, ZH = text("en"), text("zh")


# --- rows of bars ---------------------------------------------------------------------------------------------------


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


# --- the picture ----------------------------------------------------------------------------------------------------


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
    lengths = enumerate((9.0, 9.0, 3.0, 1.0, 2.0))
    spans = [compute("forward", 0, 10.0 * step, 10.0 * step + length, step=step) for step, length in lengths]
    assert typical_step(Timeline.of(spans, "measured", 1)) == 4
    assert typical_step(Timeline.of(spans[:1], "measured", 1)) == 0


# --- figure and payload ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["predicted", "both"])
@pytest.mark.parametrize(
    ("mode", "devices"),
    [("single", 1), ("data_parallel", 4), ("ddp", 4), ("layer_split", 2), ("pipeline", 4), ("tensor", 4)],
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


def test_a_piece_of_a_layer_lights_up_the_cell_of_the_layer():
    plan, layers, timeline = predicted("tensor", 2, model="gpt")
    payload = moving_picture(picture_info(plan, layers, timeline), EN)
    lit = {payload["strings"][w]: c for w, c in zip(payload["spans"]["words"], payload["spans"]["cell"], strict=True)}
    parts = ("embed.tokens", "block1.attention", "block1.mlp", "head.logits")
    assert [lit[f"forward · {part}"] for part in parts] == [0, 1, 1, 5]


def test_of_a_device_with_several_stages_the_one_that_computes_lights_up():
    plan, layers, timeline = predicted("pipeline", 2, "unit", schedule="zbv", model="mlp", layers=3)
    payload = moving_picture(picture_info(plan, layers, timeline), EN)
    places = [payload["strings"][i] for i in payload["spans"]["place"]]
    lit = set(zip(places, payload["spans"]["cell"], strict=True))
    compute = {(place, cell) for place, cell in lit if cell not in (WHOLE, NO_CELL)}
    # Counting down from -3: 1 + stage is what the boxes' own list has for a layer of that stage.
    assert compute == {(f"rank {r} · stage {s}", -3 - s) for r, s in ((0, 0), (0, 3), (1, 1), (1, 2))}
    assert payload["boxes"][0]["held"] == [1, 0, 0, 4]


def test_a_still_figure_says_under_the_mouse_what_each_span_is():
    plan, layers, timeline = predicted("pipeline", 2, "unit", microbatches=4)
    figure = plot_picture(picture_info(plan, layers, timeline), EN)
    hover = next(trace for trace in figure.data if trace.name == "spans").hovertext
    assert "<b>forward · microbatch 0</b><br>rank 0 · stage 0<br>1 s · starts at 0 s" in [
        re.sub(r"<br>[\d.]+ .?B", "", h) for h in hover
    ]


def test_a_microbatch_is_named_alike_in_every_pass():
    """Where there is no room for words, its number stands alone: a letter for some passes would look like a number."""
    _, _, timeline = predicted("pipeline", 2, "unit", microbatches=4, schedule="zbv")
    found = {}
    for span in timeline.spans():
        if span.lane == "compute" and span.microbatch >= 0:
            found[span.kind] = words.labels(EN, span, numbered=True)[1:] == (str(span.microbatch),)
    assert found == dict.fromkeys(("forward", "backward_input", "backward_weight"), True)


def test_what_moves_is_named_once_though_it_is_all_that_its_part_is():
    _, _, timeline = predicted("data_parallel", 2, "unit")
    said = {words.describe(EN, span, numbered=False) for span in timeline.spans() if span.lane != "compute"}
    assert {"reduce · gradients", "scatter · gradients · output gradients", "broadcast · weights · replicate"} <= said


@pytest.mark.parametrize("language", [EN, ZH], ids=["en", "zh"])
def test_counts_of_tokens_are_called_in_the_legend_what_the_narration_calls_them(language):
    plan, layers, timeline = predicted("expert", 2, "unit", model="moe")
    legend = moving_picture(picture_info(plan, layers, timeline), language)["legend"]
    assert legend[-1][2] == language("figure.payload.control")


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


# --- other charts ---------------------------------------------------------------------------------------------------


def test_losses_leave_out_what_is_not_a_number():
    info = losses_info([2.5, None, float("nan"), 2.0, float("inf")])
    assert (info.steps, info.losses, info.skipped) == ((0, 3), (2.5, 2.0), 3)
    assert plot_losses(info, EN).data[0].y == (2.5, 2.0)
    assert losses_info([2.5, None, 2.0], first=3).steps == (3, 5)


def test_looks_at_the_validation_samples_are_points_beside_the_curve():
    looks = [{"step": 1, "loss": 2.25, "accuracy": 0.5}, {"step": 2, "loss": None, "accuracy": None}]
    curve, points = plot_losses(losses_info([2.5, 2.0], evaluations=looks), EN).data
    assert (curve.mode, points.mode) == ("lines+markers", "markers")
    assert (points.x, points.y, points.customdata) == ((1,), (2.25,), (0.5,))


TOKENS = {
    "even": 12.0,
    "last": {"block1": [20, 0, 9, 19], "block2": [12, 12, 12, 12]},
    "mean": {"block1": [20.5, 0.0, 8.5, 19.0], "block2": [12.0, 12.0, 12.0, 12.0]},
}


def test_each_expert_has_its_bar_and_one_without_tokens_a_0():
    info = experts_info(TOKENS)
    figure = plot_experts(info, EN)
    (bars,) = figure.data
    assert [tuple(row) for row in bars.x] == [("block1",) * 4 + ("block2",) * 4, ("0", "1", "2", "3") * 2]
    assert tuple(bars.y) == (20.5, 0.0, 8.5, 19.0, 12.0, 12.0, 12.0, 12.0)
    assert bars.text[:3] == ("20", "0", "8.5")
    assert bars.hovertext[0] == "block1 · expert 0: 20.5 tokens a step, 20 in the last one"
    assert [shape.y0 for shape in figure.layout.shapes] == [12.0]
    assert [note.text for note in figure.layout.annotations] == ["even: 12"]


def test_of_many_blocks_the_first_have_their_experts_drawn_and_the_rest_are_counted():
    mean = {f"block{b}": [1.0] * 31 + [0.0] for b in range(1, 6)}
    info = experts_info({"even": 31 / 32, "last": mean, "mean": mean})
    assert (sorted(set(info.blocks)), info.hidden) == (["block1", "block2"], 3)
    figure = plot_experts(info, EN)
    assert figure.layout.annotations[1].text == "first 2 of<br>5 blocks"
    assert set(figure.data[0].text) == {"", "0"}
    huge = experts_info({"even": 1, "last": {"block1": [1] * 200}, "mean": {"block1": [1.0] * 200}})
    assert len(huge.mean) == 200


def test_without_losses_the_chart_says_so():
    assert plot_losses(losses_info([]), EN).layout.annotations[0].text == EN("figure.losses.empty")


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    info = losses_info([float(i) for i in range(5000)])
    assert (len(info.steps), info.steps[0], info.steps[-1]) == (POINTS, 0, 4999)


def test_a_curve_grows_over_all_the_steps_on_an_axis_from_zero():
    """Of 5 steps each is a quarter of 1,000 from the next; 4.2 is the top of 100, where the largest loss is 4."""
    assert growing([4.0, None, 2.1, float("nan")], 5) == (
        "M0.0,4.76L500.0,50.00",
        ((100, "0"), (52.38, "2"), (4.76, "4")),
    )
    assert growing([], 20).path == ""
    assert [words for _, words in growing([1500.0], 1).marks] == ["0", "500", "1000", "1500"]


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
    assert "forward: predicted 2 s, measured 4 s (\u221250\u00a0%)" in figure.data[1].hovertext
    assert [bool(bars.marker.pattern.shape) for bars in figure.data] == [True, False]  # hatched, solid
    assert list(figure.data[1].text) == ["", "\u221250\u00a0%"]


def test_the_accuracy_of_a_run_is_drawn_with_its_step():
    row = {"predicted": 1.0, "measured": 2.0, "error": -0.5}
    info = accuracy_info({"step": row | {"kind": "step"}, "ops": [row | {"kind": "forward"}]})
    assert info.pairs == (Pair("step", 1.0, 2.0), Pair("forward", 1.0, 2.0))
    assert list(plot_compare(info, EN).data[0].y) == ["the step", "forward"]


def test_nothing_compared_is_an_empty_chart():
    nothing = Timeline.of([], "measured", 1)
    assert compare_info(nothing, nothing).pairs == ()
    plot_compare(compare_info(nothing, nothing), EN)


def held(*sizes: int) -> dict[str, int]:
    return dict(zip(CATEGORIES, (*sizes, *[0] * len(CATEGORIES)), strict=False))


def test_ranks_that_hold_the_same_share_a_bar_of_memory():
    info = memory_info([held(4, 2), held(4, 2), held(3)], None)
    assert [(row.first, row.last) for row in info.rows] == [(0, 1), (2, 2)]
    assert info.categories == ("parameters", "gradients")
    figure = plot_memory(info, EN)
    assert [(bar.name, bar.x, bar.base) for bar in figure.data] == [
        ("parameters", (4, 3), (0, 0)),
        ("gradients", (2, 0), (4, 3)),
    ]
    assert all(bar.marker.pattern.shape == "/" for bar in figure.data)
    assert figure.layout.yaxis.ticktext == ("ranks 0–1", "rank 2")
    assert plot_memory(memory_info([held(4)] * 2, None), EN).layout.yaxis.ticktext == ("all ranks",)


def test_both_figures_of_memory_have_their_categories_in_one_order():
    found = memory_info([dict.fromkeys(CATEGORIES, 1)], None).categories
    assert {*found} == {*CATEGORIES} and found == tuple(name for name in OVER_TIME if name in found)


def test_measured_memory_is_solid_below_what_was_predicted():
    info = memory_info([held(4000), held(4000)], [held(4000), held(5000)])
    assert [(row.first, row.last) for row in info.rows] == [(0, 0), (1, 1)]
    predicted, measured = plot_memory(info, ZH).data
    assert (predicted.x, measured.x) == ((4, 4), (4, 5))
    assert measured.marker.pattern.shape is None
    assert all(upper < lower for upper, lower in zip(predicted.y, measured.y, strict=True))  # the axis goes down
    assert "5 kB" in measured.hovertext[1]


def test_of_many_different_ranks_the_first_are_drawn_and_the_figure_says_so():
    info = memory_info([held(i) for i in range(ROWS + 5)], None)
    assert (len(info.rows), info.hidden, info.ranks) == (ROWS, 5, ROWS + 5)
    (note,) = plot_memory(info, EN).layout.annotations
    assert note.text == EN("figure.not_drawn", drawn=ROWS, total=ROWS + 5)
    alike = memory_info([held(1)] * 16_384, None)
    assert (len(alike.rows), alike.hidden) == (1, 0)
