"""A job in a pipeline -> its plan: a schedule's order of microbatches, with the messages that it needs."""

from engine import chain, schedules
from engine.columns import Ops, unroll
from engine.job import Job
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    stages = job.stages
    order = schedules.order(job.spec.schedule, len(stages), job.spec.microbatches)
    programs, first = [], 0
    for i, layers in enumerate(stages):
        holds = tuple(range(first, first + len(layers)))
        programs.append(Program(_ops(job, i, order[i]), holds, chain.standing_memory(layers, job.spec)))
        first += len(layers)
    names = tuple(layer.name for layer in job.layers)
    return Plan(Mesh(("pp",), (len(stages),)), tuple(programs), tuple(range(len(stages))), names)


def _ops(job: Job, stage: int, order: list[schedules.Action]) -> Ops:
    """Forward: receive an activation, compute, send one on. Backward: the same with gradients, the other way."""
    stages, samples = job.stages, job.spec.global_batch // job.spec.microbatches
    is_first, is_last = stage == 0, stage == len(stages) - 1
    inbound = 0 if is_first else stages[stage - 1][-1].output_bytes * samples
    outbound = stages[stage][-1].output_bytes * samples
    previous = [] if is_first else [stage - 1]
    following = [] if is_last else [stage + 1]
    passes = {
        "forward": (
            *(_message("recv", "activation", stage, peer, inbound) for peer in previous),
            chain.whole_stage(chain.forward(stages[stage], samples, stage=stage)),
            *(_message("send", "activation", stage, peer, outbound) for peer in following),
        ),
        "backward": (
            *(_message("recv", "gradient", stage, peer, outbound) for peer in following),
            chain.whole_stage(chain.backward(stages[stage], samples, stage=stage)),
            *(_message("send", "gradient", stage, peer, inbound) for peer in previous),
        ),
    }
    load = [chain.load(job.sample_bytes, job.spec.global_batch)] if is_first or is_last else []
    calls = [(action.kind, action.microbatch) for action in order]
    return unroll(passes, calls, before=load, after=[chain.optimizer(stages[stage], job.spec)])


def _message(kind: str, payload: str, stage: int, peer: int, size: int) -> Op:
    return Op(kind=kind, stage=stage, payload=payload, axis="pp", peer=peer, bytes=size, asynchronous=kind == "send")
