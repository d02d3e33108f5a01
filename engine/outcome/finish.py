"""A run folder whose workers have ended -> timeline.parquet and result.json: measured, proven, and as predicted."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from engine import checkpoints, modes
from engine.analysis.shares import (
    bubble_fraction,
    bubble_over_ideal,
    exposed_communication_fraction,
    overlap_fraction,
)
from engine.analysis.summary import nothing, of_run
from engine.archive import read_json, read_status, read_steps, write_json
from engine.asking.masked import means
from engine.cost import calibration
from engine.cost.calibration import PROBING, num_cores
from engine.cost.machine import machine
from engine.cost.memory import CATEGORIES, METHOD, errors
from engine.job import Job, prepare
from engine.modes import FIRST_STEADY_STEP
from engine.outcome import periods
from engine.outcome.accuracy import accuracy, without_waiting
from engine.outcome.conform import conform
from engine.outcome.health import local_losses, memory_growth, repeated_orders
from engine.plan import Plan
from engine.predict import Prediction, predict
from engine.scale_model.paced import MINIATURE, TABLE
from engine.scale_model.pictured import trained
from engine.spec import Spec
from engine.timeline import NONE, Span, Timeline

LONG_ENOUGH = 0.25  # seconds: a twenty-fifth of them is a tick of the kernel's clock, on each core
MAX_PLANS = 16  # that are kept: each step of a long run may have its own

Routed = tuple[dict[str, list[list[int]]], ...]  # see Job.routed


def finish(run_dir: str | Path, state: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read what the workers left, write the timeline and the result, return the result.

    `state` is finished, stopped or failed. A run that ended early gets the same result from the steps that it did.
    """
    folder = Path(run_dir)
    asked = prepare(Spec.from_dict(read_json(folder / "spec.json")))
    job = trained(asked)
    steps = [read_steps(folder, rank) for rank in range(job.processes)]
    done = min((len(rows) for rows in steps), default=0)
    routed = [_routed(steps, step) for step in range(done)]
    spans = list(read_spans(folder, job.processes))
    plan_of = _plans(job, routed)
    conformance, spans = _conformance(job, spans, plan_of, done, early=state != "finished")
    timeline = Timeline.of(settle(spans), "measured", job.spec.devices)
    timeline.save(folder / "timeline.parquet")
    steady = range(min(FIRST_STEADY_STEP, max(done - 1, 0)), done)
    turns = periods.whole(steady, modes.period(job))
    step_time = median(periods.seconds(steps, turn) for turn in turns) if done else None
    whole = timeline.where(timeline["step"] < done)
    validation = folder / "validation.json"
    prediction = predict(asked.spec)
    (folder / TABLE).unlink(missing_ok=True)
    on_its_machine = job.spec.device == "cuda" or asked.spec.paced is not None
    result = {
        "run_id": folder.name,
        "status": state,
        "mode": job.spec.mode,
        "devices": job.spec.devices,
        "device_kind": job.spec.device,
        "steps": done,
        "total_steps": job.steps,
        "first_step": job.first_step,
        "resumed_with": checkpoints.changed(job.spec, folder.parent) if job.spec.resume is not None else None,
        "checkpoints": checkpoints.steps_of(folder),
        "warmup_steps": steady.start,
        "step_time": step_time,
        "predicted_step_time": prediction.mean_step_time,
        "scale_model": _scale_model(job, prediction),
        "samples_per_second": job.spec.global_batch / step_time if step_time else None,
        **job.batches,
        "losses": [_mean(rows[s]["loss"] for rows in steps) for s in range(done)],
        "local_losses": local_losses(steps, done),
        "repeated_orders": repeated_orders(steps),
        "grad_norms": [steps[0][s].get("grad_norm") for s in range(done)] if job.spec.clip is not None else None,
        "evaluations": [row["evaluation"] for row in steps[0][:done] if "evaluation" in row],
        "validation_accuracy": read_json(validation)["accuracy"] if validation.exists() else None,
        "parity": _parity(folder, job, state, done),
        "conformance": conformance,
        "accuracy": _accuracy(folder, job, prediction, whole, steps, steady),
        "expert_tokens": _expert_tokens(job, routed),
        "targets": _targets(steps, done),
        "memory": _memory(folder, asked, prediction),
        "peak_memory": _peak_memory(job, steps),
        "memory_growth": _each_device(job, [memory_growth(rows) for rows in steps]),
        "bubble_fraction": bubble_fraction(whole, since=steady.start) if len(whole) else None,
        "bubble_over_ideal": bubble_over_ideal(whole, since=steady.start) if len(whole) else None,
        "exposed_communication_fraction": (
            exposed_communication_fraction(whole, since=steady.start) if len(whole) else None
        ),
        "overlap_fraction": overlap_fraction(whole, since=steady.start) if len(whole) else None,
        # The peak of the machine that was named says nothing of the CPU on which it ran.
        "mfu": prediction.utilisation(step_time, prediction.machine if on_its_machine else None),
        # What waits for what is as it is pictured, with as many tokens for each expert.
        **_analysis(asked, whole, plan_of if asked is job else _plans(asked, [None] * done), steady, conformance),
        "wall_time": _wall_seconds(folder, steps),
        "error": error,
        "spec": asked.spec.to_dict(),
    }
    write_json(folder / "result.json", result)
    return result


