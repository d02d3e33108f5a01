"""A job in a pipeline -> its plan: a schedule's order of microbatches, with the messages that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine import schedules
from engine.asking.frozen import goes_back
from engine.graph.columns import Calls, Ops, unroll
from engine.job import Job
from engine.model import chain
from engine.modes.pipeline.memory import beside
from engine.modes.pipeline.passes import forward_and_backward, passes_of, samples_of
from engine.plan import Mesh, Op, Plan, Program
from engine.schedules import Action, given, messages
from engine.schedules.row import Row

ADD_MESSAGES = {"late": messages.add_late, "early": messages.add_early}
ONE_STAGE = ("gpipe", "1f1b")  # one stage a rank, and every backward whole


def plan(job: Job, step: int) -> Plan:
    spec = job.spec
    order, placement, pipelines, has_messages = given.layout(spec, job.degree("pp"))
    if spec.schedule in ONE_STAGE and spec.receives == "late":
        ops = [
            in_microsteps(
                job, row, partial(_one_stage, job, stage), load(job, [stage], pipelines), _update(job, [stage])
            )
            for stage, row in enumerate(order)
        ]
    else:
        rank_of = schedules.ranks_of(placement)
        sizes = {stage: layers[-1].output_bytes * samples_of(job) for stage, layers in enumerate(job.stages)}
        ops = []
        for rank, row in enumerate(order if has_messages else ADD_MESSAGES[spec.receives](order, pipelines)):
            stages = placement[rank]
            passes, before = passes_of(job, stages, pipelines), load(job, stages, pipelines)
            after = [*_exchange(job, stages, pipelines), *_update(job, stages)]
            unrolled = partial(messages.unrolled, compute=passes, sizes=sizes, rank_of=rank_of)
            ops.append(in_microsteps(job, row, unrolled, before, after))
    programs = []
    for rank, stages in enumerate(placement):
        stage_of = {layer: stage for stage in stages for layer in job.stage_layers[stage]}
        holds = tuple(sorted(stage_of))
        several = tuple(stage_of[layer] for layer in holds) if len(stages) > 1 else ()
        memory = chain.standing_memory(_layers(job, stages), spec) | beside(job, stages, pipelines)
        programs.append(Program(ops[rank], holds, memory, stages=several))
    names = tuple(layer.name for layer in job.layers)
    return Plan(Mesh(("pp",), (len(placement),)), tuple(programs), tuple(range(len(placement))), names)


def in_microsteps(
    job: Job,
    row: Sequence[Action],
    unrolled: Callable[..., Sequence[Op]],
    before: Sequence[Op] = (),
    after: Sequence[Op] = (),
) -> Sequence[Op]:
    """The ops of a rank's row: where gradients are accumulated, `before` and the whole schedule once for each
    micro-step, whose microbatches count on, and `after` them all what is done once. What a schedule keeps until it ends
    goes with the last op that computes."""
    count, each = job.microsteps, job.spec.microbatches
    if count == 1:
        return unrolled(row, before=before, after=after)
    ops: list[Op] = []
    for k in range(count):
        begun = [replace(op, microbatch=k * each) for op in before]
        ops += unrolled(later(row, k * each), before=begun)
        last = max(i for i, op in enumerate(ops) if op.is_compute)
        kept = sum(op.remains for op in ops if op.kind != "reduce_scatter")
        ops[last] = replace(ops[last], remains=ops[last].remains - kept)
    ops += after
    return tuple(ops)


def later(row: Sequence[Action], microbatches: int) -> Sequence[Action]:
    """The same row, so many microbatches on."""
    if isinstance(row, Row):
        return replace(row, microbatch=row.microbatch + microbatches)
    return [
        action if action.microbatch is None else action._replace(microbatch=action.microbatch + microbatches)
        for action in row
    ]


def _one_stage(job: Job, stage: int, order: Row, before: Sequence[Op] = (), after: Sequence[Op] = ()) -> Ops:
    """Where a rank has one stage, and its passes are whole: each pass with its messages, unrolled at once.

    Forward: receive an activation, compute, send one on. Backward: the same with gradients, the other way.
    """
    stages, samples = job.stages, samples_of(job)
    is_first, is_last = stage == 0, stage == len(stages) - 1
    inbound = 0 if is_first else stages[stage - 1][-1].output_bytes * samples
    outbound = stages[stage][-1].output_bytes * samples
    previous = [] if is_first else [stage - 1]
    following = [] if is_last else [stage + 1]
    asks, asked = bool(previous) and goes_back(stages[stage - 1]), bool(following) and goes_back(stages[stage])
    forward, backward = forward_and_backward(job, stage, is_last=is_last)
    passes = {  # as in order.kinds
        "forward": (
            *(_message("recv", "activation", stage, peer, inbound) for peer in previous),
            *forward,
            *(_message("send", "activation", stage, peer, outbound) for peer in following),
        ),
        "backward": (
            *(_message("recv", "gradient", stage, peer, outbound) for peer in following[:asked]),
            *backward,
            *(_message("send", "gradient", stage, peer, inbound) for peer in previous[:asks]),
        ),
    }
    return unroll(passes, Calls(order.which, order.microbatch), before=before, after=after)


def load(job: Job, stages: Sequence[int], pipelines: list[range]) -> list[Op]:
    """The batch, on ranks that have the first stage of a pipeline or the last."""
    firsts, lasts = {pipeline[0] for pipeline in pipelines}, {pipeline[-1] for pipeline in pipelines}
    is_first, is_last = bool(firsts & set(stages)), bool(lasts & set(stages))
    if not is_first and not is_last:
        return []
    return [chain.load_ends(job, job.micro_batch, is_first=is_first, is_last=is_last)]


def _exchange(job: Job, stages: Sequence[int], pipelines: list[range]) -> list[Op]:
    """Of two copies of a model (DualPipe): the ranks with the same layers give each other their gradients."""
    if len(pipelines) == 1:
        return []
    num = len(pipelines[0])
    rank = stages[0]
    by_layers = sorted(stages, key=lambda stage: stage % num)
    sizes = {stage: sum(layer.param_bytes for layer in job.stages[stage]) for stage in stages}
    return [_message(kind, "gradient", s, num - 1 - rank, sizes[s]) for kind in ("send", "recv") for s in by_layers]


def _update(job: Job, stages: Sequence[int]) -> list[Op]:
    layers = _layers(job, stages)
    clip = chain.clip(layers, job.spec, [("pp", 1)] if job.degree("pp") > 1 else [])
    return [*clip, chain.optimizer(layers, job.spec)]


def _layers(job: Job, stages: Sequence[int]) -> list:
    return [layer for stage in stages for layer in job.stages[stage]]


def _message(kind: str, payload: str, stage: int, peer: int, size: int) -> Op:
    return Op(kind=kind, stage=stage, payload=payload, axis="pp", peer=peer, bytes=size, asynchronous=kind == "send")
