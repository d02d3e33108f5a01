"""Layers, and how a rank cuts each of them -> the ops of their passes: pieces, and the collectives between them."""

import dataclasses
import operator
from collections.abc import Callable, Sequence

from engine.job import Job
from engine.model import chain
from engine.model.shapes import Layer
from engine.plan import Op

Cut = list[Layer | Op]  # pieces of a layer, and the collectives between them, for one sample
Way = Callable[[Job, Layer], Cut]  # forward or backward through a layer
Blocks = dict[tuple, chain.Unit]  # by what a block is apart from its name, and whether its output is sent on
ALL_BUT_NAME = operator.attrgetter(*(field.name for field in dataclasses.fields(Layer) if field.name != "name"))
SUMS = ("all_reduce", "reduce_scatter")  # their results are kept when recomputing selectively
KEPT = (*SUMS, "send", "recv")  # and what attention makes of keys and values that go round


def units(
    job: Job,
    layers: Sequence[Layer],
    samples: int,
    forward: Way,
    backward: Way,
    *,
    stage: int | None = None,
    sent: bool = False,
    stays: bool = False,
    blocks: Blocks | None = None,
) -> list[chain.Unit]:
    """Layers of `held`, each cut where its ranks meet. In a pipeline they, and their collectives, are of a stage, and
    the last output may be sent on, or all be there until a later half of the backward. `blocks`: what has been cut of
    this job, and is not cut again."""
    if job.degree("tp") == job.degree("cp") == job.degree("ep") == 1:
        return chain.units(layers, samples, stage=stage or 0, spec=job.spec, sent=sent, stays=stays)
    out: list[chain.Unit] = []
    blocks = {} if blocks is None else blocks
    for layer in layers:
        last = stays or (sent and layer is layers[-1])
        alike = layer.name.startswith("block") and job.routed is None
        block = (*ALL_BUT_NAME(layer), last) if alike else None
        if block in blocks:
            out.append(_renamed(blocks[block], layer, stage))
            continue
        there, back = forward(job, layer), backward(job, layer)
        kept = kept_by(job, layer, there, sent=last)
        ahead, behind = [], []
        for item in there:
            if isinstance(item, Op):
                ahead.append(_of_batch(item, "activation", samples, stage, _waited(job)))
                continue
            (op,) = chain.forward([item], samples, stage=stage or 0)
            ahead.append(dataclasses.replace(op, saved=kept[item.name] * samples))
        again = _again(job, layer, there, samples, stage, sent=last)
        for item in back:
            if isinstance(item, Layer) and needs_forward(item):
                behind, again = behind + again, []
            if isinstance(item, Op):
                behind.append(_of_batch(item, "gradient", samples, stage, _waited(job)))
            else:
                behind += chain.backward([item], samples, stage=stage or 0)
        out.append(chain.Unit(layer, tuple(ahead), tuple(behind)))
        if block is not None:
            blocks[block] = out[-1]
    return out


def _renamed(unit: chain.Unit, layer: Layer, stage: int | None) -> chain.Unit:
    """What a layer like another does: the same, by its own name and on its own stage."""
    old, new = len(unit.layer.name), layer.name
    there, back = (
        tuple(op.of(new + op.part[old:], op.stage if stage is None else stage) for op in ops)
        for ops in (unit.forward, unit.backward)
    )
    return chain.Unit(layer, there, back)


def _again(job: Job, layer: Layer, cut: Cut, samples: int, stage: int | None, *, sent: bool) -> list[Op]:
    """The ops of what is repeated. As it ends, the layer's own output is no more: the next layer has gone back. What
    was kept selectively of the last product, which is not taken again, is."""
    ops, kept = [], kept_by(job, layer, cut, sent=sent)
    for run in repeated(job, layer, cut):
        if isinstance(run, Op):
            ops.append(_of_batch(run, "activation", samples, stage, _waited(job)))
            continue
        parts = [chain.recompute(item, samples, job.spec, stage=stage or 0, microbatch=0) for item in run]
        saved = sum(item.saved - kept[item.name] for item in run) * samples
        ops.append(dataclasses.replace(chain.whole_stage(parts), part=run[0].name, saved=saved))
    if ops:
        last = [item for item in cut if isinstance(item, Layer) and kept[item.name]][-1]
        change = -last.left
        if job.spec.recompute == "selective":  # what a sum over ranks came to is kept, beside what it is a sum of
            met = [item.kind for item in cut if isinstance(item, Op)][-1:]
            change += last.left if met and met[0] in SUMS else 0
            change += layer.output_bytes if layer.last_flops else 0
        change += 0 if needs_forward(last) and not sent else last.left  # what needs nothing goes back before
        ops[-1] = dataclasses.replace(ops[-1], saved=ops[-1].saved + change * samples)
    less = 0  # what goes with an op is gone before the next one's is there
    for i, op in enumerate(ops):
        ops[i] = dataclasses.replace(op, saved=max(0, op.saved + less))
        less = min(0, op.saved + less)
    return ops


