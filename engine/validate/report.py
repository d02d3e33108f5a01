"""A file's rows beside their predictions -> one object: set by set the errors, the floor's, families, refused rows.

All fractions are fractions, not percent; times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.validate import families, statistics
from engine.validate.collectives import Call
from engine.validate.compared import Compared, Predict, compare
from engine.validate.residuals import explain
from engine.validate.rows import Published, Unusable, read
from engine.validate.sample import sample
from engine.validate.spec_of import predicted
from engine.validate.targets import targets

Tell = Callable[[int, int], None]  # is given how many rows are done, and how many there are


def of_file(path: str | Path, *, rows: bool = False, tell: Tell | None = None) -> dict[str, Any]:
    """A file's report, from Lockstep's own predictions. SpecError where there is no such file."""
    published = read(path)
    count = len(published.rows)
    return validate(published, predicted, rows=rows, tell=None if tell is None else lambda done: tell(done, count))


def validate(
    published: Published, predict: Predict, *, rows: bool = False, tell: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """`rows`: with a line for each row, used or not."""
    used, calls, refused = compare(published.rows, predict, *([tell] if tell else []))
    floors = floor_seconds(used)
    by_group, unused = defaultdict(list), defaultdict(list)
    for each in used:
        by_group[each.row.group].append(each)
    not_used = [(row.id, row.group, why) for row, why in refused] + list(published.broken)
    for named, group, why in not_used:
        unused[group].append((named, why))
    calls_of = defaultdict(list)
    for call in calls:
        calls_of[call.row.group].append(call)
    groups = dict.fromkeys([*(row.group for row in published.rows), *unused])
    counted = [each for each in used if each.time and not each.fitted and not each.weak]
    new, routed = ([each for each in counted if each.case.dense == dense] for dense in (True, False))
    report = {
        "entries": len(published.rows) + len(published.broken),
        "used": len(used) + len(calls),
        "not_used": len(not_used),
        "overall": _time(new, floors),
        "overall_experts": _time(routed, floors),
        "overall_of": "rows whose figures were read in the source, of dense models, and not fitted",
        "sets": [_set(name, by_group[name], calls_of[name], unused[name], floors) for name in groups],
        "published_floor": published.meta.get("floor_model", {}),
    }
    report["overall_from"] = _contributions(new)
    report["targets"] = targets(report)
    if rows:
        report["rows"] = lines(used, floors)
        report["sample"] = sample(used)
        report["calls"] = [
            {
                "id": call.row.id,
                "set": call.row.group,
                "source": call.row.source,
                "kind": call.kind,
                "devices": call.ranks,
                "bytes": call.size,
                "measured_seconds": call.measured,
                "predicted_seconds": call.predicted,
                "error": call.error,
            }
            for call in calls
        ]
        report["rows_not_used"] = [{"id": named, "set": group, "why": str(why)} for named, group, why in not_used]
    return report


def _contributions(rows: Sequence[Compared]) -> dict[str, float]:
    """Of the mean error of all rows, what each set adds to it, largest first."""
    parts = defaultdict(float)
    for each in rows:
        parts[each.row.group] += abs(each.error) / len(rows)
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def floor_seconds(used: Sequence[Compared]) -> dict[str, float]:
    """What the one-constant model predicts for each row, by id: a constant for each set, device and precision."""
    parts = defaultdict(list)
    for each in used:
        if each.time:
            parts[each.row.group, each.part].append(each)
    seconds = {}
    for part in parts.values():
        loads = [statistics.floor_load(each.case) for each in part]
        predicted = statistics.floor(loads, [each.time.value for each in part])
        seconds |= {each.row.id: value for each, value in zip(part, predicted, strict=True)}
    return seconds


def _set(
    group: str,
    used: list[Compared],
    calls: list[Call],
    unused: list[tuple[str, Unusable]],
    floors: dict[str, float],
) -> dict[str, Any]:
    timed = [each for each in used if each.time]
    new = [each for each in timed if not each.fitted]
    routed = [each for each in new if not each.case.dense]
    alike = [each for each in new if each.case.dense] or new or timed  # a set is judged by one kind of model
    parts = defaultdict(list)
    for each in used:
        parts[each.part].append(each)
    return {
        "set": group,
        "rows": len(used) + len(calls) + len(unused),
        "used": len(used) + len(calls),
        "not_used": _reasons(unused),
        "without_time": _reasons([(each.row.id, each.why_no_time) for each in used if each.why_no_time]),
        "fitted": bool(timed) and not new,
        "fitted_rows": len(timed) - len(new),
        "weak": bool(used) and all(each.weak for each in used),
        "dense": any(each.case.dense for each in used),
        "time": _time(alike, floors),
        "time_of_experts": _time(routed, floors) if alike is not new and routed else None,
        "time_of_fitted": _time([each for each in timed if each.fitted], floors) if new else None,
        "memory": _memory(used),
        "collectives": statistics.errors([call.predicted for call in calls], [call.measured for call in calls]),
        "parts": [
            {"gpu": gpu, "precision": precision, "time": _time([e for e in part if e.time], floors)}
            for (gpu, precision), part in parts.items()
        ],
        "layouts": families.layouts(alike),
        "schedules": families.schedules(alike),
        "scaling": families.scaling(alike),
        "explained": explain(alike),
        "inferred": dict(Counter(text for each in [*used, *calls] for text in each.inferred)),
    }


def _reasons(unused: Sequence[tuple[str, Unusable]]) -> list[dict[str, Any]]:
    by_reason = defaultdict(list)
    for named, why in unused:
        by_reason[why.reason].append({"id": named, "detail": why.detail})
    return [{"reason": reason, "rows": len(rows), "of": rows} for reason, rows in by_reason.items()]


def _time(rows: Sequence[Compared], floors: dict[str, float]) -> dict[str, Any] | None:
    measured = [each.time.value for each in rows]
    ours = statistics.errors([each.predicted.seconds for each in rows], measured)
    return _beside_floor(ours, statistics.errors([floors[each.row.id] for each in rows], measured))


def _beside_floor(ours: dict | None, floor: dict | None) -> dict[str, Any] | None:
    if ours is None:
        return None
    ratio = ours["mape"] / floor["mape"] if floor["mape"] else None
    return ours | {"floor_mape": floor["mape"], "ratio_to_floor": ratio}


def _memory(used: Sequence[Compared]) -> dict[str, Any] | None:
    """Errors of each kind of figure: bytes allocated, reserved by the allocator, or used on the whole device."""
    kinds = {}
    for kind in dict.fromkeys(each.memory.kind for each in used if each.memory):
        rows = [each for each in used if each.memory and each.memory.kind == kind]
        measured = [each.memory.value for each in rows]
        floor = statistics.errors(statistics.constant(measured), measured)
        kinds[kind] = _beside_floor(statistics.errors([each.held for each in rows], measured), floor)
    known = [each for each in used if each.out_of_memory and each.case.memory_size]
    if known:
        seen = sum(each.predicted.memory > each.predicted.room for each in known)
        kinds["out_of_memory"] = {"rows": len(known), "predicted": seen}
    return kinds or None


def lines(used: Sequence[Compared], floors: dict[str, float]) -> list[dict[str, Any]]:
    """Each row that was used, in numbers."""
    return [
        {
            "id": each.row.id,
            "set": each.row.group,
            "source": each.row.source,
            "model": each.row.model.get("name") or each.case.preset or f"{each.case.layers} × {each.case.hidden}",
            "layout": families.layout_of(each.case),
            "devices": each.case.devices,
            "device": each.case.device,
            "precision": each.row.precision,
            "fitted": each.fitted,
            "weak": each.weak,
            "dense": each.case.dense,
            "measured_seconds": each.time.value if each.time else None,
            "predicted_seconds": each.predicted.seconds,
            "error": each.error if each.time else None,
            "floor_seconds": floors.get(each.row.id),
            "from": each.time.how if each.time else None,
            "measured_memory": each.memory.value if each.memory else None,
            "memory_kind": each.memory.kind if each.memory else None,
            "predicted_memory": each.held,
            "inferred": list(each.inferred),
        }
        for each in used
    ]
