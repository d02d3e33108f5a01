"""A job in a pipeline -> its plan: a schedule's order of microbatches, with the messages that it needs."""

from engine import chain, schedules
from engine.job import Job
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    stages = job.stages
    order = schedules.order(job.spec.schedule, len(stages), job.spec.microbatches)
    programs, first = [], 0
    for i, layers in enumerate(stages):
        holds = tuple(range(first, first + len(layers)))
        programs.append(Program(_ops(job, i, order[i], step), holds, chain.standing_memory(layers, job.spec)))
        first += len(layers)
    names = tuple(layer.name for layer in job.layers)
    return Plan(Mesh(("pp",), (len(stages),)), tuple(programs), tuple(range(len(stages))), names)


def _ops(job: Job, stage: int, order: list[schedules.Action], step: int) -> tuple[Op, ...]:
    stages, samples = job.stages, job.spec.global_batch // job.spec.microbatches
    is_first, is_last = stage == 0, stage == len(stages) - 1
    inbound = 0 if is_first else stages[stage - 1][-1].output_bytes * samples
    outbound = stages[stage][-1].output_bytes * samples
    ops = [chain.load(job.sample_bytes, job.spec.global_batch)] if is_first or is_last else []
    for kind, microbatch in order:
        if kind == "forward":
            before = None if is_first else (stage - 1, "activation", inbound)
            after = None if is_last else (stage + 1, "activation", outbound)
            compute = chain.forward(stages[stage], samples, stage=stage, microbatch=microbatch)
        else:
            before = None if is_last else (stage + 1, "gradient", outbound)
            after = None if is_first else (stage - 1, "gradient", inbound)
            compute = chain.backward(stages[stage], samples, stage=stage, microbatch=microbatch)
        ops += [_message("recv", stage, microbatch, *before)] if before else []
        ops.append(chain.whole_stage(compute))
        ops += [_message("send", stage, microbatch, *after)] if after else []
    return (*ops, chain.optimizer(stages[stage], job.spec))


def _message(kind: str, stage: int, microbatch: int, peer: int, payload: str, size: int) -> Op:
    return Op(
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        payload=payload,
        axis="pp",
        peer=peer,
        bytes=size,
        asynchronous=kind == "send",
    )
