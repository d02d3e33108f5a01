"""A job whose layers are dealt out to stages, on a mesh -> its plan: a schedule's order, over what each rank computes.

A stage works on many microbatches, so its layers stay gathered until the last is through, and its gradients add up:
they are reduced once (PipelineStage leaves FSDP's own reductions out). Any other way, a backward in two halves would
lose its gradients, since FSDP puts other parameters in the place of those that the first half knew.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, product

from engine import schedules
from engine.job import Job
from engine.model import chain
from engine.model.shapes import FP32, Layer
from engine.modes.context.cuts import summed
from engine.modes.fsdp.plan import gather, reduce, sharing
from engine.modes.fsdp.replicas import is_shared
from engine.modes.fsdp.units import gathered_bytes, padded_bytes
from engine.modes.hybrid.cuts import Seat, held, output_of, units_of
from engine.modes.hybrid.whole import most_gathered, most_gradients
from engine.modes.pipeline.memory import beside
from engine.modes.pipeline.passes import halves, recomputes, samples_of
from engine.modes.pipeline.plan import ONE_STAGE, in_microsteps, load
from engine.modes.tensor.cuts import Blocks
from engine.modes.tensor.shards import gradient_bytes
from engine.plan import Mesh, Op, Program
from engine.schedules import Action, given, messages
from engine.schedules.gathers import add_gathers

Passes = dict[tuple[str, int], Sequence[Op]]  # (kind, stage) -> its ops


def in_stages(
    job: Job, mesh: Mesh, seat: Seat, ranks: Iterable[int]
) -> Iterator[tuple[int, tuple[list[Program], list[int]]]]:
    """For each of these ranks of a pipeline: its programs, and which of them each coordinate on fsdp runs."""
    spec, layers, samples = job.spec, held(job, seat), samples_of(job)
    _, placement, pipelines, _ = given.layout(spec, job.degree("pp"))
    rank_of = schedules.ranks_of(placement)
    ends = [output_of(job, layers[stage[-1]]) for stage in job.stage_layers]
    made = {stage: layer.output_bytes * samples for stage, layer in enumerate(ends)}
    sizes = {stage: size // scattered(job) for stage, size in made.items()}
    asked = (spec.schedule, job.degree("pp"), spec.microbatches, spec.stages_per_rank, spec.schedule_file)
    keeps = bool(spec.master_weights) and spec.paced is None  # PyTorch trains a scale model
    rows = rows_of(*asked, kept=keeps)
    blocks: Blocks = {}
    for rank in ranks:
        stages = placement[rank]
        stage_of = {i: stage for stage in stages for i in job.stage_layers[stage]}
        kept = {i: layers[i] for i in sorted(stage_of)}
        passes: Passes = {}
        split = any(action.kind in ("backward_input", "backward_weight") for action in rows[rank])
        for stage in stages:
            known = {"split": split, "local": stage + 1 in stages}
            passes |= _passes(job, mesh, layers, stage, made[stage], seat, blocks, **known)
        row = _gathering_first(rows[rank], passes, at_once=keeps) if spec.schedule in ONE_STAGE else rows[rank]
        apart = job.routed is not None and job.expert_axis != ""
        if apart:
            for stage, turn in product(stages, range(spec.microbatches * job.microsteps)):
                known = {"turn": turn, "split": split, "local": stage + 1 in stages}
                of_turn = _passes(job, mesh, layers, stage, made[stage], seat, blocks, **known)
                passes |= {(_turned(kind, turn), stage): ops for (kind, stage), ops in of_turn.items()}
        before = load(job, stages, pipelines)
        sums = [] if is_shared(mesh) else [op for stage in stages for op in passes["sums", stage]]

        def unrolled(row: Sequence[Action], passes=passes, apart=apart, **ends: Sequence[Op]) -> Sequence[Op]:
            if apart:
                row = [action._replace(kind=_turned(action.kind, action.microbatch)) for action in row]
            return messages.unrolled(row, passes, sizes, rank_of, **ends, waits=spec.overlap is False)

        def ops(update: Sequence[Op], row=row, unrolled=unrolled, before=before, sums=sums) -> Sequence[Op]:
            return in_microsteps(job, row, unrolled, before, [*sums, *update])

        memory = standing(job, mesh, row, {stage: [layers[i] for i in job.stage_layers[stage]] for stage in stages})
        memory |= beside(job, stages, pipelines, ends) | {"summed": summed(job, samples)}
        several = tuple(stage_of[i] for i in kept) if len(stages) > 1 else ()
        yield rank, sharing(job, mesh, kept, ops, memory, several)


def scattered(job: Job) -> int:
    """Parts of a message between stages of which each tensor rank sends its own, and which are gathered behind it over
    the links of a node, so that no byte goes over the network twice (Narayanan et al. 2021, section 4.1)."""
    return job.degree("tp") if job.spec.scatter_gather and not job.spec.sequence_parallel else 1


def _gathering_messages(job: Job, cut: list[chain.Unit], stage: int, size: int) -> list[chain.Unit]:
    """A stage's first layer with the gather of what came before it, its last with that of the gradient."""
    op = Op(kind="all_gather", stage=stage, axis="tp", part="message", bytes=size // job.degree("tp"))
    cut = list(cut)
    if stage > 0:
        cut[0] = replace(cut[0], forward=(replace(op, payload="activation"), *cut[0].forward))
    if stage < len(job.stages) - 1:
        cut[-1] = replace(cut[-1], backward=(replace(op, payload="gradient"), *cut[-1].backward))
    return cut


def _turned(kind: str, turn: int | None) -> str:
    """A pass of one microbatch, which is like no other: where tokens go is decided in each."""
    return f"{kind} of {turn}" if kind.startswith(("forward", "backward")) else kind


@functools.lru_cache(maxsize=16)  # many jobs have one schedule, and its numbers
def rows_of(
    schedule: str | None, ranks: int, microbatches: int, stages_per_rank: int | None, file: str | None, *, kept: bool
) -> list[list[Action]]:
    """What each rank does, with messages and gathers; not to be changed. `kept`: see `add_gathers`."""
    if file is not None:
        found = given.read(file)
        order = add_gathers(found.order, kept=kept)
        return order if found.has_messages else messages.add_late(order, found.pipelines)
    order = schedules.order(schedule, ranks, microbatches, stages_per_rank)
    pipelines = schedules.pipelines(schedule, ranks, stages_per_rank)
    return messages.add_late(order if schedule in ONE_STAGE else add_gathers(order, kept=kept), pipelines)


def _passes(
    job: Job,
    mesh: Mesh,
    whole: Sequence[Layer],
    stage: int,
    sent: int,
    seat: Seat,
    blocks: Blocks,
    *,
    turn: int = 0,
    split: bool,
    local: bool,
) -> Passes:
    """What a stage does for a microbatch, and once in a step; `split`: of a backward its halves, too; `local`: the next
    stage is on the same rank. The runtime of schedules gathers a stage in the background."""
    layers = [whole[i] for i in job.stage_layers[stage]]
    is_sent = stage < len(job.stages) - 1

    def units(**known: bool) -> list[chain.Unit]:
        cut = units_of(job, layers, samples_of(job), seat, stage=stage, turn=turn, blocks=blocks, **known)
        return _gathering_messages(job, cut, stage, sent) if scattered(job) > 1 else cut

    cut = units(sent=is_sent)
    if not job.spec.master_weights:
        several = job.spec.schedule not in ONE_STAGE
        if is_sent and several:  # its output is kept by its message, or by who gets it (`beside`)
            cut[-1] = replace(cut[-1], forward=_without(cut[-1].forward, sent))
        if not is_sent or (several and not local):  # and of a last stage by the schedule: those of all microbatches
            *ahead, last = cut[-1].forward
            cut[-1] = replace(cut[-1], forward=(*ahead, replace(last, remains=sent)))
    gathers = [[*gather(unit.layer, job, mesh)] for unit in cut]
    passes: Passes = {
        ("forward", stage): [op for unit in cut for op in unit.forward],
        ("backward", stage): _backward(cut),
        ("unshard", stage): [replace(op, asynchronous=True) for ops in gathers for op in ops],
        ("reshard", stage): [],
        ("reduce_grad", stage): _reductions(job, mesh, cut, stage) if is_shared(mesh) else [],
        ("sums", stage): [op for unit in cut for op in unit.sums],
    }
    for i, unit, ops in zip(count(), cut, gathers, strict=False):  # layer by layer
        passes |= {(f"gather {i}", stage): ops, (f"forward {i}", stage): unit.forward}
    if not split:
        return passes
    apart = recomputes(job) and stage > 0
    back = _backward(units(stays=True) if apart else cut)
    end = output_of(job, layers[-1])
    return passes | halves(job, passes["forward", stage], back, end, stage, first=stage == 0)


def _reductions(job: Job, mesh: Mesh, cut: Sequence[chain.Unit], stage: int) -> list[Op]:
    """Of a stage's gradients, once in a step; to shards of fp32 where ranks share them (`standing`)."""
    ops = [op for unit in cut for op in reduce(unit, job, mesh)]
    if not (job.spec.master_weights and _shares_gradients(job)):
        return ops
    whole = FP32 // job.item
    return [replace(op, stage=stage, remains=-whole * op.bytes) if op.kind == "reduce_scatter" else op for op in ops]


def _shares_gradients(job: Job) -> bool:
    """As PyTorch does; Megatron-LM's buffers are whole the step long."""
    given = job.spec.share_gradients
    return not job.spec.master_weights if given is None else given


def _backward(cut: Sequence[chain.Unit]) -> list[Op]:
    return [op for unit in reversed(cut) for op in unit.backward]


def _without(ops: Sequence[Op], sent: int) -> tuple[Op, ...]:
    """The forward of a layer that does not keep as many bytes of what it made: the last piece that kept so much."""
    last = max((i for i, op in enumerate(ops) if op.saved >= sent), default=None)
    return tuple(replace(op, saved=op.saved - sent) if i == last else op for i, op in enumerate(ops))


def _gathering_first(actions: Sequence[Action], passes: Passes, *, at_once: bool) -> list[Action]:
    """The first microbatch finds each layer sharded, and gathers it; gradients are reduced after everything else.
    `at_once`: an optimizer that shares its state alone gathers on all stages when it has stepped, so that none waits
    for a microbatch before (DeepSpeed, bf16_optimizer.py: step; Megatron-LM, distrib_optimizer.py)."""
    row, stage = [], next(action.stage for action in actions if action.kind == "forward")
    layers = [i for i in range(len(passes)) if (f"gather {i}", stage) in passes]
    if not any(passes[f"gather {i}", stage] for i in layers):
        return [*actions, Action("reduce_grad", stage, None)]
    first = not at_once
    row += [Action(f"gather {i}", stage, None) for i in layers if at_once]
    for action in actions:
        if action.kind != "forward":
            row.append(action)
            continue
        for i in layers:
            row += [Action(f"gather {i}", stage, None)] if first else []
            row.append(Action(f"forward {i}", stage, action.microbatch))
        first = False
    return [*row, Action("reduce_grad", stage, None)]


def standing(job: Job, mesh: Mesh, row: Sequence[Action], layers: dict[int, Sequence[Layer]]) -> dict[str, int]:
    """What a rank holds whole of the layers of its stages, and of their gradients."""
    ranks = mesh.degree("fsdp")
    sizes = {stage: [gathered_bytes(layer, ranks) for layer in each] for stage, each in layers.items()}
    if job.spec.master_weights:  # what is gathered once in a step stays, as in Megatron-LM's distributed optimizer
        size = sum(map(sum, sizes.values()))
        kept = size // ranks if _shares_gradients(job) else size  # whole ones come and go with `_reductions`
        return {"parameters": size, "gradients": FP32 // job.item * kept}
    whole = {stage: sum(gradient_bytes(job, layer) for layer in each) for stage, each in layers.items()}
    if not is_shared(mesh) or not _shares_gradients(job):
        gathered = most_gathered(row, sizes, ranks) if is_shared(mesh) else 0
        return {"gathered": gathered, "gradients": sum(whole.values())}
    shards = {stage: sum(padded_bytes(layer, ranks) for layer in each) for stage, each in layers.items()}
    return {
        "gathered": most_gathered(row, sizes, ranks),
        "gradients": most_gradients(row, whole, shards, added=job.microsteps > 1),
    }