def needs_forward(piece: Layer) -> bool:
    """Whether the way back through a piece needs what forward made; a sum of two, which is all it keeps, does not."""
    return bool(piece.params) or piece.saved > piece.output_bytes


def kept_by(job: Job, layer: Layer, cut: Cut, *, sent: bool = False) -> dict[str, int]:
    """Piece -> the bytes of a sample that it keeps until backward: where the layer is computed again, its products or,
    if all of it is, the output of the last one that keeps anything. `sent`: the layer's output goes on to another
    device, and is kept here whoever has a copy."""
    pieces = [item for item in cut if isinstance(item, Layer)]
    if not chain.is_recomputed(layer, job.spec):
        given = job.spec.recompute not in (None, "none")  # to a layer that is computed again from what it was given
        return {piece.name: piece.saved - (0 if given or sent else piece.copied) for piece in pieces}
    if job.spec.recompute == "selective":
        return {piece.name: piece.products - (0 if sent else piece.products_copied) for piece in pieces}
    last = [piece.name for piece in pieces if piece.saved][-1]
    return {piece.name: piece.left if piece.name == last else 0 for piece in pieces}


def repeated(job: Job, layer: Layer, cut: Cut) -> list[list[Layer] | Op]:
    """What is done again of a layer's forward before it goes back, up to the last thing that backward needs: runs of
    pieces, and the collectives between them. Selectively, sums over ranks are kept as products are, and so is what they
    came to by messages; only what ranks gather is gathered again."""
    if not chain.is_recomputed(layer, job.spec):
        return []
    kept = kept_by(job, layer, cut)
    ends = [i for i, item in enumerate(cut) if isinstance(item, Layer) and item.saved > kept[item.name]]
    selective = job.spec.recompute == "selective"
    runs: list[list[Layer] | Op] = [[]]
    goes_on, left_out = True, False  # the next piece with the run before; whether anything between pieces was
    for item in cut[: ends[-1] + 1]:
        if isinstance(item, Layer):
            runs += [] if goes_on else [[]]
            runs[-1].append(item)
            goes_on = left_out
        elif selective and item.kind in KEPT:
            goes_on = left_out = True
        else:
            runs += [item, []]
            goes_on = True
    return [run for run in runs if run]


def names_in(job: Job, layer: Layer, ways: tuple[Way, Way], kind: str) -> tuple[str, ...]:
    """Names of the pieces of a layer in a pass of this kind, for the recorder."""
    if kind == "recompute":
        return tuple(run[0].name for run in repeated(job, layer, ways[0](job, layer)) if not isinstance(run, Op))
    return tuple(item.name for item in ways[kind != "forward"](job, layer) if isinstance(item, Layer))


def collective(kind: str, part: str, size: int) -> Op:
    return Op(kind=kind, part=part, axis="tp", bytes=size)


def _waited(job: Job) -> int:
    """In how many parts tensor ranks give each other tokens, of which the first is waited for: the others travel while
    a product works on the part before (Wang et al. 2023, doi 10.1145/3567955.3567959; Transformer Engine's
    userbuffers)."""
    return job.degree("tp") if job.spec.tp_overlap else 1


def _of_batch(op: Op, payload: str, samples: int, stage: int | None, parts: int) -> Op:
    """What is labelled already knows its bytes: those of a weight's gradient do not grow with the samples."""
    if op.payload:
        return dataclasses.replace(op, stage=stage)
    cut = parts if op.kind in ("all_gather", "reduce_scatter") and op.axis == "tp" else 1
    return dataclasses.replace(op, payload=payload, bytes=op.bytes * samples // cut, stage=stage)
