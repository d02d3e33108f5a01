"""A layer, on a rank that shares out experts, and perhaps each of them -> its pieces, and what travels between them.

Where tokens go depends on the data. A prediction gives every expert as many as any other; a job that knows what its
routers chose (`Job.routed`) gets the sizes that follow from it. What a rank sends to the experts of all ranks, and gets
back from them, is the same in both: each of its tokens, `top_k` times.
"""

from collections.abc import Sequence

from engine.job import Job
from engine.model.shapes import Layer, num_experts
from engine.modes.expert.pieces import INT64, pieces, routed, shared
from engine.modes.sequence import plan as sequence
from engine.modes.tensor import plan as tensor
from engine.modes.tensor.cuts import Cut, Way, names_in
from engine.modes.tensor.shards import piece
from engine.plan import Op

EXPERTS = ".experts"


def arrivals(job: Job, layer: Layer, group: Sequence[int], place: int, samples: int, turn: int = 0) -> int:
    """Copies of tokens that all ranks of a group send to the experts of the rank at `place` in it, in a pass of so many
    samples of each; it is the step's `turn`-th."""
    if job.routed is None or not num_experts(layer):
        return _copies(job, samples)
    each = job.spec.experts // len(group)
    return sum(sum(job.routed[rank][layer.name][turn][place * each : (place + 1) * each]) for rank in group)


def _copies(job: Job, samples: int) -> int:
    """Copies of tokens that a rank sends."""
    return samples * job.routed_tokens * job.spec.top_k


def parts(job: Job, kind: str, name: str) -> tuple[str, ...]:
    """Names of the pieces of layer `name` in a pass of this kind."""
    (layer,) = [layer for layer in job.layers if layer.name == name]
    return names_in(job, layer, ways(job, (0,), 0, 1), kind)


def ways(job: Job, group: Sequence[int], place: int, samples: int, turn: int = 0) -> tuple[Way, Way]:
    """Forward and backward through a layer, in a pass of so many samples of each rank of a group."""
    return tuple(
        lambda job, layer, cut=cut: cut(job, layer, arrivals(job, layer, group, place, samples, turn), samples)
        for cut in (forward, backward)
    )


def forward(job: Job, layer: Layer, arrived: int, samples: int) -> Cut:
    """A block to whose experts here `arrived` copies of tokens come, and that has so many samples of its own. One rank
    has nothing to exchange."""
    cut, made = _cut(job, layer, arrived, samples, back=False)
    if not made:
        return cut
    before, inside, _ = (piece.name for piece in made)
    counts = _all_to_all(job, layer, "counts", "control", INT64 * job.spec.experts)
    dispatch = piece(layer, "dispatch", output=(job.routed_tokens, job.spec.top_k * job.spec.hidden))
    there = _all_to_all(job, layer, "dispatch", "tokens", _bytes(job, _copies(job, samples)))
    back = _all_to_all(job, layer, "combine", "tokens", _bytes(job, arrived))
    return _with(cut, {before: [counts, dispatch, there], inside: [back]})


def backward(job: Job, layer: Layer, arrived: int, samples: int) -> Cut:
    """The other way round; who sends how many is known by then."""
    cut, made = _cut(job, layer, arrived, samples, back=True)
    if not made:
        return cut
    _, inside, after = (piece.name for piece in made)
    there = _all_to_all(job, layer, "combine", "gradient", _bytes(job, _copies(job, samples)))
    back = _all_to_all(job, layer, "dispatch", "gradient", _bytes(job, arrived))
    return _with(cut, {after: [there], inside: [back]})


def _cut(job: Job, layer: Layer, arrived: int, samples: int, *, back: bool) -> tuple[Cut, tuple[Layer, ...]]:
    """A layer as tensor ranks cut it; and the pieces between which tokens travel, where experts are shared out."""
    made: tuple[Layer, ...] = ()
    if job.expert_axis and num_experts(layer):
        made = (pieces if job.degree("tp") == 1 else routed)(job, layer, arrived, samples)
    if job.degree("tp") == 1:
        return [*(made[::-1] if back else made)] or [layer], made
    ways = sequence if job.spec.sequence_parallel else tensor
    apart = shared(job, layer) if made and job.whole_experts else ()
    return (ways.backward if back else ways.forward)(job, layer, (*apart, *made)), made


def _with(cut: Cut, exchanges: dict[str, list[Layer | Op]]) -> Cut:
    """What comes after some of the pieces, put there."""
    return [each for item in cut for each in (item, *_after(item, exchanges))]


def _after(item: Layer | Op, exchanges: dict[str, list[Layer | Op]]) -> Sequence[Layer | Op]:
    return exchanges.get(item.name, ()) if isinstance(item, Layer) else ()


def _all_to_all(job: Job, layer: Layer, part: str, payload: str, size: int) -> Op:
    return Op(kind="all_to_all", part=f"{layer.name}.{part}", payload=payload, axis=job.expert_axis, bytes=size)


def _bytes(job: Job, copies: int) -> int:
    return job.item * copies * job.spec.hidden
