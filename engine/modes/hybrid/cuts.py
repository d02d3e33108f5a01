"""A job on a mesh -> how its layers are cut there: a forward and a backward for each, and what completes its gradients.

Cut for tensor ranks a layer's sums are all-reduces; where sequences are parallel too, they are gathers and scatters of
tokens. The gradients of norms that have seen a part of the tokens, and of routers before a part of each expert, are
summed over the tensor ranks. Where sequences are dealt out over cp, attention is cut as it is there, each tensor rank
with the keys of its own heads. Where experts are shared out, over ep or tensor ranks too, they are a unit of their own:
other ranks have the same ones than of the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.job import Job
from engine.model import chain
from engine.model.shapes import FP32, Layer, num_experts
from engine.modes.context import cuts as context
from engine.modes.expert import cuts as expert
from engine.modes.expert import shares
from engine.modes.sequence import plan as sequence
from engine.modes.tensor import plan as tensor
from engine.modes.tensor import shards
from engine.modes.tensor.cuts import Blocks, Cut, Way, names_in, units
from engine.modes.tensor.pieces import decoder
from engine.modes.tensor.shards import piece
from engine.plan import Mesh


class Seat(NamedTuple):
    """Where a rank stands on axes along which not all ranks do the same; on cp, the first that does the same."""

    cp: int = 0
    expert: int = 0  # among the ranks that share experts out
    experts: tuple[int, ...] = ()  # those ranks


def seat_of(job: Job, mesh: Mesh, rank: int) -> Seat:
    cp, expert = (mesh.coordinate(rank, axis) if mesh.has(axis) else 0 for axis in ("cp", job.expert_axis))
    sharing = mesh.group(rank, job.expert_axis) if mesh.has(job.expert_axis) else (rank,)
    return Seat(context.alike(job)[cp], expert, sharing)


def held(job: Job, seat: Seat) -> tuple[Layer, ...]:
    """The layers, with the shapes of what the rank holds of them before it is sharded."""
    return shares.held(job, seat.expert) if job.expert_axis else shards.held(job)


def units_of(
    job: Job,
    layers: Sequence[Layer],
    samples: int,
    seat: Seat,
    *,
    stage: int | None = None,
    turn: int = 0,
    sent: bool = False,
    stays: bool = False,
    blocks: Blocks | None = None,
) -> list[chain.Unit]:
    """Layers of `held`, as a rank computes them in a pass, the step's `turn`-th; the job is that of `own_tokens`.
    `sent`: the last output goes on to another stage. `stays`: all are there until a later half of the backward.
    `blocks`: what has been cut for this seat."""
    if job.expert_axis:
        made = units(job, layers, samples, *_expert_ways(job, samples, seat, turn), stage=stage, sent=sent, stays=stays)
        return [part for unit in made for part in _experts_apart(_with_sums(job, unit))]
    known = {"stage": stage, "sent": sent, "stays": stays, "blocks": blocks}
    return [_with_sums(job, unit) for unit in units(job, layers, samples, *ways(job, samples, seat.cp), **known)]


def _with_sums(job: Job, unit: chain.Unit) -> chain.Unit:
    """What tensor ranks sum of a layer's gradients."""
    if job.degree("tp") == 1:
        return unit
    return replace(unit, sums=tensor.gradient_sums(unit.layer, sequences=bool(job.spec.sequence_parallel)))


def _experts_apart(unit: chain.Unit) -> Sequence[chain.Unit]:
    """What comes before a block's experts, and these and what follows."""
    layer = unit.layer
    if not num_experts(layer):
        return [unit]
    name = f"{layer.name}{expert.EXPERTS}"
    begins, ends = (
        next(i for i, op in enumerate(ops) if (op.kind, op.part) == (kind, name))
        for kind, ops in (("forward", unit.forward), ("backward", unit.backward))
    )
    rest, experts = [], []
    for key, shape in layer.params:
        (experts if key.startswith("experts.") else rest).append((key, shape))
    inner, ahead = Layer(name, tuple(experts), 0, layer.output, 0, layer.item), unit.forward[:begins]
    return (
        replace(unit, layer=replace(layer, params=tuple(rest)), forward=ahead, backward=unit.backward[ends + 1 :]),
        chain.Unit(inner, unit.forward[begins:], unit.backward[: ends + 1], inner=True),
    )


