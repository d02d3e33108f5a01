"""A report -> which of the accuracies aimed at are met, on rows that nothing was fitted on.

The aims: mean absolute errors, and for time at most half of the one-constant model's; the order of schedules, and the
ratio of their throughputs to 1F1B's; throughput a device from fewest to most devices.
"""

from __future__ import annotations

from typing import Any

MAX_TIME, MAX_OF_FLOOR = 0.08, 0.5
MAX_MEMORY = 0.03
MAX_RATIO = 0.03
MAX_POINTS = 2.0
TIME_SETS = ("korthikanti_t5", "bloom_prequel", "vtrain_multi", "llm_foundry")
MEMORY_SETS = ("megatron_ci_golden", "simumax_b200")
SCHEDULE_SETS = ("zero_bubble_t4",)
SCALING_SETS = ("dgxc_",)


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Each aim that the file has rows for: what, the value, the limit, whether it is met, if not what stands out."""
    sets = {each["set"]: each for each in report["sets"]}
    found = []

    def aim(what: str, value: float | None, limit: float, of: dict[str, Any] | None = None) -> None:
        if value is not None:
            met = value <= limit
            found.append({"target": what, "value": value, "limit": limit, "met": met, "why": None if met else _why(of)})

    if report["overall"]:
        aim("step time, all dense sets: mean error", report["overall"]["mape"], MAX_TIME)
        if not found[-1]["met"]:
            found[-1]["why"] = _far_off(report["sets"], report["overall"]["rows"])
    for name in TIME_SETS:
        if name in sets and sets[name]["time"]:
            aim(f"step time, {name}: mean error", sets[name]["time"]["mape"], MAX_TIME, sets[name])
            aim(
                f"step time, {name}: part of the floor's error",
                sets[name]["time"]["ratio_to_floor"],
                MAX_OF_FLOOR,
                sets[name],
            )
    for name in MEMORY_SETS:
        if name in sets and sets[name]["memory"] and "allocated" in sets[name]["memory"]:
            aim(f"memory, {name}: mean error", sets[name]["memory"]["allocated"]["mape"], MAX_MEMORY)
    for name in SCHEDULE_SETS:
        if name in sets and (cells := sets[name]["schedules"]):
            wrong = len(cells["cells"]) - cells["cells_right"]
            aim(f"schedules, {name}: cells in a wrong order", wrong, 0)
            aim(f"schedules, {name}: ratio to 1F1B, worst error", cells["worst_ratio_error"], MAX_RATIO)
            if not found[-1]["met"] and cells["worst_of_idle_time"] is not None:
                text = "the idle time that the source works out from its own times of an op misses by up to"
                found[-1]["why"] = f"{text} {100 * cells['worst_of_idle_time']:.0f} %"
    for name, each in sets.items():
        if name.startswith(SCALING_SETS) and each["scaling"]:
            aim(f"scaling, {name}: throughput a device, points", each["scaling"]["worst_points"], MAX_POINTS)
    return found


def _far_off(sets: list[dict[str, Any]], rows: int) -> str:
    """The sets that are furthest from the limit, by what they add to the mean of all rows beyond it."""
    beyond = {
        each["set"]: (each["time"]["mape"] - MAX_TIME) * each["time"]["rows"] / rows
        for each in sets
        if each["time"] and not each["weak"] and not each["fitted"] and each["time"]["mape"] > MAX_TIME
    }
    most = sorted(beyond.items(), key=lambda item: -item[1])[:4]
    return "beyond the limit are " + ", ".join(f"{name} ({100 * part:.1f} points of it)" for name, part in most)


def _why(of: dict[str, Any] | None) -> str | None:
    """What the errors of a set go with most, in words and numbers."""
    known = of["explained"] if of else None
    if not known:
        return None
    means = ", ".join(f"{value}: {100 * error:+.0f} %" for value, error in known["mean_error"].items())
    return f"{100 * known['share_of_variance']:.0f} % of the errors' variance goes with {known['property']} ({means})"
