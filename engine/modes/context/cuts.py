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

import dataclasses
from collections.abc import Callable

from engine.job import Job
from engine.modes.context.deal import area, area_of_all
from engine.modes.tensor.cuts import Cut
from engine.modes.tensor.shards import piece
from engine.plan import Op
from engine.shapes import FP32, Layer

KEPT = {"ring": 3, "all_gather": 1, "ulysses": 0}  # of q, k and v, those that are kept as they were made
Hop = Callable[[str, Layer], Op]  # (payload, the piece that it is for) -> the message


def own_tokens(job: Job) -> Job:
    """The job as a rank of cp has it: its layers do as much for each token, and it has some of the tokens."""
    ranks = job.degree("cp")
    if ranks == 1:
        return job

    def own(layer: Layer) -> Layer:
        output = (layer.output[0] // ranks, *layer.output[1:])
        return dataclasses.replace(layer, flops=layer.flops // ranks, output=output, saved=layer.saved // ranks)

    return dataclasses.replace(job, layers=tuple(map(own, job.layers)), sample_bytes=job.sample_bytes // ranks)


def forward(job: Job, layer: Layer, rank: int) -> Cut:
    """`layer`: of `own_tokens`. `rank`: the coordinate on the axis cp."""
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


def parts(job: Job, kind: str, name: str, rank: int) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind, for the recorder."""
    (layer,) = [layer for layer in own_tokens(job).layers if layer.name == name]
    cut = (forward if kind == "forward" else backward)(job, layer, rank)
    return tuple(item.name for item in cut if isinstance(item, Layer))


def _width(job: Job) -> int:
    """Of the queries of a token, as of its keys and values: of all heads that a rank has."""
    return job.spec.hidden // job.degree("tp")


def _around(job: Job, layer: Layer) -> tuple[Layer, Layer]:
    """A block before its attention and after it. What attention keeps is counted where it is made: before, of q, k, v
    what is not exchanged first; after, its output and the log-sum-exp of each head."""
    c, h, kind = job.tokens, job.spec.hidden, job.spec.attention
    kept = KEPT[kind]
    rest = layer.saved - FP32 * c * 5 * h  # but the first norm's input and output, q, k and v
    copy = FP32 * c * h if kind == "ulysses" else 0  # attention's output by heads, beside that by tokens
    before = piece(
        layer, "qkv", "norm1", "qkv",
        flops=2 * c * 3 * h * h, saved=FP32 * c * h * (2 + kept), output=(c, 3 * h),
    )  # fmt: skip
    after = piece(
        layer, "mlp", "proj", "norm2", "up", "down",
        flops=2 * c * 9 * h * h, saved=rest + copy, output=(c, h),
    )  # fmt: skip
    return before, after


def _attention(job: Job, layer: Layer, name: str, pairs: int, *, saved: int = 0) -> Layer:
    """Scores and weighted sum for so many pairs of a query and a key; reads q, k and v, and writes as much as q."""
    h = _width(job)
    return piece(layer, name, flops=2 * 2 * pairs * h, saved=saved, output=(job.tokens if pairs else 0, 4 * h))


def _kv_bytes(job: Job) -> int:
    """Keys and values of a rank's own tokens."""
    return FP32 * 2 * job.tokens * _width(job)


# --- ring -----------------------------------------------------------------------------------------------------------


def _turns(job: Job, layer: Layer, rank: int) -> list[Layer]:
    """In turn t a rank attends to what the rank t places before it holds."""
    ranks, spec = job.degree("cp"), job.spec
    pairs = [area(rank, (rank - t) % ranks, ranks, spec.context, spec.balance) for t in range(ranks)]
    return [_attention(job, layer, f"attention{t}", number) for t, number in enumerate(pairs)]


def _ring_forward(job: Job, layer: Layer, rank: int) -> Cut:
    turns, send, recv = _turns(job, layer, rank), *_hops(job, rank)
    cut: Cut = [send("activation", turns[1])]
    for t, turn in enumerate(turns):
        cut.append(turn)
        cut += [recv("activation", each) for each in turns[t + 1 : t + 2]]
        cut += [send("activation", each) for each in turns[t + 2 : t + 3]]
    return cut


def _ring_backward(job: Job, layer: Layer, rank: int) -> Cut:
    """A sum is of a turn's gradients of keys and values and of those that came from the rank before."""
    turns, send, recv = _turns(job, layer, rank), *_hops(job, rank)
    added = {"flops": _kv_bytes(job) // FP32 // 2, "output": (job.tokens, 2 * _width(job))}
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


def _hops(job: Job, rank: int) -> tuple[Hop, Hop]:
    """Keys and values, or their gradients: to the next rank, and from the one before. Each is for one piece of work."""
    ranks, size = job.degree("cp"), _kv_bytes(job)

    def hop(kind: str, step: int) -> Hop:
        known = {"kind": kind, "axis": "cp", "peer": (rank + step) % ranks, "bytes": size}
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


def _by_heads(job: Job, layer: Layer) -> tuple[Layer, int]:
    """All of the context, for the heads of one rank; and the bytes of its output."""
    output = _kv_bytes(job) // 2
    return _attention(job, layer, "attention", job.spec.context**2 // job.degree("cp"), saved=3 * output), output


def _ulysses_forward(job: Job, layer: Layer, rank: int) -> Cut:
    attention, output = _by_heads(job, layer)
    return [
        _collective("all_to_all", "activation", attention, 3 * output),
        attention,
        _collective("all_to_all", "activation", attention, output),
    ]


def _ulysses_backward(job: Job, layer: Layer, rank: int) -> Cut:
    attention, output = _by_heads(job, layer)
    return [
        _collective("all_to_all", "gradient", attention, output),
        attention,
        _collective("all_to_all", "gradient", attention, 3 * output),
    ]


def _collective(kind: str, payload: str, attention: Layer, size: int) -> Op:
    return Op(kind=kind, part=attention.name, payload=payload, axis="cp", bytes=size)


ATTENTION = {
    "ring": (_ring_forward, _ring_backward),
    "all_gather": (_gather_forward, _gather_backward),
    "ulysses": (_ulysses_forward, _ulysses_backward),
}
