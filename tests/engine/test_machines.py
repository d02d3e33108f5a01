"""The catalogue's machines are possible, as fast as their data sheets allow, and impossible ones are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.asking.rules import SpecError
from engine.cost.catalogue import SUSTAINED
from engine.cost.hardware import most_of
from engine.cost.machine import EVERYBODY, MACHINES, Link, machine

GPUS = [name for name, found in MACHINES.items() if found.sms]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("link_rate", 0.0),
        ("memory_rate", -1.0),
        ("flop_rate", math.nan),
        ("memory_size", 0),
        ("link_latency", -1e-6),
        ("op_overhead", math.inf),
        ("bf16_gain", math.inf),
        ("peak_flop_rate", math.inf),
        ("flop_rate", "fast"),
        ("flop_rate", 10**400),
        ("flop_rate", None),
        ("link_latency", True),
        ("link_latency", None),
        ("outer", ()),
        ("outer", ((4, Link(0.0, 1.0)), (EVERYBODY, Link(0.0, 1.0)))),
    ],
)
def test_an_impossible_machine_is_refused_with_the_rule(field, value):
    with pytest.raises(SpecError) as refused:
        replace(machine("h100"), **{field: value})
    assert refused.value.code == "impossible_machine"
    assert refused.value.setting == ("tiers" if field == "outer" else field)


@pytest.mark.parametrize("link", [(-1.0, 1.0), (0.0, 0.0), (0.0, math.nan), (math.inf, 1.0), ("x", 1.0), (0.0, None)])
def test_an_impossible_link_is_refused(link):
    with pytest.raises(SpecError, match=r"A machine's (latency|rate) must be"):
        Link(*link)


@pytest.mark.parametrize("name", GPUS)
def test_tiers_get_slower_outwards_and_reach_everybody(name):
    tiers = machine(name).tiers
    assert [reach for reach, _ in tiers][-1] == EVERYBODY
    assert all(inner.rate > outer.rate for (_, inner), (_, outer) in pairwise(tiers))


def test_rates_in_bf16_are_what_matmuls_were_measured_to_reach_as_far_as_they_last():
    """TFLOP/s of large matmuls, of peaks 312, 989 and 2250; of a B200 those that lasted were measured."""
    measured = {"a100": SUSTAINED * 267.9, "h100": SUSTAINED * 720, "b200": 1098}
    assert {name: machine(name).at("bf16").flop_rate / 1e12 for name in measured} == pytest.approx(measured, rel=2e-3)
    peaks = {"a100": 312, "h100": 989.4, "b200": 2250, "gb200": 2500}
    assert {name: machine(name).at("bf16").peak_flop_rate / 1e12 for name in peaks} == pytest.approx(peaks)


def test_blackwells_products_are_as_fast_as_their_power_limit_lets_them_be():
    """1,098 TFLOP/s of a B200 at 1,000 W in bf16, 1,963 at 750 W in fp8."""
    watts = {"b200": 1000, "b300": 1100, "gb200": 1200, "gb300": 1400}
    for precision, a_watt in (("bf16", 1.098), ("fp8", SUSTAINED * 1963 / 750)):
        rates = {name: machine(name).at(precision).flop_rate / 1e12 for name in watts}
        assert rates == pytest.approx({name: a_watt * limit for name, limit in watts.items()})


def test_a_precision_without_units_of_its_own_is_computed_in_the_next():
    volta, ampere = machine("v100"), machine("a100")
    assert volta.at("bf16").flop_rate == volta.at("fp32").flop_rate < volta.at("fp16").flop_rate
    assert ampere.at("fp8").flop_rate == ampere.at("bf16").flop_rate
    assert machine("h100").at("fp8").flop_rate / machine("h100").at("bf16").flop_rate == pytest.approx(
        1280 / 720, rel=1e-3
    )


@pytest.mark.parametrize(("ranks", "together"), [(64, 72), (72, 72), (128, 64), (144, 72), (512, 64), (100, 72)])
def test_a_job_of_several_racks_gets_as_many_devices_of_each(ranks, together):
    """Of 72; 128 and 512 do not divide into them, and do into 64; 100 into neither."""
    assert MACHINES["gb200"].placed(ranks).node_size == together
    assert MACHINES["h100"].placed(ranks).node_size == 8


def test_the_slowest_of_many_devices_is_as_slow_as_the_largest_of_many_normal_numbers():
    """Expected values of the largest: Harter 1961, table 1."""
    for number, expected in ((1, 0.0), (2, 0.5642), (10, 1.5388), (100, 2.5076)):
        assert most_of(number) == pytest.approx(expected, abs=0.026)
    known, spread = MACHINES["h100"], 0.015
    placed = known.placed(100)
    for name in ("flop_rate", "flash_rate"):
        assert getattr(known, name) / getattr(placed, name) == pytest.approx(1 + 2.5076 * spread, rel=1e-3)
    assert known.placed(1) == known and placed.peak_flop_rate == known.peak_flop_rate
    assert MACHINES["unit"].placed(100) == MACHINES["unit"]
