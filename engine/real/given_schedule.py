"""A pipeline's order that a person gave -> torch's own runtime of pipelines, loaded with it.

It does what `_load_csv` of that runtime does, on what `engine.schedules.given` has read and checked: torch itself adds
the messages to an order of passes alone, and what sharded stages do; to one with messages the latter is added here, by
the same rules. Never with `defer_pp_recv`, which mixes up messages (docs/decisions).
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from engine.schedules import csv_form, given
from engine.schedules.gathers import add_gathers
from engine.spec import Spec


def from_file(
    spec: Spec, stages: list[PipelineStage], *, loss_fn: Callable, scale_grads: bool
) -> _PipelineScheduleRuntime:
    found = given.read(spec.schedule_file)
    rows = csv_form.format_order(add_gathers(found.order) if found.has_messages else found.order).splitlines()
    actions = {rank: [_Action.from_str(word) for word in row.split(",")] for rank, row in enumerate(rows)}
    runtime = _PipelineScheduleRuntime(stages, spec.microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
    runtime.pipeline_order = actions
    runtime._prepare_schedule_with_comms(actions, format="compute_comms" if found.has_messages else "compute_only")
    return runtime
