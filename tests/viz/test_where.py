"""Where the time of a step went: the bars of its ranks are as long as the step; its critical path is outlined."""

import json
from itertools import pairwise

import pytest

from engine.analysis.critical_path import critical_path
from engine.analysis.idle import CAUSES, idle
from engine.analysis.ran import simulated
from engine.plan import COMPUTE
from engine.predict import predict
from engine.spec import Spec
from viz.figures.critical import bars_of, path_keys
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.figures.where import ROWS, plot_where, where_info
from viz.locales import text

EN, ZH = text("en"), text("zh")
PIPELINE = Spec(mode="pipeline", devices=4, model="gpt", machine="a100")


@pytest.fixture(scope="module")
def pipeline():
    prediction = predict(PIPELINE)
    ran = simulated(prediction.simulation)
    return prediction, ran


def test_every_bar_is_as_long_as_the_step(pipeline):
    prediction, ran = pipeline
    info = where_info(ran, idle(ran))
    assert [(row.rank, row.ranks) for row in info.rows] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    for row in info.rows:
        assert sum(row.seconds) == pytest.approx(prediction.step_time)
    assert set(info.kinds) == {"load", "forward", "backward", "optimizer"} <= set(COMPUTE)
    assert set(info.causes) <= set(CAUSES) and "fill" in info.causes
    forward = info.kinds.index("forward")
    spans = [s for s in prediction.timeline.spans() if s.kind == "forward" and s.rank == 2]
    assert info.rows[2].seconds[forward] == pytest.approx(sum(span.duration for span in spans))


def test_bars_are_stacked_and_told_in_each_language(pipeline):
    _, ran = pipeline
    info = where_info(ran, idle(ran))
    for words, cause in ((EN, "pipeline fill"), (ZH, "流水线填充")):
        figure = plot_where(info, words)
        assert figure.layout.barmode == "stack"
        assert cause in [trace.name for trace in figure.data]
        assert all(bar.hovertext[0].startswith("rank 0 · ") for bar in figure.data)
        # In the axis' unit, the traces of a rank end where the axis does.
        assert sum(bar.x[1] for bar in figure.data) == pytest.approx(figure.layout.xaxis.range[1], rel=1e-3)
        assert len(json.dumps(figure.to_plotly_json(), default=list)) < 12_000


def test_ranks_of_one_role_share_a_bar_and_not_all_are_drawn():
    ran = simulated(predict(Spec(mode="ddp", devices=64, global_batch=64, machine="a100")).simulation)
    info = where_info(ran, idle(ran))
    assert [(row.rank, row.ranks) for row in info.rows] == [(0, 64)] and info.total == 64
    figure = plot_where(info, EN)
    assert figure.layout.yaxis.ticktext == ("all ranks",)
    assert figure.data[0].hovertext[0].startswith("all ranks · load") and not figure.layout.annotations
    spec = PIPELINE.with_(devices=16, model="mlp", layers=15, microbatches=16)
    ran = simulated(predict(spec).simulation)
    info = where_info(ran, idle(ran))
    assert len(info.rows) == ROWS < info.total == 16
    assert "12 of 16 devices" in plot_where(info, EN).layout.annotations[0].text


def test_the_critical_path_is_outlined_in_order_when_it_is_asked_for(pipeline):
    prediction, ran = pipeline
    keys = path_keys(ran, critical_path(ran))
    info = picture_info(prediction.plan, prediction.job.layers, prediction.timeline, critical=keys)
    spans = [bar.span for bar in info.critical]
    assert len(spans) == len(keys) and spans == [bar.span for bar in bars_of(keys, info.rows.bars)]
    assert sum(span.duration for span in spans) == pytest.approx(prediction.step_time)
    assert all(a.end == pytest.approx(b.start) for a, b in pairwise(spans))
    name = EN("figure.critical")
    payload = moving_picture(info, EN)
    (trace,) = [trace for trace in payload["figure"]["data"] if trace.get("name") == name]
    assert trace["x"].count(None) == trace["y"].count(None) >= len(spans)
    plain = picture_info(prediction.plan, prediction.job.layers, prediction.timeline)
    assert name not in [trace.get("name") for trace in moving_picture(plain, EN)["figure"]["data"]]
    assert len(json.dumps(payload)) - len(json.dumps(moving_picture(plain, EN))) < 10_000
