"""A job split by layers -> its plan: the whole batch goes down the devices and its gradient comes back up."""

from engine import chain
from engine.job import Job
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    stages = job.stages
    programs, first = [], 0
    for i, layers in enumerate(stages):
        holds = tuple(range(first, first + len(layers)))
        programs.append(Program(_ops(job, i), holds, chain.standing_memory(layers, job.spec) | _beside(job, i)))
        first += len(layers)
    names = tuple(layer.name for layer in job.layers)
    return Plan(Mesh(("pp",), (len(stages),)), tuple(programs), tuple(range(len(stages))), names)


def _ops(job: Job, stage: int) -> tuple[Op, ...]:
    stages, batch = job.stages, job.local_batch
    is_first, is_last = stage == 0, stage == len(stages) - 1
    inbound = 0 if is_first else stages[stage - 1][-1].output_bytes * batch
    outbound = stages[stage][-1].output_bytes * batch
    ops = [chain.load_ends(job, batch, is_first=is_first, is_last=is_last)] if is_first or is_last else []
    if not is_first:
        ops.append(_message("recv", "activation", stage, stage - 1, inbound))
    ops += chain.forward(stages[stage], batch, stage=stage, spec=job.spec)
    if not is_last:
        ops.append(_message("send", "activation", stage, stage + 1, outbound))
        ops.append(_message("recv", "gradient", stage, stage + 1, outbound))
    ops += chain.backward(stages[stage], batch, stage=stage, spec=job.spec, sent=not is_last)
    if not is_first:
        ops.append(_message("send", "gradient", stage, stage - 1, inbound))
    ops += chain.clip(stages[stage], job.spec, [("pp", 1)] if len(stages) > 1 else [])
    return (*ops, chain.optimizer(stages[stage], job.spec))


def _beside(job: Job, stage: int) -> dict[str, int]:
    """What activations and gradients are received into; and the last output, which outlives its loss."""
    sizes = [layers[-1].output_bytes * job.local_batch for layers in job.stages]
    is_last = stage == len(sizes) - 1
    received = (sizes[stage - 1] if stage else 0) + (0 if is_last else sizes[stage])
    return {"received": received} | ({"outputs": sizes[stage]} if is_last else {})


def _message(kind: str, payload: str, stage: int, peer: int, size: int) -> Op:
    return Op(
        kind=kind,
        stage=stage,
        microbatch=0,
        payload=payload,
        axis="pp",
        peer=peer,
        bytes=size,
        asynchronous=kind == "send",
    )
