"""The stages of a rank -> what PyTorch's pipelining keeps beside them the whole step long.

Each activation and each gradient has a place to be received in, for every microbatch. What comes from a stage on the
same rank is kept itself, in that place, until the next step's comes. The outputs of a last stage are there until its
schedule ends, in the plan from the forward that makes them (`passes`). What was sent is held by the handle of its
message: in schedules of several stages until the schedule ends (so in `passes` too), in 1F1B that of the last warm-up
forward but one.
"""

from collections.abc import Sequence

from engine.asking.frozen import goes_back
from engine.job import Job
from engine.model.shapes import Layer


def beside(job: Job, stages: Sequence[int], pipelines: list[range], ends: Sequence[Layer] = ()) -> dict[str, int]:
    """`ends`: the last piece of each stage as a rank computes it, where that is not a whole layer."""
    spec = job.spec
    ends = ends or [layers[-1] for layers in job.stages]
    sizes = [last.output_bytes * job.micro_batch for last in ends]
    if spec.master_weights:
        return {"received": _in_passing(job, stages, pipelines, sizes)}
    received = outputs = 0
    for pipeline in pipelines:
        for stage in set(stages) & set(pipeline):
            if stage != pipeline[-1] and stage + 1 not in stages and goes_back(job.stages[stage]):
                received += sizes[stage]
            if stage != pipeline[0] and stage - 1 in stages:
                outputs += sizes[stage - 1]
            elif stage != pipeline[0]:
                received += sizes[stage - 1]
            warmup = len(pipeline) - stage
            if spec.schedule == "1f1b" and warmup > 1 and spec.microbatches >= 2 * warmup - 1:
                outputs += sizes[stage] // spec.microbatches
    return {"received": received, "outputs": outputs}


def _in_passing(job: Job, stages: Sequence[int], pipelines: list[range], sizes: Sequence[int]) -> int:
    """Megatron-LM keeps of each message one that comes: an activation, which its stage then keeps in place of what it
    sends on, and a gradient."""
    into = [sizes[stage - 1] for line in pipelines for stage in stages if stage in line and stage != line[0]]
    back = [sizes[stage] for line in pipelines for stage in stages if stage in line and stage != line[-1]]
    return (max(into, default=0) + max(back, default=0)) // job.spec.microbatches
