"""A layer, on a rank of the axis cp -> its pieces, and the messages or collectives between them, for one sample.

Outside of attention a rank works on its own tokens (`own_tokens`). A block is cut before its attention, after it, and
where attention waits for others:

ring       keys and values go round; in backward too, and one hop behind them the sums of their gradients, which are
           home after as many hops as there are ranks (Liu et al. 2023, arXiv:2310.01889)
all_gather all keys and values, kept until backward, whose gradients are reduce-scattered (Grattafiori et al. 2024,
           arXiv:2407.21783, section 3.3.2)
ulysses    queries, keys and values of some tokens become those of some heads (Jacobs et al. 2023, arXiv:2309.14509)

A block of attention that is masked in part counts whole, as all of attention does on one device; one that is masked
whole is skipped, and stays as a piece without work.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.cost.kernels import Kernels, memory, of_part
from engine.cost.machine import shares_cores
from engine.job import Job
from engine.model.decoder import attention_of
from engine.model.shapes import Layer
from engine.modes.context.deal import area, area_of_all, blocks, span
from engine.modes.tensor.cuts import Cut, Way, names_in
from engine.modes.tensor.pieces import decoder
from engine.modes.tensor.plan import inside_of
from engine.modes.tensor.shards import piece
from engine.plan import Op

Hop = Callable[[str, Layer], Op]  # (payload, the piece that it is for) -> the message
# What a rank has of a layer as it has of its tokens.
SHARED = ("flops", "saved", "products", "last_flops", "copied", "products_copied", "logarithms", "behind", "beside")


def own_tokens(job: Job) -> Job:
    """The job as a rank of cp has it: its layers do as much for each token, and it has some of the tokens."""
    ranks = job.degree("cp")
    if ranks == 1:
        return job

    def own(layer: Layer) -> Layer:
        output = (layer.output[0] // ranks, *layer.output[1:])
        share = {name: getattr(layer, name) // ranks for name in SHARED}
        return replace(layer, output=output, kernels=of_part(layer.kernels, ranks), **share)

    return replace(job, layers=tuple(map(own, job.layers)), sample_bytes=job.sample_bytes // ranks)


def alike(job: Job) -> tuple[int, ...]:
    """Of each coordinate on the axis cp the first one whose ranks attend to as many blocks, turn by turn: they do the
    same."""
    ranks = job.degree("cp")
    if job.spec.attention == "ulysses":
        return (0,) * ranks
    turns = [blocks(rank, ranks, job.spec.balance) for rank in range(ranks)]
    return tuple(map(turns.index, turns))


def tokens_of(job: Job) -> tuple[str, ...]:
    """Of each coordinate on the axis cp, which tokens its ranks load, in words; none where they load all."""
    ranks = job.degree("cp")
    return tuple(span(rank, ranks, job.spec.context, job.spec.balance) for rank in range(ranks)) if ranks > 1 else ()


def forward(job: Job, layer: Layer, rank: int) -> Cut:
    """`layer`: of `own_tokens`. `rank`: the coordinate on the axis cp, or that of a rank like it (`alike`)."""
    if job.degree("cp") == 1 or not layer.name.startswith("block"):
        return [layer]
    before, after = _around(job, layer)
    return [before, *attention(job, layer, rank, back=False), after]


def backward(job: Job, layer: Layer, rank: int) -> Cut:
    if job.degree("cp") == 1 or not layer.name.startswith("block"):
        return [layer]
    before, after = _around(job, layer)
    return [after, *attention(job, layer, rank, back=True), before]


def attention(job: Job, layer: Layer, rank: int, *, back: bool) -> Cut:
    """Between a block's queries, keys and values, and what is made of the result; in a mesh with tp, of some heads."""
    return ATTENTION[job.spec.attention][back](job, layer, rank)


def ways(samples: int, rank: int) -> tuple[Way, Way]:
    """Forward and backward through a layer of so many samples."""
    return tuple(lambda job, layer, cut=cut: of_batch(cut(job, layer, rank), samples) for cut in (forward, backward))


def of_batch(cut: Cut, samples: int) -> Cut:
    """What travels over cp, for all samples."""
    over_cp = [isinstance(item, Op) and item.axis == "cp" for item in cut]
    return [replace(item, bytes=item.bytes * samples) if cp else item for item, cp in zip(cut, over_cp, strict=True)]