def _scale_model(job: Job, prediction: Prediction) -> dict[str, Any] | None:
    """What a scale model shows, and the sizes of the miniature (`job`) that it is made of; null of any other run.
    Times of the run are `dilation` times those of what is pictured."""
    if prediction.scale_model is None:
        return None
    sizes = {name: getattr(job.spec, name) for name in MINIATURE}
    return prediction.scale_model | {"miniature": {name: size for name, size in sizes.items() if size is not None}}


def read_spans(folder: Path, processes: int) -> Iterable[Span]:
    """Every span that the workers wrote. A worker that was killed may leave half a line at the end of its file."""
    for rank in range(processes):
        path = folder / f"rank{rank}.jsonl"
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        yield from (Span(*json.loads(line)) for line in lines if line.endswith("\n"))


def settle(spans: list[Span]) -> list[Span]:
    """Tell waiting from moving in a message: it moves from its send to the end of its receive.

    A receive is entered early and waits for its sender. A send's end is seen only when somebody asks for it, and its
    start is noted just after it was handed to gloo, so on a busy machine the receive can have ended by then. The k-th
    send from a to b in a step is the k-th receive there.
    """
    sends: dict[tuple, deque[int]] = defaultdict(deque)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        if spans[i].kind == "send":
            sends[spans[i].step, spans[i].rank, spans[i].peer].append(i)
    settled = list(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        recv = spans[i]
        queue = sends.get((recv.step, recv.peer, recv.rank)) if recv.kind == "recv" and recv.peer != NONE else None
        if queue:
            j = queue.popleft()
            send = spans[j]
            sent = min(send.start, recv.end)
            settled[i] = recv._replace(start=min(max(recv.start, sent), recv.end))
            settled[j] = send._replace(start=sent, end=max(sent, min(send.end, recv.end)))
    return settled


def _routed(steps: list[list[dict]], step: int) -> Routed | None:
    """What the routers of each rank chose in a step (see Job.routed); None where there are none."""
    each = tuple(rows[step].get("routed", {}) for rows in steps)
    return each if any(each) else None


def _expert_tokens(job: Job, routed: list[Routed | None]) -> dict[str, Any] | None:
    """Tokens that each expert of each block got in a step from all ranks: in the `last` one, and in the `mean` one.
    `even`: as many as each would get if all got the same."""
    totals: list[dict[str, np.ndarray]] = []
    for step in filter(None, routed):
        apart = step[:: job.routing_alike]
        blocks = sorted({name for rank in apart for name in rank}, key=[layer.name for layer in job.layers].index)
        totals.append({name: sum(np.array(rank[name]).sum(0) for rank in apart if name in rank) for name in blocks})
    if not totals:
        return None
    mean = {name: sum(step[name] for step in totals) / len(totals) for name in totals[-1]}
    return {
        "even": job.spec.global_batch * job.spec.context * job.spec.top_k / job.spec.experts,
        "last": {name: counts.tolist() for name, counts in totals[-1].items()},
        "mean": {name: counts.tolist() for name, counts in mean.items()},
    }


def _targets(steps: list[list[dict]], done: int) -> dict[str, Any] | None:
    """Where targets are left out: of the last step how many each rank with a loss had, and its mean loss over them all
    beside the mean of these ranks' means."""
    last = [rows[done - 1] for rows in steps if done and "targets" in rows[done - 1]]
    return means([row["target_loss"] for row in last], [row["targets"] for row in last]) if last else None


def _plans(job: Job, routed: list[Routed | None]) -> Callable[[int], Plan]:
    """The plan of each step done. Sizes that depend on the data are planned from what the routers counted, on the ranks
    that send; what is measured are tensors, also on the ranks that receive. Where there are none, steps share plans."""
    made = functools.lru_cache(MAX_PLANS)(lambda step: modes.plan(replace(job, routed=routed[step]), step))
    return lambda step: made(step if routed[step] else modes.first_alike(job, step))


def _conformance(
    job: Job, spans: list[Span], plan_of: Callable[[int], Plan], done: int, *, early: bool
) -> tuple[dict[str, Any], list[Span]]:
    if not job.spec.record:
        nothing = {"ok": None, "planned": 0, "measured": 0, "matched": 0, "first_difference": None}
        return nothing | {"reason": "recording was off"}, spans
    if job.spec.device == "cuda" and job.spec.mode == "data_parallel":
        nothing = {"ok": None, "planned": 0, "measured": len(spans), "matched": 0, "first_difference": None}
        return nothing | {"reason": "on GPUs nn.DataParallel's own copies are not recorded"}, spans
    # A worker that was killed keeps the spans of its last window to itself, so only steps seen on all ranks count.
    seen: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        seen[span.step].add(span.rank)
    whole = [step for step in range(done) if len(seen[step]) == job.spec.devices]
    report, joined = conform(spans, plan_of, whole)
    report |= {"steps": len(whole), "routed": job.expert_axis != "", "reason": None}
    if not whole:
        report |= {"ok": None if early else False, "reason": "no step was recorded on every rank"}
    return report, joined


def _analysis(
    job: Job, timeline: Timeline, plan_of: Callable[[int], Plan], steps: Iterable[int], conformance: dict[str, Any]
) -> dict[str, Any]:
    """What ranks waited for, in the steps that all of them recorded."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for step, rank in zip(timeline["step"].tolist(), timeline["rank"].tolist(), strict=True):
        ranks[step].add(rank)
    seen = [step for step in steps if len(ranks[step]) == job.spec.devices]
    if not conformance["ok"]:
        return nothing(conformance["reason"] or "the ops measured are not those planned")
    crowded = job.spec.device != "cuda" and job.processes > (os.cpu_count() or 1) and job.spec.paced is None
    return of_run(timeline, plan_of, seen, crowded=crowded)


def _accuracy(
    folder: Path,
    job: Job,
    prediction: Prediction,
    timeline: Timeline,
    steps: list[list[dict]],
    steady: range,
) -> dict[str, Any] | None:
    """Predicted against measured, in the steps that are as the predicted one; of a run on this machine's cores by what
    is predicted for the machine `local`, of a scale model for what it shows, and of one on GPUs for the machine that
    was asked for. None where that machine is no device's: nothing is compared."""
    on_cpu = job.spec.device == "cpu"
    if not on_cpu and machine(job.spec.machine, "cuda").cores:
        return None
    if on_cpu and job.spec.machine != "local":
        prediction = predict(job.spec.with_(machine="local"))
    turns = periods.whole(steady, modes.period(job))
    waits = [rows[step].get("waited") for rows in steps for turn in turns for step in turn]
    waited = None if not waits or None in waits else sum(waits) / len(waits)
    found = accuracy(
        periods.predicted(prediction),
        without_waiting(periods.measured(timeline.in_turn(), turns), prediction.plan.mesh),
        step_times=[periods.seconds(steps, turn) for turn in turns],
        predicted_step_time=prediction.mean_step_time,
        waited=waited,
        predicted_waited=_waited(prediction) / job.spec.devices,
        ranks=job.processes,
        cores=num_cores(),
        slower=_slower(folder, job.processes) if on_cpu and job.spec.paced is None else None,
    )
    found |= {"cores": num_cores(), "other_cores": other_cores(steps, steady)}
    paced = prediction.job.spec.paced
    of_here = paced is None and (on_cpu or job.spec.machine == "local")
    source = calibration.find().source if of_here else None
    return {"machine": paced or ("local" if on_cpu else job.spec.machine), "calibration": source, **found}


def _waited(prediction: Prediction) -> float:
    """Seconds in a mean step in which ranks wait for a core, of all of them together."""
    last, between = prediction.simulation, prediction.between
    count = 1 if between is None else modes.period(prediction.job)
    others = 0.0 if between is None else sum(between.per_rank(between.waited))
    return (sum(last.per_rank(last.waited)) + (count - 1) * others) / count


def _slower(folder: Path, processes: int) -> float | None:
    """How many times as long this machine took for a small training after the run's last step as when it was
    calibrated. None where the run ended before."""
    files = [read_json(folder / f"rank{rank}.speed.json") for rank in range(min(processes, PROBING))]
    if not all(files):
        return None
    return calibration.find().calibration.slower(processes, fmean(file["step_seconds"] for file in files))


def other_cores(steps: list[list[dict]], steady: range) -> float | None:
    """How many cores other programs kept busy while these steps ran, in the mean: the time for which cores were busy,
    without what the ranks used. None where the kernel does not tell, or where its clock's ticks are too coarse."""
    if len(steady) < 2:
        return None
    first, last = ([rows[step] for rows in steps] for step in (steady[0], steady[-1]))
    begin, end = (max(row["end"] for row in rows) for rows in (first, last))
    known = [rows[0].get("busy") for rows in (first, last)]
    if end - begin < LONG_ENOUGH or None in known:
        return None
    own = sum(after["cpu"] - before["cpu"] for before, after in zip(first, last, strict=True))
    return max(0.0, known[1] - known[0] - own) / (end - begin)


def _parity(folder: Path, job: Job, state: str, done: int) -> dict[str, Any]:
    path = folder / "parity.json"
    if path.exists():
        return read_json(path)
    asked = job.parity_steps
    reason = "parity-steps is 0" if not asked else f"the run {state} after {done} steps; parity needs {asked}"
    keys = ("loss_max_abs_diff", "grad_max_rel_diff", "param_max_abs_diff", "tolerance")
    return {"ok": None, **dict.fromkeys(keys), "reason": reason, "steps": 0}


def _mean(losses: Iterable[float | None]) -> float | None:
    """The global loss: ranks that compute one see equally many samples. A loss that is not finite becomes None."""
    known = [loss for loss in losses if loss is not None]
    mean = sum(known) / len(known) if known else math.nan
    return mean if math.isfinite(mean) else None


def _peak_memory(job: Job, steps: list[list[dict]]) -> list[int | None]:
    """Bytes, one a rank: on the CPU what the process grew by. nn.DataParallel's one process stands for each device."""
    return _each_device(job, [max((row["memory"] for row in rows), default=None) for rows in steps])


def _each_device(job: Job, values: list) -> list:
    return values if len(values) == job.spec.devices else values * job.spec.devices


def _memory(folder: Path, job: Job, prediction: Prediction) -> dict[str, Any]:
    """Bytes by category, one entry a rank; `measured` is null where it was not, and `reason` says why."""
    planned = prediction.simulation.per_rank(prediction.simulation.memory)
    found = {"categories": list(CATEGORIES), "planned": planned, "measured": None, "error": None}
    files = [read_json(folder / f"rank{rank}.memory.json") for rank in range(job.processes)]
    if all(files):
        measured = [held for file in files for held in file["devices"]]
        return found | {"measured": measured, "error": errors(planned, measured), "method": METHOD, "reason": None}
    if job.spec.paced is not None:
        reason = "a scale model has small tensors"
    elif not job.spec.measure_memory:
        reason = "measure-memory was off"
    elif job.spec.device == "cuda" and job.spec.mode == "data_parallel":
        reason = "the threads of nn.DataParallel are not tracked"
    else:
        reason = "the run ended before its memory was measured"
    return found | {"method": None, "reason": reason}


def _wall_seconds(folder: Path, steps: list[list[dict]]) -> float | None:
    """From the request to the end of the last step."""
    ends = [rows[-1]["end"] for rows in steps if rows]
    return max(ends) - read_status(folder)["created"] if ends else None
