"""A stage of a pipeline -> the compute ops of its passes, for one microbatch: one op a pass.

Where layers are computed again, each right before it goes back, a pass is one op a layer instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.cost import kernels
from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.plan import Op


def samples_of(job: Job) -> int:
    return job.micro_batch // job.spec.microbatches


def recomputes(job: Job) -> bool:
    return job.spec.recompute not in (None, "none")


def forward_and_backward(job: Job, stage: int, *, is_last: bool, stays: bool = False) -> tuple[list[Op], list[Op]]:
    """`stays`: what layers put out is there until a later half of the backward."""
    layers, known = job.stages[stage], {"stage": stage, "spec": job.spec, "sent": not is_last}
    ahead = chain.forward(layers, samples_of(job), **known)
    back = chain.backward(layers, samples_of(job), **known, stays=stays)
    if is_last and not job.spec.master_weights:  # PyTorch keeps the outputs of all microbatches
        ahead[-1] = replace(ahead[-1], remains=layers[-1].output_bytes * samples_of(job))
    if recomputes(job):
        return ahead, back
    # PyTorch's schedule goes through a stage of which nothing goes back all the same.
    return [chain.whole_stage(ahead)], [chain.whole_stage(back) if back else Op(kind="backward", stage=stage)]


def passes_of(job: Job, stages: Sequence[int], pipelines: list[range]) -> dict[tuple[str, int], list[Op]]:
    """The compute of each pass through each stage of a rank.

    Where nobody waits for the gradient of the input, in a first stage, PyTorch leaves all of a backward to the half of
    the weights.
    """
    passes, firsts = {}, {pipeline[0] for pipeline in pipelines}
    for stage in stages:
        is_last = any(stage == pipeline[-1] for pipeline in pipelines)
        forward, backward = forward_and_backward(job, stage, is_last=is_last)
        if not is_last and not job.spec.master_weights:  # kept by its message, or by who gets it (`beside`)
            output = job.stages[stage][-1].output_bytes * samples_of(job)
            sent = 0 if stage + 1 in stages else output
            forward[-1] = replace(forward[-1], saved=forward[-1].saved - output, remains=sent)
        passes |= {("forward", stage): forward, ("backward", stage): backward}
        _, stays = forward_and_backward(job, stage, is_last=is_last, stays=stage not in firsts)
        passes |= halves(job, forward, stays, job.stages[stage][-1], stage, first=stage in firsts)
    return passes


def halves(
    job: Job, forward: Sequence[Op], backward: Sequence[Op], end: Layer, stage: int, *, first: bool
) -> dict[tuple[str, int], list[Op]]:
    """A backward's two halves. In that of the input layers are computed again and ranks meet, each time before what
    needs it; that of the weights needs nobody, and what it needs is there. A first stage leaves all to it.

    PyTorch keeps until the second half all that was saved, but for what came after the last product of the stage, the
    `end` of which is its last layer or a piece of it: it detaches the output from it. Megatron-LM's zero-bubble
    schedules go through all layers in the first, in a first stage too, and set operands of products aside for the
    second (Qi et al. 2024, section 2).
    """
    first, total = first and not job.spec.master_weights, chain.whole_stage([op for op in backward if goes_back(op)])
    there, rest = chain.halves(total, first=first)
    if first:
        return {
            ("backward_input", stage): [there],
            ("backward_weight", stage): [replace(op, kind=rest.kind) if goes_back(op) else op for op in backward],
        }
    inputs = [chain.halves(op)[0] if goes_back(op) else op for op in backward]
    if job.spec.master_weights:
        gone = max(0, sum(op.saved for op in (*forward, *backward)) - kernels.operands(rest.kernels))
    else:
        gone = end.behind * samples_of(job)
    inputs[-1] = replace(inputs[-1], remains=-gone)  # with the rest of what was saved it goes in the second, once
    return {("backward_input", stage): inputs, ("backward_weight", stage): [replace(rest, remains=gone)]}


def goes_back(op: Op) -> bool:
    return op.kind == "backward"
