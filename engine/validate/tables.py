"""A report -> tables for people at a terminal."""

from __future__ import annotations

import sys
from typing import Any

HEAD = ("set", "used", "of", "error", "bias", "p90", "max", "floor", "ratio", "")


def tell(done: int, count: int) -> None:
    """On one line, beside what is printed in the end."""
    print(f"\r{done + 1} of {count} rows ", end="\n" if done + 1 == count else "", file=sys.stderr, flush=True)


def report(found: dict[str, Any]) -> str:
    """Sets with their errors beside the one-constant model's, families, aims, and why rows were not used."""
    parts = [_times(found), *(_section(title, rows) for title, rows in _sections(found) if rows)]
    return "\n\n".join(parts)


def percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([title, *(f"  {row}" for row in rows)])


def _times(found: dict[str, Any]) -> str:
    rows = [HEAD]
    for each in found["sets"]:
        rows.append(_errors(each["set"], each["used"], each["rows"], each["time"], _remark(each)))
        if each["time_of_fitted"]:
            fitted = each["time_of_fitted"]
            rows.append(_errors("  its fitted rows", fitted["rows"], fitted["rows"], fitted, "fitted"))
        if each["time_of_experts"]:
            routed = each["time_of_experts"]
            rows.append(_errors("  its rows with experts", routed["rows"], routed["rows"], routed, ""))
        if len(each["parts"]) > 1:
            for part in each["parts"]:
                count = part["time"]["rows"] if part["time"] else 0
                rows.append(_errors(f"  {part['gpu']}, {part['precision']}"[:44], count, count, part["time"], ""))
    for name, of in (("dense", "overall"), ("with experts", "overall_experts")):
        if overall := found[of]:
            title = f"all: {name}, verified, not fitted"
            rows.append(_errors(title, overall["rows"], found["entries"], overall, ""))
    return "step time: error is the mean of |predicted / measured - 1|\n" + _table(rows)


def _remark(each: dict[str, Any]) -> str:
    return "fitted" if each["fitted"] else "weak source" if each["weak"] else ""


def _errors(name: str, used: int, rows: int, errors: dict[str, Any] | None, remark: str) -> tuple[str, ...]:
    if errors is None:
        return (name, str(used), str(rows), *["-"] * 6, remark)
    ratio = "-" if errors["ratio_to_floor"] is None else f"{errors['ratio_to_floor']:.2f}"
    return (
        name,
        str(used),
        str(rows),
        percent(errors["mape"]),
        percent(errors["bias"], signed=True),
        percent(errors["p90"]),
        percent(errors["max"]),
        percent(errors["floor_mape"]),
        ratio,
        remark,
    )


def _sections(found: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [
        ("memory of the fullest rank", _memory(found["sets"])),
        ("collectives alone", _collectives(found["sets"])),
        ("layouts of one model, batch and number of devices", _layouts(found["sets"])),
        ("schedules beside 1F1B", _schedules(found["sets"])),
        ("throughput a device from fewest to most devices", _scaling(found["sets"])),
        ("what the errors go with", _explained(found["sets"])),
        ("aims", _targets(found["targets"])),
        ("rows not used", _not_used(found["sets"])),
        ("taken for granted", _inferred(found["sets"])),
        ("rows", _rows(found.get("rows", []))),
    ]


def _memory(sets: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in sets:
        for kind, errors in (each["memory"] or {}).items():
            if kind == "out_of_memory":
                lines.append(
                    f"{each['set']}: {errors['predicted']} of {errors['rows']} rows that ran out are predicted to"
                )
                continue
            text = f"error {percent(errors['mape'])}, bias {percent(errors['bias'], signed=True)}"
            lines.append(f"{each['set']}, {kind}: {errors['rows']} rows, {text}, max {percent(errors['max'])}")
    return lines


def _collectives(sets: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['set']}: {errors['rows']} rows, error {percent(errors['mape'])}, bias {percent(errors['bias'], True)}"
        for each in sets
        if (errors := each["collectives"])
    ]


def _layouts(sets: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['set']}: {len(found['families'])} families of {found['rows']} rows, rank correlation "
        f"{found['spearman']:.2f}; the layout predicted best takes up to {percent(found['worst_regret'])} longer"
        for each in sets
        if (found := each["layouts"])
    ]


def _schedules(sets: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['set']}: order right in {found['cells_right']} of {len(found['cells'])} cells; throughput beside "
        f"1F1B's off by at most {percent(found['worst_ratio_error'])}"
        for each in sets
        if (found := each["schedules"])
    ]


def _scaling(sets: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in sets:
        for one in (each["scaling"] or {"series": []})["series"]:
            last = one["efficiencies"][-1]
            lines.append(
                f"{each['set']}, {one['part']}, {one['layout']}: {one['from_devices']} to {one['to_devices']} devices, "
                f"measured {percent(last['measured'])}, predicted {percent(last['predicted'])}"
            )
    return lines


def _explained(sets: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in sets:
        if (found := each["explained"]) is not None:
            means = ", ".join(f"{value}: {percent(error, signed=True)}" for value, error in found["mean_error"].items())
            lines.append(f"{each['set']}: {percent(found['share_of_variance'])} with {found['property']} ({means})")
    return lines


def _targets(targets: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in targets:
        why = f"; {each['why']}" if each["why"] else ""
        met = "met" if each["met"] else "NOT met"
        lines.append(f"{met:>7}  {each['target']}: {each['value']:.3g} (at most {each['limit']:.3g}){why}")
    return lines


def _not_used(sets: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in sets:
        for why in [*each["not_used"], *each["without_time"]]:
            details = [one["detail"] for one in why["of"] if one["detail"]]
            example = f" ({details[0]})" if details else ""
            lines.append(f"{each['set']}: {why['rows']} rows: {why['reason']}{example}")
    return lines


def _inferred(sets: list[dict[str, Any]]) -> list[str]:
    return [f"{each['set']}: {count} rows: {text}" for each in sets for text, count in each["inferred"].items()]


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    table = [("row", "layout", "measured", "predicted", "error", "floor")]
    for row in rows:
        if row["measured_seconds"] is None:
            continue
        floor = row["floor_seconds"] / row["measured_seconds"] - 1
        table.append(
            (
                row["id"],
                row["layout"],
                f"{row['measured_seconds']:.4g} s",
                f"{row['predicted_seconds']:.4g} s",
                percent(row["error"], signed=True),
                percent(floor, signed=True),
            )
        )
    return _table(table).splitlines()
