"""Compared rows -> families: rows of one set that differ only in the layout, only in the schedule, or only in scale.

A family answers what a mean error cannot: is the better of two layouts predicted to be better, and by how much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from engine.validate.case import Case
from engine.validate.compared import Compared
from engine.validate.statistics import order, regret, spearman

ENOUGH = 3  # rows of a family of layouts: two of them have no order worth a correlation


def _model(case: Case) -> tuple:
    shape = (case.layers, case.hidden, case.heads, case.ffn, case.context, case.vocabulary, case.experts)
    return (*shape, case.precision, case.device, case.row.hardware.get("gpu"), case.recompute)


def _same_work(case: Case) -> tuple:
    return (*_model(case), case.devices, case.global_batch)


def _same_but_schedule(case: Case) -> tuple:
    return (*_same_work(case), case.tp, case.pp, case.cp, case.ep, case.micro_batch, case.zero)


def _same_but_scale(case: Case) -> tuple:
    layout = (case.tp, case.pp, case.cp, case.ep, case.micro_batch, case.stages_per_rank, case.zero, case.schedule)
    return (*_model(case), *layout, case.row.source, case.row.notes)


def layout_of(case: Case) -> str:
    degrees = {axis: getattr(case, axis) for axis in ("tp", "pp", "cp", "ep", "dp") if getattr(case, axis) > 1}
    text = " ".join(f"{axis}{degree}" for axis, degree in degrees.items())
    schedule = f" {case.schedule}" if case.schedule else ""
    stages = f" x{case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"{text} micro-batch {case.micro_batch}{schedule}{stages}".strip()


def _families(rows: Sequence[Compared], key: Callable[[Case], tuple], least: int) -> list[list[Compared]]:
    families = defaultdict(list)
    for each in rows:
        if each.time is not None:
            families[key(each.case)].append(each)
    return [family for family in families.values() if len(family) >= least]


def layouts(rows: Sequence[Compared]) -> dict[str, Any] | None:
    """Rank correlation, and how far the layout predicted best is from the one measured best, over all families of one
    model, one batch and one number of devices; None where the set has none."""
    found = []
    for family in _families(rows, _same_work, ENOUGH):
        if len({layout_of(each.case) for each in family}) < ENOUGH:
            continue
        predicted = [each.predicted.seconds for each in family]
        measured = [each.time.value for each in family]
        correlation = spearman(predicted, measured)
        if correlation is None:
            continue
        best = [min(family, key=lambda each: each.predicted.seconds), min(family, key=lambda each: each.time.value)]
        found.append(
            {
                "rows": len(family),
                "model": f"{family[0].case.layers} x {family[0].case.hidden}",
                "devices": family[0].case.devices,
                "global_batch": family[0].case.global_batch,
                "spearman": correlation,
                "regret": regret(predicted, measured),
                "predicted_best": layout_of(best[0].case),
                "measured_best": layout_of(best[1].case),
            }
        )
    if not found:
        return None
    rows_in = sum(family["rows"] for family in found)
    return {
        "families": found,
        "rows": rows_in,
        "spearman": sum(family["spearman"] * family["rows"] for family in found) / rows_in,
        "worst_regret": max(family["regret"] for family in found),
    }


def schedules(rows: Sequence[Compared]) -> dict[str, Any] | None:
    """Cells in which only the schedule differs: pairs in the right order, and each throughput's ratio to 1F1B's."""
    cells = []
    for family in _families(rows, _same_but_schedule, 2):
        by_name = {layout_of(each.case): each for each in family}
        plain = next((each for each in family if each.case.schedule == "1f1b"), None)
        if len(by_name) < 2 or plain is None:
            continue
        predicted = {name: each.predicted.seconds for name, each in by_name.items()}
        measured = {name: each.time.value for name, each in by_name.items()}
        right, pairs = order(predicted, measured)
        ratios = {
            each.row.id: {
                "measured": plain.time.value / each.time.value,
                "predicted": plain.predicted.seconds / each.predicted.seconds,
            }
            for each in family
            if each is not plain
        }
        for each in family:
            if each is not plain and (ideal := _of_idle_time(each, plain)) is not None:
                ratios[each.row.id]["of_idle_time"] = ideal
        worst = max(abs(ratio["predicted"] / ratio["measured"] - 1) for ratio in ratios.values())
        cells.append(
            {
                "cell": f"{plain.case.layers} x {plain.case.hidden}, {plain.case.microbatches} micro-batches",
                "pairs_right": right,
                "pairs": pairs,
                "ratios_to_1f1b": ratios,
                "worst_ratio_error": worst,
            }
        )
    if not cells:
        return None
    known = [ratio for cell in cells for ratio in cell["ratios_to_1f1b"].values() if "of_idle_time" in ratio]
    return {
        "worst_of_idle_time": max((abs(r["of_idle_time"] / r["measured"] - 1) for r in known), default=None),
        "cells": cells,
        "cells_right": sum(cell["pairs_right"] == cell["pairs"] for cell in cells),
        "worst_ratio_error": max(cell["worst_ratio_error"] for cell in cells),
    }


def _of_idle_time(each: Compared, plain: Compared) -> float | None:
    """The ratio to 1F1B that follows from the idle parts of a step which the source itself works out, if it does."""
    idle = [one.row.metric("theoretical_bubble_rate") for one in (each, plain)]
    return None if None in idle else (1 - idle[0].value) / (1 - idle[1].value)


def scaling(rows: Sequence[Compared]) -> dict[str, Any] | None:
    """Series in which only the number of devices, and perhaps the batch, grows: throughput a device beside that of the
    smallest, measured and predicted, and how many points of percent these are apart at the largest."""
    series = []
    for family in _families(rows, _same_but_scale, 2):
        by_devices = {each.case.devices: each for each in sorted(family, key=lambda each: each.row.id)}
        if len(by_devices) < 2:
            continue
        (_, first), *rest = sorted(by_devices.items())
        points = [
            {
                "devices": devices,
                "measured": _rate(each, each.time.value) / _rate(first, first.time.value),
                "predicted": _rate(each, each.predicted.seconds) / _rate(first, first.predicted.seconds),
            }
            for devices, each in rest
        ]
        apart = abs(points[-1]["predicted"] - points[-1]["measured"])
        series.append(
            {
                "from_devices": first.case.devices,
                "to_devices": rest[-1][0],
                "layout": layout_of(first.case),
                "part": " ".join(first.part),
                "efficiencies": points,
                "points": 100 * apart,
            }
        )
    if not series:
        return None
    return {"series": series, "worst_points": max(one["points"] for one in series)}


def _rate(each: Compared, seconds: float) -> float:
    return each.case.global_batch / seconds / each.case.devices
