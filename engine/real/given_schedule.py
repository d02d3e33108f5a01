"""A pipeline's order that a person gave -> torch's own runtime of pipelines, loaded with it.

It does what `_load_csv` of that runtime does, on what `engine.schedules.given` has read and checked: torch itself adds
the messages to an order of passes alone. Never with `defer_pp_recv`, which mixes up messages (docs/decisions).
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from engine.schedules import Action, csv_form, given
from engine.spec import Spec


def from_file(spec: Spec, stages: list[PipelineStage], loss: Callable) -> _PipelineScheduleRuntime:
    found = given.read(spec.schedule_file)
    order = found.order
    if found.has_messages:
        # Torch divides the gradients of a stage by the number of microbatches where the order has it "reduced".
        order = [
            row + [Action("reduce_grad", stage, None) for stage in found.placement[r]] for r, row in enumerate(order)
        ]
    rows = csv_form.format_order(order).splitlines()
    actions = {rank: [_Action.from_str(word) for word in row.split(",")] for rank, row in enumerate(rows)}
    runtime = _PipelineScheduleRuntime(stages, spec.microbatches, loss_fn=loss)
    runtime.pipeline_order = actions
    runtime._prepare_schedule_with_comms(actions, format="compute_comms" if found.has_messages else "compute_only")
    return runtime
