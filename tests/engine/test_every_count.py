"""Every mode on every number of ranks up to 8 that it fits, primes too: each equals one device, and does what was
planned. Sizes are the smallest that the number divides. The modes' own tests have larger ones, on 1 to 4 ranks, which
are not run again here."""

from __future__ import annotations

import pytest

from engine.asking.rules import SpecError
from engine.job import prepare_real
from engine.spec import MODES, Spec
from tests.engine.proof import finished, holds, holds_by_design

COUNTS = range(1, 9)
FEW = ("local_sgd", "hybrid")  # whose own tests have fewer numbers
CHAIN = {"model": "mlp", "dataset": "synthetic", "hidden": 8, "layers": 7}  # 8 layers: a stage for each of 8 ranks
WIDE = {**CHAIN, "hidden": 840, "layers": 1}  # 840 is divided by 1 to 8
TEXT = {"model": "gpt", "dataset": "text", "hidden": 24, "heads": 24, "layers": 1}
TOKENS = {"model": "moe", "dataset": "text", "hidden": 8, "heads": 2, "layers": 1, "context": 8}
MESHES = {
    1: {},
    2: {"tp": 2},
    3: {"cp": 3},
    4: {"ep": 2, "dp": 2},
    5: {"pp": 5},
    6: {"fsdp": 3, "pp": 2},
    7: {"fsdp": 7},
}
MESHES[8] = {"dp": 2, "fsdp": 2, "tp": 2}


def small(mode: str, count: int) -> Spec:
    """`count` divides whatever the mode cuts, where the model's sizes can be chosen."""
    sizes = {
        "tensor": WIDE,
        "sequence": {**TEXT, "context": 24},
        "context": {**TEXT, "heads": 2, "hidden": 8, "context": 2 * count if count > 1 else 4},
        "expert": {**TOKENS, "experts": max(count, 2)},
        "hybrid": {
            3: {**TEXT, "heads": 2, "hidden": 8, "context": 6},
            4: {**TOKENS, "experts": 4},
        }.get(count, CHAIN),
    }.get(mode, CHAIN)
    mesh = MESHES[count] if mode == "hybrid" else {"sync_every": 2} if mode == "local_sgd" else {}
    return Spec(mode=mode, devices=count, steps=3, global_batch=2 * count, **sizes, **mesh)


def fits(mode: str, count: int) -> bool:
    try:
        prepare_real(small(mode, count))
    except SpecError:
        return False
    return True


def test_what_does_not_fit_is_what_cannot_be_cut() -> None:
    """One device is one; of a text's vocabulary, padded to a multiple of 48, and of 24 heads there are no fifths and no
    sevenths."""
    refused = {(mode, count) for mode in MODES for count in COUNTS if not fits(mode, count)}
    assert refused == {("single", n) for n in COUNTS if n > 1} | {("sequence", 5), ("sequence", 7)}


NOT_ELSEWHERE = [(mode, n) for mode in MODES for n in COUNTS if (n > 4 or mode in FEW) and fits(mode, n)]


@pytest.mark.real
@pytest.mark.parametrize(("mode", "count"), NOT_ELSEWHERE)
def test_a_mode_on_so_many_ranks(mode: str, count: int, launcher, runs_dir) -> None:
    result = finished(small(mode, count), launcher, runs_dir)
    assert result["devices"] == count
    (holds_by_design if mode == "local_sgd" else holds)(result)