def parts(job: Job, kind: str, name: str, rank: int) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind, for the recorder."""
    own = own_tokens(job)
    (layer,) = [layer for layer in own.layers if layer.name == name]
    return names_in(own, layer, ways(1, rank), kind)


def widths(job: Job) -> tuple[int, int]:
    """Of a token's queries, and of its keys and values: of all heads that a rank has."""
    sizes, ranks = decoder(job), job.degree("tp")
    return sizes.queries(ranks), sizes.qkv(ranks) - sizes.queries(ranks)


def kept(job: Job) -> int:
    """Of a token's queries, keys and values, the numbers that are kept as they were made."""
    q, kv = widths(job)
    return {"ring": q + kv, "all_gather": q, "ulysses": 0}[job.spec.attention]


def _around(job: Job, layer: Layer) -> tuple[Layer, Layer]:
    """A block before its attention and after it. What attention keeps is counted where it is made: before, of q, k, v
    what is not exchanged first; after, its output and the log-sum-exp of each head."""
    c, h, sizes, (q, kv) = job.tokens, job.spec.hidden, decoder(job), widths(job)
    rest = layer.saved - sizes.norm_saved() - layer.item * c * (q + kv)  # but the first norm's, q, k and v
    copy = layer.item * c * q if job.spec.attention == "ulysses" else 0  # attention's output by heads, beside by tokens
    made = layer.item * c * (q + kv)  # and kept if all products are
    first, last = sizes.around_attention()
    inside = inside_of(job, layer)
    before = piece(
        layer, "qkv", "norm1", "qkv",
        flops=2 * c * h * (q + kv), saved=sizes.norm_saved() + layer.item * c * kept(job), output=(c, q + kv),
        products=made, kernels=(*sizes.norm_kernels(), *first),
    )  # fmt: skip
    after = piece(
        layer, "mlp", "proj", "norm2", *(name.split(".")[0] for name, _ in inside.params),
        flops=2 * c * h * q + inside.flops, saved=rest + copy, output=(c, h),
        products=layer.products - made, last_flops=layer.last_flops, copied=layer.copied,
        products_copied=layer.products_copied, beside=layer.beside,
        kernels=(
            *last, *sizes.sum_kernels(), *sizes.norm_kernels(), *inside.kernels, *sizes.sum_kernels(),
        ),
    )  # fmt: skip
    return before, after


def _attention(job: Job, layer: Layer, name: str, pairs: int, *, saved: int = 0) -> Layer:
    """Scores and weighted sum for so many pairs of a query and a key; reads q, k and v, and writes as much as q."""
    q, kv = widths(job)
    work = (attention_of(decoder(job), job.tokens, pairs, job.degree("tp")),) if pairs else ()
    output = (job.tokens if pairs else 0, 2 * q + kv)
    return piece(layer, name, flops=2 * 2 * pairs * q, saved=saved, output=output, kernels=work)


def summed(job: Job, samples: int) -> int:
    """gloo adds up a copy of what it reduce-scatters: the gradients of all keys and values, of one layer at a time."""
    if job.degree("cp") == 1 or job.spec.attention != "all_gather" or not shares_cores(job.spec.machine):
        return 0
    return job.degree("cp") * _kv_bytes(job) * samples


def _kv_bytes(job: Job) -> int:
    """Keys and values of a rank's own tokens."""
    return job.item * job.tokens * widths(job)[1]


# --- ring -----------------------------------------------------------------------------------------------------------


def _turns(job: Job, layer: Layer, rank: int) -> list[Layer]:
    """In turn t a rank attends to what the rank t places before it holds."""
    ranks, spec = job.degree("cp"), job.spec
    pairs = [area(rank, (rank - t) % ranks, ranks, spec.context, spec.balance) for t in range(ranks)]
    turns = [_attention(job, layer, f"attention{t}", number) for t, number in enumerate(pairs)]
    merged = _added(job, layer, widths(job)[0])
    for t, turn in enumerate(turns[1:], 1):
        if turn.kernels:
            turns[t] = replace(turn, kernels=turn.kernels + merged)
    return turns


def _added(job: Job, layer: Layer, width: int) -> Kernels:
    """What a turn gives for so many numbers of each token is added to what was there, on the way back its gradients."""
    size = layer.item * job.tokens * width
    return (memory(3 * size, 3 * size),)


