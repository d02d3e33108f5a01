"""What a search has found, as a chart: which points are drawn, how they are told apart, and where memory ends."""

from __future__ import annotations

import pytest

from viz.figures.search import FAR, Found, name_of, plot_search, search_info, words
from viz.locales import LANGUAGES, text

GB = 10**9
MESH = {"mode": "hybrid", "pp": 4, "dp": 2, "fsdp": 1, "cp": 1, "tp": 8}
FOUND = [Found(MESH, 1.0, 60 * GB), Found(MESH | {"pp": 2}, 1.05, 70 * GB), Found(MESH, 1.2, 20 * GB)]
FOUND.append(Found(MESH, FAR + 0.1, 10 * GB))


def test_points_are_the_fastest_first_and_what_is_far_off_is_left_out():
    info = search_info(reversed(FOUND), 80 * GB, 0.07)
    assert [one.step_time for one in info.points] == [1.0, 1.05, 1.2]
    assert (info.tied, info.left_out) == (2, 1)
    assert search_info(FOUND, None, None).tied == 1
    assert search_info([], 80 * GB, 0.07).points == ()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_first_its_ties_and_the_others_are_apart_and_the_line_is_where_memory_ends(language: str):
    say = text(language)
    figure = plot_search(search_info(FOUND, 80 * GB, 0.07), say)
    drawn = {trace.name: list(trace.y) for trace in figure.data}
    expected = {"other": [1.2], "tied": [1.05], "first": [1.0]}
    assert drawn == {say(f"figure.search.{name}"): times for name, times in expected.items()}
    assert len({trace.marker.symbol for trace in figure.data}) == 3  # told apart without their colours
    (line,) = figure.layout.shapes
    assert line.x0 == line.x1 == 80 * GB < figure.layout.xaxis.range[1]
    assert "pp 4 · dp 2 · tp 8" in figure.data[-1].hovertext[0]
    assert not plot_search(search_info(FOUND, None, None), say).layout.shapes
    assert plot_search(search_info([], 80 * GB, None), say).data == ()


def test_each_point_tells_its_layout_to_a_click_and_that_which_is_looked_at_has_a_ring():
    info = search_info(FOUND, 80 * GB, 0.07)
    drawn = plot_search(info, text("en")).data
    given = {(x, y): name for trace in drawn for x, y, name in zip(trace.x, trace.y, trace.customdata, strict=True)}
    assert given == {(one.peak_memory, one.step_time): name_of(one.settings) for one in info.points}
    *others, ring = plot_search(info, text("en"), name_of(MESH | {"pp": 2})).data
    assert len(others) == len(drawn) and (list(ring.x), list(ring.y)) == ([70 * GB], [1.05]) and not ring.showlegend
    assert len(plot_search(info, text("en"), "another").data) == len(drawn)


def test_a_layout_is_told_by_what_it_has():
    say = text("en")
    told = words(MESH | {"schedule": "interleaved_1f1b", "stages_per_rank": 5, "microbatches": 16}, say)
    assert told == "pp 4 · dp 2 · tp 8 · Interleaved 1F1B · 5 stages a device · 16 microbatches"
    assert words({"mode": "ddp"}, say) == say("mode.ddp")
    assert "Full" in words({"mode": "fsdp", "recompute": "full"}, say)
