"""A degree and a way to deal -> which tokens of a sequence each rank has, and which blocks of attention they make.

A sequence is cut into equal chunks. Dealt head-tail there are two for each rank, one from the front and one from the
back: under a causal mask late tokens see more, and so every rank gets as much of both. Without balancing there is one.
"""

import functools


def num_chunks(ranks: int, balance: str) -> int:
    return 2 * ranks if balance == "head_tail" else ranks


def chunks(rank: int, ranks: int, balance: str) -> tuple[int, ...]:
    """The chunks of one rank, in rising order."""
    return (rank, 2 * ranks - 1 - rank) if balance == "head_tail" else (rank,)


def visible(mine: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[int, int]]:
    """Which blocks are not masked whole: (place of a chunk of queries, place of a chunk of keys), by queries."""
    return [(i, j) for i, query in enumerate(mine) for j, key in enumerate(theirs) if key <= query]


def positions(rank: int, ranks: int, context: int, balance: str) -> list[int]:
    """Where in the sequence a rank's tokens stand, in its own order."""
    size = context // num_chunks(ranks, balance)
    return [chunk * size + i for chunk in chunks(rank, ranks, balance) for i in range(size)]


@functools.cache
def blocks(rank: int, ranks: int, balance: str) -> tuple[int, ...]:
    """How many blocks of a rank's are not masked whole, of each turn of a ring: in turn t it attends to what the rank t
    places before it has."""
    own = chunks(rank, ranks, balance)
    return tuple(len(visible(own, chunks((rank - turn) % ranks, ranks, balance))) for turn in range(ranks))


def area(rank: int, other: int, ranks: int, context: int, balance: str) -> int:
    """Pairs of a query of `rank` and a key of `other` in the blocks that are not masked whole."""
    size = context // num_chunks(ranks, balance)
    return size**2 * len(visible(chunks(rank, ranks, balance), chunks(other, ranks, balance)))


def area_of_all(rank: int, ranks: int, context: int, balance: str) -> int:
    """The same with the keys of all ranks: a chunk of queries sees as many chunks as stand before it, and itself."""
    size = context // num_chunks(ranks, balance)
    return size**2 * sum(chunk + 1 for chunk in chunks(rank, ranks, balance))


def span(rank: int, ranks: int, context: int, balance: str) -> str:
    """A rank's tokens in words: `tokens 0:8 56:64`. The last rank's two chunks are one run."""
    size = context // num_chunks(ranks, balance)
    first, last = chunks(rank, ranks, balance)[0], chunks(rank, ranks, balance)[-1]
    ends = [(first, last + 1)] if last - first <= 1 else [(first, first + 1), (last, last + 1)]
    runs = [f"{begin * size}:{end * size}" for begin, end in ends]
    return f"tokens {' '.join(runs)}"