def _ring_forward(job: Job, layer: Layer, rank: int) -> Cut:
    turns, send, recv = _turns(job, layer, rank), *_hops(job)
    cut: Cut = [send("activation", turns[1])]
    for t, turn in enumerate(turns):
        cut.append(turn)
        cut += [recv("activation", each) for each in turns[t + 1 : t + 2]]
        cut += [send("activation", each) for each in turns[t + 2 : t + 3]]
    return cut


def _ring_backward(job: Job, layer: Layer, rank: int) -> Cut:
    """A sum is of a turn's gradients of keys and values and of those that came from the rank before."""
    turns, send, recv = _turns(job, layer, rank), *_hops(job)
    width = widths(job)[1]
    added = {"flops": job.tokens * width // 2, "output": (job.tokens, width), "kernels": _added(job, layer, width)}
    sums = [piece(layer, f"sum{t}", **added) for t in range(len(turns))]
    wanting = [*sums[1:], piece(layer, "qkv", output=())]  # the piece that waits for what is sent on after each turn
    cut: Cut = [send("activation", turns[1])]
    for t, turn in enumerate(turns):
        cut.append(turn)
        cut += [recv("gradient", sums[t]), sums[t]] if t else []
        cut.append(send("gradient", wanting[t]))
        cut += [recv("activation", each) for each in turns[t + 1 : t + 2]]
        cut += [send("activation", each) for each in turns[t + 2 : t + 3]]
    return [*cut, recv("gradient", wanting[-1])]


def _hops(job: Job) -> tuple[Hop, Hop]:
    """Keys and values, or their gradients: to the next rank, and from the one before. Each is for one piece of work."""
    size = _kv_bytes(job)

    def hop(kind: str, step: int) -> Hop:
        known = {"kind": kind, "axis": "cp", "peer": step, "ring": True, "bytes": size}
        return lambda payload, to: Op(part=to.name, payload=payload, asynchronous=kind == "send", **known)

    return hop("send", 1), hop("recv", -1)


# --- collectives ----------------------------------------------------------------------------------------------------


def _gathered(job: Job, layer: Layer, rank: int) -> Layer:
    ranks, spec = job.degree("cp"), job.spec
    pairs = area_of_all(rank, ranks, spec.context, spec.balance)
    return _attention(job, layer, "attention", pairs, saved=ranks * _kv_bytes(job))


def _gather_forward(job: Job, layer: Layer, rank: int) -> Cut:
    attention = _gathered(job, layer, rank)
    return [_collective("all_gather", "activation", attention, _kv_bytes(job)), attention]


def _gather_backward(job: Job, layer: Layer, rank: int) -> Cut:
    attention = _gathered(job, layer, rank)
    whole = job.degree("cp") * _kv_bytes(job)
    return [attention, _collective("reduce_scatter", "gradient", attention, whole)]


def _by_heads(job: Job, layer: Layer) -> tuple[Layer, int, int]:
    """All of the context, for the heads of one rank; and the bytes of its output, and of its inputs."""
    q, kv = widths(job)
    output, inputs = (job.item * job.tokens * width for width in (q, q + kv))
    return _attention(job, layer, "attention", job.spec.context**2 // job.degree("cp"), saved=inputs), output, inputs


def _ulysses_forward(job: Job, layer: Layer, rank: int) -> Cut:
    attention, output, inputs = _by_heads(job, layer)
    return [
        _collective("all_to_all", "activation", attention, inputs),
        attention,
        _collective("all_to_all", "activation", attention, output),
    ]


def _ulysses_backward(job: Job, layer: Layer, rank: int) -> Cut:
    attention, output, inputs = _by_heads(job, layer)
    return [
        _collective("all_to_all", "gradient", attention, output),
        attention,
        _collective("all_to_all", "gradient", attention, inputs),
    ]


def _collective(kind: str, payload: str, attention: Layer, size: int) -> Op:
    return Op(kind=kind, part=attention.name, payload=payload, axis="cp", bytes=size)


ATTENTION = {
    "ring": (_ring_forward, _ring_backward),
    "all_gather": (_gather_forward, _gather_backward),
    "ulysses": (_ulysses_forward, _ulysses_backward),
}
