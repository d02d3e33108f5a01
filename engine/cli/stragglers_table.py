"""Who came last to each communication, and how long each rank waited in them -> a table for people at a terminal."""

from __future__ import annotations

from typing import Any

from engine.cli.tables import percent, rows, seconds


def late(report: dict[str, Any]) -> str:
    """A line a communication, then a line a rank that came last to any, then one for each rank's time in them."""
    lines = []
    for one in report["collectives"]:
        who = "all at once" if one["last"] is None else f"rank {one['last']} last"
        times = f"the first waits {seconds(one['longest'])}, the others on average {seconds(one['waited'])}"
        between = "" if one["ends"] is None else f", {one['ends'][0]} to {one['ends'][1]}"
        told = f"{who}; {times}" if one["last"] is not None else who
        lines.append((f"{one['call']}  {one['name'][:40]}{between}", told))
    for one in report["ranks"]:
        told = f"last to {one['last']} of {one['calls']}, in all {seconds(one['seconds'])} after the others"
        lines.append((f"rank {one['rank']}", told))
    for one in report["inside"]:
        whole = one["waiting"] + one["transfer"]
        share = f" ({percent(one['waiting'] / whole)})" if whole else ""
        told = f"waits {seconds(one['waiting'])}{share} for others to come, then {seconds(one['transfer'])} of transfer"
        lines.append((f"rank {one['rank']} inside", told))
    if report["unmatched"]:
        told = "without another rank's part in these files, or with several messages in one kernel"
        lines.append((f"{report['unmatched']} left out", told))
    return rows(lines)
