"""Colours: every op has one, it can be read on, and told apart."""

import colorsys
import itertools
import tomllib
from pathlib import Path

import pytest

from engine.analysis.idle import CAUSES
from engine.plan import COMPUTE, KINDS, PAYLOADS
from viz import theme


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("look", [*theme.LOOKS.values(), *theme.WAITS.values()])
def test_ink_is_readable_on_its_colour(look):
    """4.5:1, WCAG's bound for small type."""
    assert contrast(look.ink, look.colour) >= 4.5


def test_the_measure_of_contrast_finds_unreadable_ink():
    assert contrast("#FFFFFF", "#F0E442") < 4.5
    assert contrast("#FFFFFF", "#000000") == pytest.approx(21)


@pytest.mark.parametrize("kind", KINDS)
def test_every_op_has_a_look_of_its_own_or_that_of_what_it_moves(kind):
    if kind in COMPUTE and kind != "copy":
        assert theme.look_of(kind) != "other"
    for payload in PAYLOADS:
        if payload != "control" and kind not in COMPUTE:
            assert theme.look_of(kind, payload) == payload


def test_a_load_looks_like_what_it_loads():
    assert theme.look_of("load", "batch") == "batch"


def test_no_two_looks_share_a_colour():
    colours = [look.colour for look in (*theme.LOOKS.values(), *theme.WAITS.values())]
    assert len(set(colours)) == len(colours)


def hue(colour: str) -> float:
    """In degrees."""
    return 360 * colorsys.rgb_to_hsv(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]


@pytest.mark.parametrize("look", ["backward", "optimizer", "activation", "gradient", "weights", "tokens"])
def test_layers_at_rest_are_not_taken_for_what_moves(look):
    apart = [abs((hue(stage) - hue(theme.LOOKS[look].colour) + 180) % 360 - 180) for stage in theme.STAGES]
    assert min(apart) > 30
    assert len(set(theme.STAGES)) == len(theme.STAGES)


def test_every_cause_of_idle_time_has_a_colour():
    assert list(theme.WAITS) == list(CAUSES)


def test_what_travels_has_a_shape_of_its_own():
    shapes = [theme.LOOKS[p].shape for p in ("batch", "activation", "gradient", "weights", "tokens")]
    assert shapes == ["triangle", "circle", "diamond", "square", "hexagon"]


def test_passes_differ_without_colour():
    """By their patterns; a whole backward pass, its halves, and recomputing too."""
    passes = ("forward", "recompute", "backward", "backward_input", "backward_weight")
    assert len({theme.LOOKS[kind].pattern for kind in passes}) == len(passes)
    for one, two in itertools.combinations(passes[2:], 2):
        assert contrast(theme.LOOKS[one].colour, theme.LOOKS[two].colour) > 1.4


def test_stand_ins_can_be_told_apart_and_are_seen_on_white_and_on_black():
    assert len(set(theme.THEME)) == 4
    for one, two in itertools.product(theme.THEME, ("#FFFFFF", "#000000")):
        assert contrast(one, two) >= 3


def test_a_layout_changes_what_is_asked_and_keeps_the_rest():
    layout = theme.layout(height=100, xaxis={"visible": False})
    assert layout["height"] == 100
    assert layout["xaxis"]["visible"] is False
    assert layout["xaxis"]["showgrid"] is False
    assert theme.layout()["xaxis"].get("visible") is None


@pytest.mark.parametrize("name", ["light", "dark"])
def test_words_are_readable_on_the_ground_and_on_a_button_of_each_theme(name):
    config = Path(__file__).parents[2] / ".streamlit" / "config.toml"
    colours = tomllib.loads(config.read_text(encoding="utf-8"))["theme"][name]
    assert contrast("#FFFFFF", colours["primaryColor"]) >= 4.5
    for ground in ("backgroundColor", "secondaryBackgroundColor"):
        assert contrast(colours["textColor"], colours[ground]) >= 7
        assert contrast(colours["linkColor"], colours[ground]) >= 4.5
    for hover in (theme.layout()["hoverlabel"], theme.layout(hoverlabel=theme.HOVER_LINES)["hoverlabel"]):
        assert (theme.THEME[hover["font"]["color"]], theme.THEME[hover["bgcolor"]]) == (
            "--st-background-color",
            "--st-text-color",
        )
