"""Memory over a step, as drawn: which ranks, and that what is drawn is what is held."""

from __future__ import annotations

import pytest

from engine.predict import predict
from engine.spec import Spec
from viz import locales
from viz.figures.memory_time import over_time_info, plot_over_time, thinned

LARGE = Spec(
    mode="hybrid", devices=64, pp=4, dp=16, fsdp=1, model="llama3_8b", machine="h100", global_batch=128, microbatches=8
)
H100 = 80 * 2**30


def test_a_figure_of_many_ranks_has_the_fullest_first_and_loses_no_peak():
    info = over_time_info(predict(LARGE).simulation, H100)
    peaks = [rank.peak[1] for rank in info.ranks]
    assert peaks == sorted(peaks, reverse=True)
    assert info.ranks[0].stands_for == 16
    assert [int(thinned(rank.held, 10).total.max()) for rank in info.ranks] == peaks


@pytest.mark.parametrize("language", ["en", "zh"])
def test_parts_are_stacked_to_the_peak_below_the_line_of_the_device(language):
    info = over_time_info(predict(LARGE).simulation, H100)
    figure = plot_over_time(info, locales.text(language)).to_dict()
    for row, rank in enumerate(info.ranks):
        drawn = [trace for trace in figure["data"] if trace["stackgroup"] == f"held{row}"]
        assert max(map(sum, zip(*(trace["y"] for trace in drawn), strict=True))) == pytest.approx(
            rank.peak[1] / 1e9, rel=1e-3
        )
    assert [line["y0"] for line in figure["layout"]["shapes"]] == [H100 / 1e9] * len(info.ranks)
    names = [trace["name"] for trace in figure["data"] if trace["showlegend"]]
    assert len(names) == len(set(names))
    far = plot_over_time(info._replace(capacity=10**15), locales.text(language)).to_dict()
    assert not far["layout"].get("shapes")
    assert far["layout"]["yaxis"]["ticksuffix"] == " GB"  # of what is held, not of a capacity that is not drawn
    axes = [far["layout"][f"yaxis{row}"] for row in ("", *range(2, 1 + len(info.ranks)))]
    assert {(axis["showgrid"], axis["zeroline"]) for axis in axes} == {(False, False)}


@pytest.mark.browser
@pytest.mark.xdist_group("player")
@pytest.mark.parametrize("spec", [LARGE, Spec(mode="tensor", devices=2, model="gpt")], ids=["three ranks", "one"])
def test_no_words_lie_on_others(spec, browser):
    """The names of ranks, the peaks and the axes' numbers, as wide as a page has them."""
    figure = plot_over_time(over_time_info(predict(spec).simulation, H100), locales.text("en"))
    page = browser.new_page(viewport={"width": 860, "height": 900})
    figure.layout.showlegend = False  # chart.js has it in a line of its own
    page.set_content(figure.to_html(include_plotlyjs=True))
    page.wait_for_selector(".annotation-text")
    boxes = page.evaluate(
        """() => [...document.querySelectorAll(".annotation-text, .xtick text, .ytick text, .y2tick text")]
          .map((e) => [e.textContent, e.getBoundingClientRect()])
          .map(([t, b]) => [t, b.left, b.right, b.top, b.bottom])"""
    )
    page.close()
    assert len(boxes) > 10
    for i, (one, left, right, top, bottom) in enumerate(boxes):
        for other, a, b, c, d in boxes[:i]:
            assert not (min(right, b) - max(left, a) > 1 and min(bottom, d) - max(top, c) > 1), (one, other)
