"""Results as dictionaries -> tables and a progress bar for people at a terminal."""

from __future__ import annotations

import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from engine import archive
from engine.analysis import words
from engine.analysis.mfu import MFU_FORMULA
from engine.analysis.shares import BUBBLE_FORMULA, BUBBLE_OVER_IDEAL_FORMULA, OVERLAP_FORMULA
from engine.cost.calibration import COMMAND
from engine.launch import Handle
from engine.modes import Lesson
from engine.outcome.accuracy import explain, shared_with

BAR = 28  # characters
SHOWN_RANKS = 16


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= 0.9995 * scale:  # what would be read as 1000 of the next unit is 1 of this one
            return f"{value / scale:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} s"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


def size(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{round(value)} B"  # never -0


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def rows(pairs: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in pairs)


def each_rank(values: list, show) -> str:
    """`0: 3 MB  1–3: 2 MB`: ranks side by side that have the same are said together, and 16 such runs of them."""
    if not values:
        return "-"
    runs = [(value, list(ranks)) for value, ranks in groupby(range(len(values)), key=values.__getitem__)]
    if len(runs) == 1:
        return show(values[0]) + (" on every rank" if len(values) > 1 else "")
    names = [str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}" for _, ranks in runs]
    shown = "  ".join(f"{name}: {show(value)}" for name, (value, _) in zip(names, runs[:16], strict=False))
    return shown + (f"  ... {len(values)} ranks" if len(runs) > 16 else "")


def lesson(mode: str, text: Lesson) -> str:
    steps = "\n".join(f"    {i}. {step}" for i, step in enumerate(text.steps, 1))
    return f"{mode}: {text.title}\n  {text.idea}\n{steps}\n  Use it when: {text.use}\n  Limits: {text.limits}\n"


def prediction(summary: dict[str, Any]) -> str:
    what, machine = f"{summary['mode']} of {summary['model']} on {summary['devices']} devices", summary["machine"]
    head = f"{what}, predicted for the machine {machine}, one step:"
    return (
        head
        + "\n"
        + rows(
            [
                *scale_model(summary["scale_model"]),
                ("step time", seconds(summary["step_time"])),
                *_mean_step(summary),
                *_batches(summary),
                ("samples/s", "-" if summary["samples_per_second"] is None else f"{summary['samples_per_second']:.4g}"),
                *_bubbles(summary),
                *_communication(summary),
                *_mfu(summary),
                ("ops", str(summary["num_ops"])),
                ("peak memory", each_rank(summary["peak_memory"], size)),
                *_memory(summary["memory"], "  of it "),
                *_fits(summary.get("fits")),
                ("most in flight", each_rank(summary["peak_in_flight"], str) + " (a microbatch counts in each stage)"),
                ("sent", each_rank(summary["bytes_sent"], size)),
                *_waits(summary),
            ]
        )
        + (
            f"\n  on GPUs, where a send waits for its receive, {blocked}"
            if (blocked := summary["blocked_on_gpus"])
            else ""
        )
    )


def _mean_step(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Where ranks do not meet in every step."""
    mean = summary["mean_step_time"]
    told = f"{seconds(mean)}: ranks meet in few steps, of which the one above is one"
    return [("  mean step", told)] if mean != summary["step_time"] else []


def _fits(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Whether the fullest rank's memory is enough; if not what would be."""
    if not found or found["fits"] is None:
        return []
    if found["fits"]:
        told = f"yes: rank {found['rank']} needs most, {size(found['peak'])} of {size(found['capacity'])}"
        return [("fits", f"{told}, beside {size(found['runtime'])} that CUDA and NCCL hold")]
    more = f"; {found['ranks_over'] - 1} more ranks need too much" if found["ranks_over"] > 1 else ""
    peak, over, capacity = (size(found[name]) for name in ("peak", "over", "capacity"))
    why = f"no: rank {found['rank']} needs {peak}, {over} more than the {capacity} that PyTorch can have, most for"
    lines = [("fits", f"{why} {found['category']}{more}")]
    for one in found["would_fit"]:
        given = {name: value for name, value in one["settings"].items() if value is not None}
        words = " ".join(f"--{name.replace('_', '-')} {_word(value)}" for name, value in given.items())
        lines.append(("  would fit", f"{words}: {size(one['peak_memory'])}, a step in {seconds(one['step_time'])}"))
    return lines if found["would_fit"] else [*lines, ("  would fit", "none of the settings that were tried")]


def _word(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def scale_model(values: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What a paced run or prediction is, if it is one: never shown without its factor."""
    if values is None:
        return []
    text = f"{values['ratio']} of {values['machine']}, where a step takes {seconds(values['pictured_step_time'])}; "
    return [("scale model", text + "small tensors, and every op as long as there, times the factor")]


def _batches(values: dict[str, Any]) -> list[tuple[str, str]]:
    if "local_batch" not in values:  # a run of an earlier Lockstep
        return []
    batch = f"{values['global_batch']} samples a step: {values['local_batch']} on each of {values['replicas']} replicas"
    epoch = f"{values['batches_per_epoch']} batches on every replica; {values['samples_left_out']} of "
    return [("batch", batch), ("epoch", f"{epoch}{values['samples']} samples fill no batch and are left out")]


def _orders(repeated: list[dict[str, int]]) -> list[tuple[str, str]]:
    words = [f"rank {one['rank']} saw epoch {one['epoch']} in the order of epoch {one['like']}" for one in repeated[:3]]
    return [("order of samples", f"REPEATED: {'; '.join(words)} (set_epoch was not called)")] if words else []


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _bubbles(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Both definitions in use, each under its name."""
    names = (("bubble_fraction", BUBBLE_FORMULA), ("bubble_over_ideal", BUBBLE_OVER_IDEAL_FORMULA))
    pairs = [(formula.split(" = "), percent(values.get(name))) for name, formula in names]
    return [(name, f"{value} = {formula}") for (name, formula), value in pairs]


def _communication(values: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("exposed communication", percent(values["exposed_communication_fraction"]))]
    if "overlap_fraction" in values:  # a run of an earlier Lockstep has none
        name, formula = OVERLAP_FORMULA.split(" = ")
        hidden = values["overlap_fraction"]
        lines.append((name, "communication takes no time" if hidden is None else f"{percent(hidden)} = {formula}"))
    return lines


def _mfu(values: dict[str, Any]) -> list[tuple[str, str]]:
    """With both conventions of attention."""
    if not (found := values.get("mfu")):  # a run of an earlier Lockstep
        return []
    name, formula = MFU_FORMULA.split(" = ")
    if found["full"] is None:
        rate = "" if found["flop_rate"] is None else f"; {found['flop_rate'] / 1e12:.4g} TFLOP/s on each device"
        return [(name, f"{found['reason']}{rate}")]
    shown = f"{percent(found['full'])}, with attention's causal half {percent(found['causal'])}; HFU "
    return [(name, f"{shown}{percent(found['hfu'])}, of {found['peak_flop_rate'] / 1e12:.4g} TFLOP/s = {formula}")]


def _waits(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The critical path, idle time by cause, the largest gaps in words, and stragglers."""
    if reason := values.get("analysis_reason"):
        return [("critical path", f"not known: {reason}")]
    if not (path := values.get("critical_path")):  # a run of an earlier Lockstep
        return []
    idle, whole = values["idle_causes"], path["seconds"] or 1.0
    by_rank = "  ".join(f"{row['rank']}: {percent(row['seconds'] / whole)}" for row in path["by_rank"][:SHOWN_RANKS])
    lines = [
        ("critical path", _shares(path["by_kind"], whole)),
        ("  of ranks' own ops", by_rank or "-"),
        ("idle, all ranks", _shares({words.NAMES[k]: v for k, v in idle["seconds"].items()}, _idle(idle)) or "-"),
    ]
    lines += [
        ("" if i else "longest waits", words.sentence(gap, seconds(gap["seconds"])) + _alike(gap))
        for i, gap in enumerate(idle["largest"])
    ]
    for one in values["stragglers"]:
        told = f"rank {one['rank']} comes last in {one['last']} of {one['calls']} collectives"
        lines.append(("STRAGGLER", f"{told}, in all {seconds(one['seconds'])} a step after the others"))
    return lines


def _shares(of: dict[str, float], whole: float) -> str:
    largest = sorted(of.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{percent(value / whole)} {name.replace('_', '-')}" for name, value in largest if value > 0)


def _idle(idle: dict[str, Any]) -> float:
    return sum(idle["seconds"].values()) or 1.0


def _alike(gap: dict[str, Any]) -> str:
    more = gap["ranks"] - 1
    return f" (and {more} more {'rank' if more == 1 else 'ranks'} like it)" if more else ""


def dealt(values: dict[str, Any]) -> str:
    """Three ways to deal out samples, with a warning at each for what goes wrong with it."""
    head = f"{values['samples']} samples, {values['ranks']} ranks, batches of {values['batch']}:"
    blocks = []
    for way, found in values["ways"].items():
        lines = [("batches", "/".join(map(str, found["batches"][:16])) + _more(found["batches"], 16))]
        lines += [(f"rank {rank}", _numbers(mine)) for rank, mine in enumerate(found["samples"][:8])]
        lines += [("seen twice", _numbers(found["twice"]))] if found["twice"] else []
        lines += [("seen never", _numbers(found["never"]))] if found["never"] else []
        for one in found["runs_out"][:3]:
            lines.append(("WARNING", f"rank {one['rank']} runs out after {one['step']} steps: its peers wait for it"))
        counted = percent(found["accuracy"])
        lines.append(("accuracy", f"{counted} counted over ranks; each sample once: {percent(values['accuracy'])}"))
        blocks.append(f"{way}\n{rows(lines)}")
    return head + "\n" + "\n".join(blocks)


def _numbers(values: list[int]) -> str:
    return " ".join(map(str, values[:16])) + _more(values, 16)


def _more(values: list, shown: int) -> str:
    return f" ... {len(values)} in all" if len(values) > shown else ""


def result(values: dict[str, Any], run_dir: Path) -> str:
    parity, conformance = values["parity"], values["conformance"]
    step, predicted = values["step_time"], values["predicted_step_time"]
    off = f" (predicted {seconds(predicted)}: {percent(predicted / step - 1)} off)" if step and predicted else ""
    losses = [loss for loss in values["losses"] if loss is not None]
    lines = [
        ("run", f"{values['run_id']}  {values['status']}"),
        *scale_model(values.get("scale_model")),
        ("steps", f"{values['steps']} of {values['total_steps']}" + _resumed(values)),
        ("checkpoints", ", ".join(f"after {step} steps" for step in values.get("checkpoints", [])) or "-"),
        ("step time", seconds(step) + off),
        *_accuracy(values.get("accuracy")),
        ("samples/s", "-" if values["samples_per_second"] is None else f"{values['samples_per_second']:.4g}"),
        *_batches(values),
        ("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}, the mean over the global batch" if losses else "-"),
        ("local loss, last step", each_rank([r[-1] for r in values.get("local_losses", []) if r], _loss)),
        *_targets(values.get("targets")),
        *_orders(values.get("repeated_orders", [])),
        ("validation accuracy", percent(values["validation_accuracy"])),
        *([("validation", _evaluation(found[-1], len(found)))] if (found := values.get("evaluations")) else []),
        ("equals one device", _verdict(parity["ok"]) + _parity(parity)),
        ("ops as planned", _verdict(conformance["ok"]) + _conformance(conformance)),
        *_bubbles(values),
        *_communication(values),
        *_mfu(values),
        ("peak memory", each_rank(values["peak_memory"], size)),
        ("memory growth", each_rank(values.get("memory_growth", []), size) + " in 100 steps"),
        *_memory(values["memory"]["planned"], "planned "),
        *_memory(values["memory"]["measured"] or [], "measured "),
        *_waits(values),
        ("folder", str(run_dir)),
    ]
    head = f"{values['mode']} of {values['spec']['model']} on {values['devices']} {values['device_kind']} devices"
    return head + "\n" + rows(lines) + (f"\n{failure(values['error'])}" if values["error"] else "")


def _targets(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not found:
        return []
    over = f"{each_rank(found['counted'], str)}: a loss of {_loss(found['over_targets'])} over all of them"
    return [("targets, last step", f"{over}; the mean of the ranks' own means is {_loss(found['over_ranks'])}")]


def _accuracy(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Of each kind of op predicted and measured seconds of a mean rank in a step, and why the step is off."""
    if not found or found["step"]["measured"] is None:
        return []
    lines = []
    for row in found["ops"]:
        error = "" if row["error"] is None else f": {100 * row['error']:+.0f} %"
        lines.append((f"  {row['kind']}", f"{seconds(row['measured'])} (predicted {seconds(row['predicted'])}{error})"))
    why = explain(found["reason"], seconds) if found["reason"] else "as predicted"
    lines.append(("  the step", why))
    if at := found.get("at_speed"):  # runs of earlier days hold none
        error = f"{100 * at['error']:+.0f} %"
        told = f"{found['slower']:.2f} times what the same took when calibrated; at this speed"
        lines.append(("  the machine", f"{told} {seconds(at['predicted'])} are predicted: {error} ({COMMAND})"))
    if other := shared_with(found):
        lines.append(("  meanwhile", "other programs kept {other} of {cores} cores busy".format_map(other)))
    return lines


def _resumed(values: dict[str, Any]) -> str:
    done = values.get("first_step")
    if not done:
        return ""
    other = values.get("resumed_with") or {}  # a run of an earlier Lockstep does not say
    words = "".join(f", with {name} {each['to']} where it had {each['from']}" for name, each in other.items())
    return f", after the {done} of {values['spec']['resume'].partition(':')[0]}{words}"


def _evaluation(last: dict[str, Any], count: int) -> str:
    loss = "-" if last["loss"] is None else f"{last['loss']:.4f}"
    return f"loss {loss}, accuracy {percent(last['accuracy'])} after {last['step']} steps; {count} in all"


def _verdict(ok: bool | None) -> str:
    return "not checked" if ok is None else "yes" if ok else "NO"


def _parity(parity: dict[str, Any]) -> str:
    if exact := parity.get("exact"):
        distance = f"loss {parity['loss_max_abs_diff']:.1e}, parameters {parity['param_max_abs_diff']:.1e}"
        told = f": {parity['reason']}" if parity["ok"] is None else ""
        return f"{told} ({distance} apart); as designed: {_verdict(exact['ok'])}{_parity(exact)}"
    if parity["ok"] is None:
        return f": {parity['reason']}"
    allowed = parity["tolerance"]
    parts = []
    for name in allowed:
        value = "not finite" if parity[name] is None else f"{parity[name]:.1e}"
        parts.append(f"{name.split('_')[0]} {value} <= {allowed[name]:.0e}")
    reason = f"; {parity['reason']}" if parity["reason"] else ""
    return f", first {parity['steps']} steps: {', '.join(parts)}{reason}"


def _conformance(report: dict[str, Any]) -> str:
    text = f", {report['matched']} of {report['planned']} planned ops measured"
    if report.get("reason"):
        text += f" ({report['reason']})"
    if difference := report["first_difference"]:
        text += (
            f"; first difference on rank {difference['rank']}, step {difference['step']}: "
            f"planned {difference['planned']}, measured {difference['measured']}"
        )
    return text


def _memory(ranks: list[dict[str, int]], prefix: str) -> list[tuple[str, str]]:
    names = [name for name in (ranks[0] if ranks else ()) if any(held[name] for held in ranks)]
    return [(prefix + name, each_rank([held[name] for held in ranks], size)) for name in names]


def failure(error: dict[str, Any]) -> str:
    where = "" if error.get("rank") is None else f"rank {error['rank']}"
    where += "" if error.get("step") is None else f", step {error['step']}"
    where += f", in {error['op']}" if error.get("op") else ""
    return f"  error: {where}{': ' if where else ''}{error['message']}"


def status(values: dict[str, Any]) -> str:
    lines = [
        ("run", f"{values['run_id']}  {values['state']}"),
        ("mode", f"{values['mode']} on {values['devices']} devices"),
    ]
    return rows(lines) + (f"\n{failure(values['error'])}" if values["error"] else "")


def runs(listed: list[dict[str, Any]]) -> str:
    if not listed:
        return "There are no runs yet. Make one: python -m engine run --mode ddp --devices 2"
    lines = []
    for one in listed:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["created"])) if one.get("created") else "-"
        what = f"{one.get('mode') or '-'} x {one.get('devices') or '-'}"
        lines.append(f"{one['run_id']:<44} {made:<17} {what:<20} {one['state']}")
    return f"{'run':<44} {'made':<17} {'mode':<20} state\n" + "\n".join(lines)


def follow(handle: Handle, *, show: bool) -> None:
    """Return when the run has ended; meanwhile, on a terminal, a progress bar on standard error."""
    show = show and sys.stderr.isatty()
    while True:
        now = handle.poll()
        if show:
            done = BAR * now.step // max(1, now.total_steps)
            loss = f"  loss {now.losses[-1]:.4f}" if now.losses and now.losses[-1] is not None else ""
            speed = f"  {now.samples_per_second:.0f} samples/s" if now.samples_per_second else ""
            bar = f"[{'#' * done}{'.' * (BAR - done)}] {now.step}/{now.total_steps} steps{loss}{speed}"
            print(f"\r{now.state:<9} {bar}\x1b[K", end="", file=sys.stderr, flush=True)
        if now.state in archive.FINAL:
            break
        time.sleep(0.05)
    if show:
        print(file=sys.stderr)
