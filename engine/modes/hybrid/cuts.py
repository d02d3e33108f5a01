"""A job on a mesh -> how its layers are cut there: a forward and a backward for each, and what completes its gradients.

Cut for tensor ranks a layer's sums are all-reduces; where sequences are parallel too, they are gathers and scatters of
tokens, and the gradients of norms, which have seen a part of the tokens, are summed over the tensor ranks. Where
sequences are dealt out over cp, attention is cut as it is there, each tensor rank with the keys of its own heads.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine import chain
from engine.job import Job
from engine.modes.context import cuts as context
from engine.modes.context.deal import span
from engine.modes.sequence import plan as sequence
from engine.modes.tensor import plan as tensor
from engine.modes.tensor.cuts import Cut, Way, names_in, units
from engine.modes.tensor.pieces import decoder
from engine.modes.tensor.shards import held, piece
from engine.plan import Op
from engine.shapes import FP32, Layer


def units_of(
    job: Job, layers: Sequence[Layer], samples: int, place: int, *, stage: int | None = None, sent: bool = False
) -> list[chain.Unit]:
    """Layers of `held`, as a rank at `place` on cp computes them; the job is that of `own_tokens`. `sent`: the last
    output goes on to another stage."""
    made = units(job, layers, samples, *ways(job, samples, place), stage=stage, sent=sent)
    if not job.spec.sequence_parallel:
        return made
    return [replace(unit, sums=sequence.norm_gradients(unit.layer)) for unit in made]


def parts(job: Job, kind: str, name: str, place: int) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind, for the recorder."""
    (layer,) = [layer for layer in held(context.own_tokens(job)) if layer.name == name]
    return names_in(job, layer, ways(job, 1, place), kind)


def output_of(job: Job, layer: Layer) -> Layer:
    """The last piece of a layer in forward: its output is what a rank passes on."""
    return tensor.output_of(job, layer, (sequence if job.spec.sequence_parallel else tensor).forward)


def tokens_of(job: Job, place: int) -> str:
    """Which tokens a rank loads, in words; none where it loads all."""
    ranks = job.degree("cp")
    return span(place, ranks, job.spec.context, job.spec.balance) if ranks > 1 else ""


def ways(job: Job, samples: int, place: int) -> tuple[Way, Way]:
    """Forward and backward of a layer; `samples` are those of a pass."""
    cuts = sequence if job.spec.sequence_parallel else tensor
    both = (cuts.forward, cuts.backward)
    if job.degree("cp") == 1:
        return both if job.degree("tp") > 1 else (_whole, _whole)
    if job.degree("tp") == 1:
        both = tuple(lambda job, layer, cut=cut: cut(job, layer, place) for cut in (context.forward, context.backward))
    else:
        both = tuple(_between(way, place, back=way is cuts.backward) for way in both)
    return tuple(lambda job, layer, way=way: _of_batch(way(job, layer), samples) for way in both)


def _whole(job: Job, layer: Layer) -> Cut:
    return [layer]


def _of_batch(cut: Cut, samples: int) -> Cut:
    """What travels over cp, for all samples."""
    over_cp = [isinstance(item, Op) and item.axis == "cp" for item in cut]
    return [replace(item, bytes=item.bytes * samples) if cp else item for item, cp in zip(cut, over_cp, strict=True)]


def _between(way: Way, place: int, *, back: bool) -> Way:
    """A tensor rank's way through a layer, with the attention of cp between its first pair of matrices."""

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
    """A pair of matrices, before attention and after it. Of what attention keeps, that is counted where it is made:
    before, of q, k and v what is not exchanged first; after, its output and the log-sum-exp of each head."""
    (c, h), ranks, sizes, (q, kv) = layer.output, job.degree("tp"), decoder(job), context.widths(job)
    of_all = layer.item * c * q  # the queries of all tokens here
    ends = of_all + FP32 * c * job.spec.heads // ranks
    copy = of_all if job.spec.attention == "ulysses" else 0  # attention's output by heads, beside that by tokens
    first, last = sizes.around_attention(ranks)
    norm = [name for name in ("norm1",) if any(key.startswith(name) for key, _ in pair.params)]
    before = piece(
        layer, "qkv", *norm, "qkv",
        flops=2 * c * h * (q + kv),
        saved=pair.saved - ends - layer.item * c * (q + kv - context.kept(job)),
        output=(c, q + kv),
        kernels=(*(sizes.norm_kernels() if norm else ()), *first),
    )  # fmt: skip
    work = {"flops": 2 * c * h * q, "kernels": last}
    after = piece(layer, "proj", "proj", saved=ends + copy, output=pair.output, **work)
    return before, after
