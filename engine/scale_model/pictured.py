"""A job to be run as a scale model -> the miniature that is trained, and the factor by which it is slower.

The miniature has the same mode, mesh, schedule, layers and micro-batches, and small tensors: rank by rank, op i of its
plan is op i of the plan of what is pictured. A worker makes each op last as long as the pictured one would, times one
factor (`Spec.dilation`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict

import numpy as np

from engine import modes
from engine.asking import slow
from engine.asking.rules import SpecError
from engine.asking.settings import ONE_BUCKET_MB, PLANNED_EXPERTS, PLANNED_SIZES, TOKEN_MODELS, degrees, planned_only
from engine.cost.local import run_by
from engine.cost.machine import Machine, machine
from engine.graph.columns import Ops
from engine.job import Job, prepare
from engine.model.presets import family
from engine.modes.ddp.buckets import MIB
from engine.plan import COLLECTIVES, Plan, Program
from engine.simulation import Simulation, simulate

STEP = 1.5  # seconds that a step takes, unless its ops are too many for that
# Seconds of one core that a layer of a miniature takes in a pass, a message and a collective, with all that PyTorch
# does around them; what a backward in halves, DTensor and fully_shard add to a layer or a piece of it; and how much of
# two cores the ranks may take together, to sleep most of the time. By processor time of the workers, 4 ranks, torch
# 2.13; of DTensor and fully_shard twice that, since all ranks want the cores at the same moments.
LAYER_WORK, MESSAGE_WORK, COLLECTIVE_WORK = 1.1e-3, 1.2e-3, 1.8e-3
HALF_WORK, SHARDED_WORK, CUT_WORK = 0.5e-3, 5e-3, 8e-3
CORES, LOAD = 2, 0.4
LARGER_MB = (100.0, 400.0, 1600.0, ONE_BUCKET_MB)  # of buckets, where those that were asked for cannot be had
STARTS = 40  # gradients, the first ones, at which runs that are tried as buckets begin
WIDTH, TOKENS = 32, 8  # of a miniature, at least


def at_scale(job: Job) -> Job:
    """A job that is to be run, with the factor of a scale model filled in. Raises SpecError where none can be made."""
    if job.spec.paced is None:
        return job
    miniature(job)
    simulation = steady_step(job)
    factor = dilation(job, simulation)
    if simulation.makespan * factor > job.spec.timeout:
        seconds, good = f"{simulation.makespan * factor:.3g}", float(f"{STEP / simulation.makespan:.2g}")
        raise SpecError("paced_too_slow", "dilation", factor, suggest=[good], seconds=seconds, timeout=job.spec.timeout)
    return dataclasses.replace(job, spec=job.spec.with_(dilation=factor))


def steady_step(job: Job, on: Machine | None = None, step: int | None = None) -> Simulation:
    """A steady step on the job's machine, or another one, in the machine's own seconds; of a period, if none is named,
    the last one."""
    return simulate(modes.plan(job, step), machine_of(job, on), slow.of_spec(job.spec))


def machine_of(job: Job, on: Machine | None = None) -> Machine:
    """The job's machine, or another one, at what it computes and at what moves there. SpecError where that was not
    measured."""
    spec, found = job.spec, on or machine(job.spec.machine, job.spec.device)
    if found.local is not None and spec.precision not in (None, *(measured := found.local.precisions)):
        names = {"machine": spec.machine, "measured": ", ".join(measured)}
        raise SpecError("precision_here", "precision", spec.precision, suggest=measured, **names)
    return found.placed(spec.devices).at(spec.precision).running(run_by(spec.mode, degrees(spec)), spec.precision)


def trained(job: Job) -> Job:
    """What processes train: of a job that is paced its miniature, as `miniature` has found it; any other as it is."""
    return job if job.spec.paced is None else _small(job)


def miniature(job: Job) -> Job:
    """Raises SpecError where no small model has a plan with the same ops."""
    small = _small(job)
    for step in range(modes.FIRST_STEADY_STEP + 1):
        if different := first_difference(modes.plan(job, step), modes.plan(small, step)):
            raise _refusal(job, *different)
    return small


def _small(job: Job) -> Job:
    spec = job.spec
    runs = spec.precision if planned_only(spec) is None else None
    small = spec.with_(
        model=family(spec.model),
        **dict.fromkeys((*PLANNED_SIZES, *PLANNED_EXPERTS)),
        precision=runs or (None if spec.precision is None else "fp32"),
        paced=None,
        dilation=None,
        machine="local",
        slow_rank=None,
        slow_link=None,
        measure_memory=False,
        steps=job.steps,
        epochs=None,
        global_batch=job.replicas * (spec.microbatches or 1) * job.microsteps,
        **_sizes(job),
    )
    found = prepare(small)
    return _with_buckets_of(job, found) if _num_buckets(job) else found


def _refusal(job: Job, rank: int, pictured: str, small: str) -> SpecError:
    """What differs are DDP's buckets, where it works with fewer of them."""
    if job.spec.bucket_mb not in (None, ONE_BUCKET_MB):
        larger = [size for size in LARGER_MB if size > job.spec.bucket_mb]
        good = next((size for size in larger if _is_alike(prepare(job.spec.with_(bucket_mb=size)))), None)
        if good is not None:
            return SpecError("paced_buckets", "bucket_mb", job.spec.bucket_mb, suggest=[good])
    values = {"rank": rank, "pictured": pictured, "miniature": small}
    return SpecError("paced_differs", "paced", job.spec.paced, **values)


def _is_alike(job: Job) -> bool:
    return first_difference(modes.plan(job), modes.plan(_small(job))) is None


