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