def parts(job: Job, kind: str, name: str, *, seat: Seat) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind, for the recorder."""
    if job.expert_axis:
        own = context.own_tokens(job)
        (layer,) = [layer for layer in held(own, seat) if layer.name == name]
        return names_in(own, layer, _expert_ways(own, 1, seat), kind)
    (layer,) = [layer for layer in shards.held(context.own_tokens(job)) if layer.name == name]
    return names_in(job, layer, ways(job, 1, seat.cp), kind)


def output_of(job: Job, layer: Layer) -> Layer:
    """The last piece of a layer in forward: its output is what a rank passes on."""
    way = (sequence if job.spec.sequence_parallel else tensor).forward
    return tensor.output_of(job, layer, _sending if job.expert_axis else way)


def _sending(job: Job, layer: Layer) -> Cut:
    """Forward of a rank to whose experts as many tokens come as it sends."""
    return expert.forward(job, layer, job.routed_tokens * job.spec.top_k, 1)


def ways(job: Job, samples: int, place: int) -> tuple[Way, Way]:
    """Forward and backward of a layer; `samples` are those of a pass."""
    cuts = sequence if job.spec.sequence_parallel else tensor
    both = (cuts.forward, cuts.backward)
    if job.degree("cp") == 1:
        return both if job.degree("tp") > 1 else (_whole, _whole)
    if job.degree("tp") == 1:
        return context.ways(samples, place)
    return _dealt_out(both, samples, place)


def _expert_ways(job: Job, samples: int, seat: Seat, turn: int = 0) -> tuple[Way, Way]:
    both = expert.ways(job, seat.experts, seat.expert, samples, turn)
    return both if job.degree("cp") == 1 else _dealt_out(both, samples, seat.cp)


def _dealt_out(both: tuple[Way, Way], samples: int, place: int) -> tuple[Way, Way]:
    """Ways of a block whose first piece has its attention, on a rank with some of the tokens."""
    between = (_between(way, place, back=back) for way, back in zip(both, (False, True), strict=True))
    return tuple(lambda job, layer, way=way: context.of_batch(way(job, layer), samples) for way in between)


def _whole(job: Job, layer: Layer) -> Cut:
    return [layer]


def _between(way: Way, place: int, *, back: bool) -> Way:
    """A way through a layer, with the attention of cp between its first pair of matrices."""

    def cut(job: Job, layer: Layer) -> Cut:
        out: Cut = []
        for item in way(job, layer):
            if not isinstance(item, Layer) or item.name != f"{layer.name}.attention":
                out.append(item)
                continue
            before, after = _around(job, layer, item)
            among = context.attention(job, layer, place, back=back)
            out += [after, *among, before] if back else [before, *among, after]
        return out

    return cut


def _around(job: Job, layer: Layer, pair: Layer) -> tuple[Layer, Layer]:
    """A pair of matrices, before attention and after it, with all else of the piece that has both. Of what attention
    keeps, that is counted where it is made: before, of q, k and v what is not exchanged first; after, its output and
    the log-sum-exp of each head."""
    (c, h), ranks, sizes, (q, kv) = layer.output, job.degree("tp"), decoder(job), context.widths(job)
    of_all = layer.item * c * q  # the queries of all tokens here
    ends = of_all + FP32 * c * job.spec.heads // ranks
    copy = of_all if job.spec.attention == "ulysses" else 0  # attention's output by heads, beside that by tokens
    made = layer.item * c * (q + kv)  # and kept if all products are
    first, last = sizes.around_attention(ranks)
    norm = [name for name in ("norm1",) if any(key.startswith(name) for key, _ in pair.params)]
    before = piece(
        layer, "qkv", *norm, "qkv",
        flops=2 * c * h * (q + kv),
        saved=pair.saved - ends - layer.item * c * (q + kv - context.kept(job)),
        output=(c, q + kv),
        products=made,
        kernels=(*(sizes.norm_kernels() if norm else ()), *first),
    )  # fmt: skip
    rest = pair.flops - sizes.attention_flops(ranks)
    work = {"flops": 2 * c * h * q + rest, "products": pair.products - made}
    work["kernels"] = pair.kernels[pair.kernels.index(last[0], len(first) + len(norm)) :]
    modules = {key.split(".")[0] for key, _ in pair.params} - {*norm, "qkv"}
    after = piece(layer, "proj", *modules, saved=ends + copy, output=pair.output, **work)
    return before, after