def _sizes(job: Job) -> dict[str, int]:
    """Small ones that can be cut as the pictured ones are; what is small already stays."""
    spec, tp, cp = job.spec, job.degree("tp"), job.degree("cp")
    sizes = {}
    if spec.model == "mlp":
        sizes["hidden"] = min(spec.hidden, _multiple(tp, WIDTH))
    if spec.model in TOKEN_MODELS:
        cut = math.lcm(tp, cp)
        sizes["heads"] = cut if spec.hidden > _multiple(cut, WIDTH) else spec.heads
        sizes["hidden"] = min(spec.hidden, _multiple(cut, WIDTH))
        sizes["context"] = min(spec.context, _multiple(2 * cut, TOKENS))
    if family(spec.model) == "moe":
        sizes["top_k"] = min(spec.top_k, 2)
        sizes["experts"] = min(spec.experts, _multiple(job.degree(job.expert_axis), sizes["top_k"]))
    return sizes


def _multiple(of: int, least: int) -> int:
    return of * math.ceil(least / of)


def _with_buckets_of(job: Job, small: Job) -> Job:
    """With a limit at which DDP has as many buckets, at the same places if there is one. Buckets are runs of gradients,
    so only at sums of runs do they change."""
    wanted = _num_buckets(job)
    sizes = [small.item * math.prod(shape) for layer in reversed(small.layers) for _, shape in reversed(layer.params)]
    limits = sorted({end for i in range(STARTS) for end in itertools.accumulate(sizes[i:])}, reverse=True)
    place = bisect.bisect_left(limits, wanted, key=lambda limit: _num_buckets(_with_limit(small, limit)))
    alike = itertools.takewhile(
        lambda one: _num_buckets(one) == wanted, (_with_limit(small, x) for x in limits[place:])
    )
    plan = modes.plan(job)
    return next((one for one in alike if first_difference(plan, modes.plan(one)) is None), small)


def _with_limit(small: Job, size: int) -> Job:
    return dataclasses.replace(small, spec=small.spec.with_(bucket_mb=(size - 0.5) / MIB))


def _num_buckets(job: Job) -> int:
    return sum(op.part.startswith("bucket") for op in modes.plan(job).programs[0].ops if op.asynchronous)


def first_difference(pictured: Plan, small: Plan) -> tuple[int, str, str] | None:
    """(rank, op, op) where two plans first have different ops on a lane, whatever the sizes of these.

    What is done in the background on the one machine may be waited for on the other.
    """
    if pictured.mesh != small.mesh:
        return 0, str(pictured.mesh), str(small.mesh)
    seen = set()
    for rank, roles in enumerate(zip(pictured.roles, small.roles, strict=True)):
        if roles in seen:
            continue
        seen.add(roles)
        one, other = (_lanes(plan, rank) for plan in (pictured, small))
        for lane in one | other:
            for a, b in itertools.zip_longest(one.get(lane, []), other.get(lane, [])):
                if a != b:
                    return rank, _said(a), _said(b)
    return None


def _lanes(plan: Plan, rank: int) -> dict[str, list[tuple]]:
    """Of each lane what its ops are, without their sizes; which tokens a load is of is one."""
    ops, lanes = Ops.of(plan.program(rank).ops), defaultdict(list)
    words = [
        (plan.lane(rank, op), (op.kind, op.payload, "" if op.kind == "load" else op.part, op.stage, op.axis, op.peer))
        for op in ops.templates
    ]
    for which, microbatch in zip(ops.which.tolist(), ops.microbatch.tolist(), strict=True):
        lane, word = words[which]
        lanes[lane].append((*word, microbatch))
    return lanes


def _said(op: tuple | None) -> str:
    return "nothing" if op is None else " ".join(str(word) for word in op[:4] if word not in (None, ""))


def dilation(job: Job, simulation: Simulation) -> float:
    """The factor that was asked for, or one by which a step takes about `STEP` seconds, or as long as the miniatures'
    own work needs. Two digits, so that it can be said."""
    if job.spec.dilation is not None:
        return job.spec.dilation
    if not simulation.makespan > 0:
        return 1.0
    ranks = simulation.graph.num_ranks
    work = sum(_work(program, job) * n for program, n in zip(simulation.plan.programs, ranks, strict=True))
    factor = max(STEP, work / CORES / LOAD) / simulation.makespan
    digit = 10.0 ** (math.floor(math.log10(factor)) - 1)
    return float(f"{math.ceil(factor / digit - 1e-9) * digit:.3g}")


def _work(program: Program, job: Job) -> float:
    """Seconds of a core that a rank of a miniature needs for a step."""
    sharded = job.degree("fsdp") > 1 or (job.spec.mode == "hybrid" and job.degree("dp") > 1)
    layer = LAYER_WORK + CUT_WORK * (job.degree("tp") > 1) + SHARDED_WORK * sharded
    ops, stages, each = Ops.of(program.ops), job.stages, []
    for op in ops.templates:
        if op.is_compute:
            half = HALF_WORK * (op.kind in ("backward_input", "backward_weight"))
            each.append((layer + half) * (len(stages[op.stage]) if op.stage is not None and not op.part else 1))
        else:
            each.append(COLLECTIVE_WORK if op.kind in COLLECTIVES else MESSAGE_WORK)
    return float(np.array(each)[ops.which].sum())


def slowed(simulation: Simulation, factor: float) -> Simulation:
    """The same step, every op of it `factor` times longer and later."""
    times = {name: getattr(simulation, name) * factor for name in ("start", "end", "makespan")}
    return dataclasses.replace(simulation, **times)
