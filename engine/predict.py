"""A Spec -> a Prediction: its plan, simulated on its machine, and the numbers that sum it up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine import modes
from engine.analysis.mfu import planned_flops, utilisation
from engine.analysis.ran import simulated
from engine.analysis.shares import (
    bubble_fraction,
    bubble_over_ideal,
    exposed_communication_fraction,
    overlap_fraction,
    shares,
)
from engine.analysis.summary import summary as summarise
from engine.cost.machine import Machine, machine
from engine.job import Job, prepare
from engine.plan import Plan
from engine.scale_model.paced import ratio
from engine.scale_model.pictured import dilation, slowed, steady_step
from engine.schedules import given
from engine.simulation import Simulation
from engine.spec import Spec
from engine.timeline import Timeline

MOST_SPANS = 500_000  # of a timeline of every rank that is made unasked


@dataclass(frozen=True, slots=True)
class Prediction:
    """One steady step of a job, predicted. Of a scale model (`paced`) all times are of the model, `dilation` times
    those of what it shows. `between`: where ranks do not meet in every step, one in which they do not."""

    job: Job
    simulation: Simulation
    dilation: float | None = None
    between: Simulation | None = None

    @property
    def plan(self) -> Plan:
        return self.simulation.plan

    @property
    def timeline(self) -> Timeline:
        return self.simulation.timeline

    @property
    def short_timeline(self) -> Timeline:
        """That of every rank, or where it has more than MOST_SPANS, of one rank a role, which stands for the others."""
        all_ranks = sum(
            len(p.ops) * n for p, n in zip(self.plan.programs, self.simulation.graph.num_ranks, strict=True)
        )
        return self.simulation.timeline if all_ranks <= MOST_SPANS else self.simulation.by_role

    @property
    def step_time(self) -> float:
        return self.simulation.makespan

    @property
    def mean_step_time(self) -> float:
        """Where ranks meet in every k-th step only, that of the k, whose last one is `step_time` long."""
        if self.between is None:
            return self.step_time
        others = modes.period(self.job) - 1
        return (self.step_time + others * self.between.makespan) / (others + 1)

    @property
    def machine(self) -> Machine:
        return machine(self.job.spec.machine, self.job.spec.device).at(self.job.spec.precision)

    def utilisation(self, seconds: float | None, on: Machine | None) -> dict[str, Any]:
        """MFU (`engine.analysis.mfu`) of this job, had its mean step taken so long on such a machine. Seconds of a
        scale model are the factor's part of them there."""
        spec = self.job.spec
        seconds = seconds / self.dilation if seconds and self.dilation else seconds
        planned = planned_flops(self.simulation.graph)
        return utilisation(self.job.layers, spec.global_batch, planned, seconds, spec.devices, on)

    @property
    def scale_model(self) -> dict[str, Any] | None:
        """What a scale model shows, with its factor and a step's seconds there; None where this is of none."""
        if self.dilation is None:
            return None
        times = {"dilation": self.dilation, "ratio": ratio(self.dilation)}
        return {"machine": self.job.spec.paced, **times, "pictured_step_time": self.mean_step_time / self.dilation}

    @property
    def period(self) -> float:
        """Seconds from one step to the next. Where ranks agree on something at its end (a norm to clip by), a step is
        as long as all of it; where none waits for all others, each rank goes on when it is done, and the longest
        decides (Qi et al. 2023, arXiv:2401.10241, section 4: their optimizer checks later, so that the ramp is hidden).
        """
        simulation = self.simulation
        if self.job.spec.clip is not None:
            return self.step_time
        graph = simulation.graph
        works = np.array([op.is_compute and op.kind != "load" for op in graph.templates], dtype=bool)[graph.which]
        start = np.where(works, simulation.start, np.inf)  # a batch is loaded, and messages are awaited, meanwhile
        bounds = itertools.pairwise(graph.first)
        return max((float(simulation.end[a:b].max() - start[a:b].min()) for a, b in bounds if b > a), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Seconds and bytes; lists have one entry a rank."""
        simulation, plan, mean = self.simulation, self.plan, self.mean_step_time
        # A step begins with what ranks spend before their first op.
        spent = [each._replace(makespan=simulation.makespan) for each in shares(simulation.by_role)]
        return {
            "mode": self.job.spec.mode,
            "model": self.job.spec.model,
            "devices": self.job.spec.devices,
            "machine": self.job.spec.machine,
            "num_params": self.job.num_params,
            **self.job.batches,
            "scale_model": self.scale_model,
            "step_time": self.step_time,
            "mean_step_time": mean,
            "samples_per_second": self.job.spec.global_batch / mean if mean else None,
            "bubble_fraction": bubble_fraction(spent),
            "bubble_over_ideal": bubble_over_ideal(spent),
            "exposed_communication_fraction": exposed_communication_fraction(spent),
            "overlap_fraction": overlap_fraction(spent),
            **summarise([simulated(simulation)]),
            "mfu": self.utilisation(mean, self.machine),
            "num_ops": sum(len(p.ops) * n for p, n in zip(plan.programs, simulation.graph.num_ranks, strict=True)),
            "memory": simulation.per_rank(simulation.memory),
            "peak_memory": simulation.per_rank(simulation.peak_memory),
            "peak_in_flight": simulation.per_rank(simulation.peak_in_flight),
            "bytes_sent": [round(sent) for sent in simulation.per_rank(simulation.bytes_sent)],
            "blocked_on_gpus": given.blocked(file) if (file := self.job.spec.schedule_file) is not None else None,
        }


def predict(spec: Spec, *, on: Machine | None = None) -> Prediction:
    """`on`: a machine other than the one that the spec names. Raises SpecError for a wrong setting."""
    job = prepare(spec)
    simulation = steady_step(job, on)
    alone = modes.period(job) > 1
    between = steady_step(job, on, modes.last_of_period(job) + 1) if alone else None
    if job.spec.paced is None:
        return Prediction(job, simulation, None, between)
    factor = dilation(job, simulation)
    job = replace(job, spec=job.spec.with_(dilation=factor))
    return Prediction(job, slowed(simulation, factor), factor, between and slowed(between, factor))
