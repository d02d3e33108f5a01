"""A report -> which of the accuracies aimed at are met, on rows that nothing was fitted on.

The aims: mean absolute errors, and for time at most half of the one-constant model's; the order of schedules, and the
ratio of their throughputs to 1F1B's; throughput a device from fewest to most devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

MAX_TIME, MAX_OF_FLOOR = 0.08, 0.5
MAX_MEMORY = 0.03
MAX_RATIO = 0.03
MAX_POINTS = 2.0
TIME_SETS = ("korthikanti_t5", "bloom_prequel", "vtrain_multi", "llm_foundry")
MEMORY_SETS = ("megatron_ci_golden", "simumax_b200")
SCHEDULE_SETS = ("zero_bubble_t4",)
SCALING_SETS = ("dgxc_",)
# What is aimed at, by code, and why it is missed; pages have these in other languages.
AIMS = {
    "overall": "step time, all dense sets: mean error",
    "time": "step time, {set}: mean error",
    "floor": "step time, {set}: part of the floor's error",
    "memory": "memory, {set}: mean error",
    "order": "schedules, {set}: cells in a wrong order",
    "ratio": "schedules, {set}: ratio to 1F1B, worst error",
    "scaling": "scaling, {set}: throughput a device, points",
}
WHY = {
    "sets": "beyond the limit are, in points of this mean, {parts}",
    "property": "{share} of the errors' variance goes with {property} ({parts})",
    "worst": "the furthest row is off by {share}",
    "close": "what is in a wrong order was measured at most {share} apart",
    "series": "furthest off is {part}: from {few} to {many} devices each keeps {measured} of its rate, not {predicted}",
    "idle": "the idle time that the source works out from its own times of an op misses by up to {share}",
}


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Each aim that the file has rows for: what, the value, the limit, whether it is met, if not what stands out."""
    sets = {each["set"]: each for each in report["sets"]}
    found = []

    def aim(code: str, name: str | None, value: float | None, limit: float, because: dict | None = None) -> None:
        if value is not None:
            met = value <= limit
            because = None if met else because
            told = {"target": AIMS[code].format(set=name), "why": because and explained(because)}
            found.append(
                {"aim": code, "set": name, "value": value, "limit": limit, "met": met, "because": because} | told
            )

    if report["overall"]:
        beyond = _far_off(report["sets"], report["overall"]["rows"])
        aim("overall", None, report["overall"]["mape"], MAX_TIME, beyond)
    for name in TIME_SETS:
        if name in sets and (time := sets[name]["time"]):
            aim("time", name, time["mape"], MAX_TIME, _property(sets[name]))
            aim("floor", name, time["ratio_to_floor"], MAX_OF_FLOOR, _property(sets[name]))
    for name in MEMORY_SETS:
        if name in sets and sets[name]["memory"] and "allocated" in sets[name]["memory"]:
            memory = sets[name]["memory"]["allocated"]
            aim("memory", name, memory["mape"], MAX_MEMORY, {"code": "worst", "share": memory["max"]})
    for name in SCHEDULE_SETS:
        if name in sets and (cells := sets[name]["schedules"]):
            idle = cells["worst_of_idle_time"]
            wrong = len(cells["cells"]) - cells["cells_right"]
            aim("order", name, wrong, 0, {"code": "close", "share": _apart(cells["cells"])})
            aim("ratio", name, cells["worst_ratio_error"], MAX_RATIO, idle and {"code": "idle", "share": idle})
    for name, each in sets.items():
        if name.startswith(SCALING_SETS) and each["scaling"] and each["dense"]:
            aim("scaling", name, each["scaling"]["worst_points"], MAX_POINTS, _series(each["scaling"]["series"]))
    return found


def explained(because: Mapping[str, Any], words: Mapping[str, str] = WHY) -> str:
    """The reason in words: `words` has a sentence for each code."""
    points = because.get("points", {}).items()
    parts = [f"{name} {100 * part:.1f}" for name, part in points]
    parts += [f"{value}: {100 * error:+.0f} %" for value, error in because.get("mean_error", {}).items()]
    values = {name: f"{100 * value:.3g} %" for name, value in because.items() if isinstance(value, float)}
    values["parts"] = ", ".join(parts)
    return words[because["code"]].format_map({**because, **values})


def _far_off(sets: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """The sets that are furthest from the limit, by what they add to the mean of all rows beyond it."""
    beyond = {
        each["set"]: (each["time"]["mape"] - MAX_TIME) * each["time"]["rows"] / rows
        for each in sets
        if each["time"] and not each["weak"] and not each["fitted"] and each["time"]["mape"] > MAX_TIME
    }
    return {"code": "sets", "points": dict(sorted(beyond.items(), key=lambda item: -item[1])[:4])}


def _apart(cells: list[dict[str, Any]]) -> float:
    """How far the throughputs of schedules that are predicted in a wrong order were measured apart, at most."""
    apart = [0.0]
    for cell in cells:
        beside = [{"measured": 1.0, "predicted": 1.0}, *cell["ratios_to_1f1b"].values()]
        for one, other in itertools.combinations(beside, 2):
            measured, predicted = (one[name] / other[name] for name in ("measured", "predicted"))
            if (measured - 1) * (predicted - 1) < 0:
                apart.append(abs(measured - 1))
    return max(apart)


def _series(series: list[dict[str, Any]]) -> dict[str, Any]:
    """The one whose throughput a device at most devices is predicted worst."""
    worst = max(series, key=lambda one: one["points"])
    last = worst["efficiencies"][-1]
    ends = {"part": worst["part"], "few": worst["from_devices"], "many": worst["to_devices"]}
    return {"code": "series", **ends, "measured": last["measured"], "predicted": last["predicted"]}


def _property(of: dict[str, Any]) -> dict[str, Any] | None:
    """What the errors of a set go with most."""
    known = of["explained"]
    if not known:
        return None
    return {
        "code": "property",
        "share": known["share_of_variance"],
        **{k: known[k] for k in ("property", "mean_error")},
    }
