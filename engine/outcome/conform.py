"""What was planned and what was measured -> whether they are the same ops, in the same order, with the same bytes.

Compared lane by lane on every rank in every step: compute, each collective axis, each direction of a link. A measured
op that does not know its part (a bucket's all-reduce is seen as a call of so many bytes) takes it from the planned op
it is joined to. Asynchronous collectives may be noted a little out of order (see `_in_order`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from engine.plan import COLLECTIVES, Plan
from engine.timeline import NONE, Span


def conform(spans: Iterable[Span], plan_of: Callable[[int], Plan], steps: Iterable[int]) -> tuple[dict, list[Span]]:
    """(`ok`, `planned`, `measured`, `matched`, `first_difference`), and the spans with their parts filled in.

    `plan_of(step)` is the plan of a step, `steps` those that ran to their end. Counts are of ops over all ranks.
    """
    measured: dict[tuple, list[Span]] = defaultdict(list)
    for span in spans:
        measured[span.step, span.rank, span.lane].append(span)
    planned_count = matched = 0
    difference = None
    joined: list[Span] = []
    plan: Plan | None = None
    for step in sorted(set(steps)):
        before, plan = plan, plan_of(step)
        if plan is not before:
            planned = _lanes(plan)
        keys = planned.keys() | {(rank, lane) for s, rank, lane in measured if s == step}
        for rank, lane in sorted(keys):
            wanted, free = planned.get((rank, lane), ([], []))
            seen = _in_order(measured.pop((step, rank, lane), []), wanted, free)
            planned_count += len(wanted)
            for i in range(max(len(wanted), len(seen))):
                want = wanted[i] if i < len(wanted) else None
                have = seen[i] if i < len(seen) else None
                if want is not None and have is not None and _same(want, have):
                    matched += 1
                    have = have._replace(part=want.part, bytes=have.bytes or want.bytes)
                elif difference is None:
                    difference = {
                        "rank": rank,
                        "step": step,
                        "lane": lane,
                        "index": i,
                        "planned": describe(want),
                        "measured": describe(have),
                    }
                if have is not None:
                    joined.append(have)
    left = [span for row in measured.values() for span in row]  # of steps that did not end
    ok = planned_count > 0 and matched == planned_count == len(joined)
    report = {"ok": ok, "planned": planned_count, "measured": len(joined), "matched": matched}
    return report | {"first_difference": difference}, joined + left


def _lanes(plan: Plan) -> dict[tuple[int, str], tuple[list[Span], list[bool]]]:
    """The planned ops of every rank and lane, as spans without times; and which are asynchronous collectives."""
    lanes: dict[tuple[int, str], tuple[list[Span], list[bool]]] = defaultdict(lambda: ([], []))
    for rank in range(plan.world_size):
        for op in plan.program(rank).ops:
            lane, peer = plan.lane(rank, op), plan.peer_rank(rank, op)
            spans, free = lanes[rank, lane]
            free.append(op.asynchronous and op.kind in COLLECTIVES)
            spans.append(
                Span(
                    rank,
                    lane,
                    op.kind,
                    0,
                    0.0,
                    0.0,
                    NONE if op.stage is None else op.stage,
                    NONE if op.microbatch is None else op.microbatch,
                    op.part,
                    op.payload,
                    op.axis,
                    NONE if peer is None else peer,
                    op.bytes,
                )
            )
    return lanes


def _in_order(seen: list[Span], wanted: list[Span], free: list[bool]) -> list[Span]:
    """Spans by start; an asynchronous op (`free`) that gloo noted late is put where it was planned.

    gloo takes ops off its queue in order, but runs two at a time and notes the start of each on the thread that runs
    it. A thread that has to wait for a core lets the other one run ahead, so one op can be noted after its successors:
    one, since there are two threads, and those successors in their order, whether or not they are waited for.
    """
    seen = sorted(seen, key=lambda span: span.start)
    for i, want in enumerate(wanted[: len(seen)]):
        if not free[i] or _same(want, seen[i]):
            continue
        late = next((j for j in range(i + 1, min(len(seen), len(wanted))) if _same(want, seen[j])), None)
        if late and all(_same(wanted[k + 1], seen[k]) for k in range(i, late)):
            seen.insert(i, seen.pop(late))
    return seen


def _same(want: Span, have: Span) -> bool:
    """Every word that the measured op knows is the planned one's; the bytes of what moved are equal."""
    if (want.kind, want.payload, want.stage, want.microbatch) != (have.kind, have.payload, have.stage, have.microbatch):
        return False
    if have.part and have.part != want.part:
        return False
    return want.lane == "compute" or (want.bytes, want.peer) == (have.bytes, have.peer)


def describe(span: Span | None) -> str | None:
    if span is None:
        return None
    words = [span.kind, span.payload, span.part]
    words += [f"s{span.stage}"] if span.stage != NONE else []
    words += [f"m{span.microbatch}"] if span.microbatch != NONE else []
    words += [f"to/from rank {span.peer}"] if span.peer != NONE else []
    words += [f"{span.bytes} bytes"] if span.lane != "compute" else []
    return " ".join(word for word in words if word)
