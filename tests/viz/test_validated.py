"""Predicted against measured, as drawn: every row once, where its numbers are, with who measured it."""

from __future__ import annotations

import math

import pytest

from engine.cost.catalogue import DEVICES
from engine.validate.kept import Row, read
from engine.validate.residuals import PROPERTIES
from viz import locales, theme
from viz.figures.validated import plot_set_errors, plot_validated, points_of, set_errors, validated_info
from viz.locales import LANGUAGES
from viz.locales.engine import phrase
from viz.pages.validated import amounts

TEXT = locales.text("en")


def row(name: str, measured: float | None, predicted: float, **changes) -> Row:
    known = {
        "id": name, "set": "one", "source": "A. Author <2022>, Table 1", "model": "24 × 1024", "layout": "tp2",
        "devices": 16, "device": "a100", "precision": "bf16", "fitted": False, "weak": False, "dense": True,
        "measured_seconds": measured, "predicted_seconds": predicted, "floor_seconds": measured,
        "measured_memory": None, "memory_kind": None, "predicted_memory": 1e9,
    }  # fmt: skip
    return Row(**known | changes)


ROWS = (
    row("a", 1.0, 1.1),
    row("b", 100.0, 80.0, set="two", device="h100"),
    row("c", 10.0, 10.0, fitted=True),
    row("d", None, 1.0, measured_memory=2e9),
)


def marks(figure) -> list[dict]:
    return [trace for trace in figure.to_dict()["data"] if trace.get("mode") == "markers"]


def test_each_row_is_one_point_where_it_was_measured_and_predicted():
    figure = plot_validated(validated_info(ROWS), TEXT)
    drawn = {(x, y) for trace in marks(figure) for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert drawn == {(1.0, 1.1), (100.0, 80.0), (10.0, 10.0)}
    assert [trace["name"] for trace in marks(figure)] == ["A100", "A100, fitted", "H100, H200"]
    shapes = [trace["marker"]["symbol"] for trace in marks(figure)]
    assert shapes == ["circle", "circle-open", "diamond"]


def test_both_axes_are_logarithmic_and_the_same_so_that_the_diagonal_is_where_both_agree():
    layout = plot_validated(validated_info(ROWS), TEXT).to_dict()["layout"]
    assert layout["xaxis"]["type"] == layout["yaxis"]["type"] == "log"
    assert layout["xaxis"]["range"] == layout["yaxis"]["range"]
    low, high = (10**end for end in layout["xaxis"]["range"])
    assert low < 1.0 and high > 100.0
    assert layout["xaxis"]["ticktext"] == ["1 s", "10 s", "100 s"]


def test_a_point_says_which_training_it_is_and_who_measured_it_with_nothing_taken_as_html():
    (said,) = [trace["hovertext"][0] for trace in marks(plot_validated(validated_info(ROWS[:1]), TEXT))]
    for part in ("<b>a</b>", "24 × 1024 · tp2", "16 × a100 · bf16", "measured 1 s · predicted 1.1 s · +10.0\u00a0%"):
        assert part in said
    assert "A. Author &lt;2022&gt;, Table 1" in said


def test_a_chosen_set_stands_before_the_others_and_the_axes_stay():
    whole, chosen = validated_info(ROWS), validated_info(ROWS, chosen="two")
    assert [point.row.id for point in chosen.points] == ["b"]
    assert [point.row.id for point in chosen.behind] == ["a", "c"]
    assert (whole.low, whole.high) == (chosen.low, chosen.high)
    first, second = marks(plot_validated(chosen, TEXT))
    assert first["marker"]["color"] == theme.LINE and second["name"] == "H100, H200"


def test_memory_has_the_rows_in_which_it_was_measured():
    assert [point.row.id for point in validated_info(ROWS, "memory").points] == ["d"]


@pytest.mark.parametrize(("rows", "quantity"), [(ROWS, "colour"), ((), "time"), (ROWS[:1], "memory")])
def test_what_cannot_be_drawn_is_refused(rows, quantity):
    with pytest.raises(ValueError, match=r"quantity|no row"):
        validated_info(rows, quantity)


def test_sets_are_drawn_the_best_first_with_their_means_to_both_sides():
    time = {"mape": 0.2, "floor_mape": 0.1}
    sets = [{"set": "two", "time": time}, {"set": "one", "time": time | {"mape": 0.05}}, {"set": "none", "time": None}]
    found = set_errors(ROWS, sets)
    assert [one.name for one in found] == ["one", "two"]
    floor, mean, rows = plot_set_errors(found, TEXT).to_dict()["data"]
    assert mean["base"] == [-5, -20] and mean["x"] == [10, 40]
    assert floor["base"] == [-10, -10]
    assert dict(zip(rows["y"], rows["x"], strict=True))["two"] == -20


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("quantity", ["time", "memory"])
def test_what_is_shipped_is_drawn_in_every_language(language: str, quantity: str):
    found, text = read(), locales.text(language)
    figure = plot_validated(validated_info(found.rows, quantity), text)
    assert sum(len(trace["x"]) for trace in marks(figure)) == len(points_of(found.rows, quantity))
    assert all(math.isfinite(value) for trace in marks(figure) for value in (*trace["x"], *trace["y"]))
    assert len(figure.layout.xaxis.tickvals) >= 3
    plot_set_errors(set_errors(found.rows, found.report["sets"]), text)


def test_every_reason_and_property_that_is_shipped_is_said_in_chinese():
    report = read().report
    said = [why["reason"] for each in report["sets"] for why in each["not_used"]]
    assert said
    said += PROPERTIES  # which of them stands out may change
    assert [text for text in said if not any("一" <= c <= "鿿" for c in phrase("zh", text))] == []


def test_every_device_of_the_catalogue_has_a_generation_and_generations_are_told_apart():
    expected = {"v100": "volta", "a100_40": "ampere", "h200": "hopper", "b200": "blackwell", "gb200": "blackwell"}
    assert {name: theme.generation(name) for name in expected} == expected
    assert {theme.generation(name) for name in DEVICES} <= theme.GENERATIONS.keys()
    assert len({look.colour for look in theme.GENERATIONS.values()}) == len(theme.GENERATIONS)
    assert len({look.shape for look in theme.GENERATIONS.values()}) == len(theme.GENERATIONS)


def test_a_target_that_is_missed_by_little_does_not_look_as_if_met():
    text = locales.text("en")
    told = [
        amounts({"aim": "dense", "value": v, "limit": 0.08, "met": v <= 0.08}, text) for v in (0.0801, 0.0803, 0.09)
    ]
    assert [value.replace("\u00a0", " ") for value, _ in told] == ["8.01 %", "8.03 %", "9.0 %"]
    shown = [(aim["met"], *amounts(aim, text)) for aim in read().report["targets"]]
    assert all(met or value != limit for met, value, limit in shown)
