"""A job split by layers -> its plan: the whole batch goes down the devices and its gradient comes back up."""

from dataclasses import replace

from engine.asking.frozen import goes_back
from engine.job import Job
from engine.model import chain
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
    stages, count = job.stages, job.microsteps
    ops = [op for k in range(count) for op in _micro_step(job, stage, k, count)]
    ops += chain.clip(stages[stage], job.spec, [("pp", 1)] if len(stages) > 1 else [])
    return (*ops, chain.optimizer(stages[stage], job.spec))


def _micro_step(job: Job, stage: int, k: int, count: int) -> list[Op]:
    stages, batch, where = job.stages, job.micro_batch, {"stage": stage, "microbatch": k}
    is_first, is_last = stage == 0, stage == len(stages) - 1
    inbound = 0 if is_first else stages[stage - 1][-1].output_bytes * batch
    outbound = stages[stage][-1].output_bytes * batch
    ops = [chain.load_ends(job, batch, is_first=is_first, is_last=is_last)] if is_first or is_last else []
    ops = ops if count == 1 else [replace(op, microbatch=k) for op in ops]
    if not is_first:
        ops.append(_message("recv", "activation", stage - 1, inbound, where))
    known = {**where, "spec": job.spec, "sent": not is_last}
    there, back = (way(stages[stage], batch, **known) for way in (chain.forward, chain.backward))
    if not is_last:  # its output is there until all of its backward is done
        there[-1] = replace(there[-1], saved=there[-1].saved - outbound, remains=outbound)
        back[-1:] = [replace(op, remains=-outbound) for op in back[-1:]]
    if is_compiled(job):
        there, back = [chain.whole_stage(there)], [chain.whole_stage(back)]
    ops += there
    if not is_last:
        ops.append(_message("send", "activation", stage + 1, outbound, where))
    if not is_last and goes_back(stages[stage]):
        ops.append(_message("recv", "gradient", stage + 1, outbound, where))
    ops += back
    if not is_first and goes_back(stages[stage - 1]):
        ops.append(_message("send", "gradient", stage - 1, inbound, where))
    return ops


def is_compiled(job: Job) -> bool:
    """Then a stage's pass is one op: its layers are not to be told apart any more."""
    return job.spec.compile_stage not in (None, "none")


def _beside(job: Job, stage: int) -> dict[str, int]:
    """What activations and gradients are received into."""
    sizes = [layers[-1].output_bytes * job.micro_batch for layers in job.stages]
    is_last = stage == len(sizes) - 1
    received = (sizes[stage - 1] if stage else 0) + (0 if is_last or not goes_back(job.stages[stage]) else sizes[stage])
    return {"received": received}


def _message(kind: str, payload: str, peer: int, size: int, where: dict[str, int]) -> Op:
    return Op(kind=kind, payload=payload, axis="pp", peer=peer, bytes=size, asynchronous=kind == "send", **where)
