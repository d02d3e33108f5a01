"""A row of NVIDIA's recipes -> what tokens of tensor ranks take of a device, while products work on others.

Transformer Engine's userbuffers send what a product needs, or has made, in one of three ways (comm_gemm_overlap.cpp):
in bulk beside another product, in a pipeline behind its parts, or round a ring from part to part. The first two move
data with multiprocessors, which the product then has not; the last has one of them, and leaves a sum for the end. Which
way each product goes, and how many multiprocessors it gives, is in the recipes' tables (NeMo, collections/llm/recipes/
tp_overlap_configs/userbuffers.py; those with fewer than 8 are left out).
"""

from __future__ import annotations

from engine.cost.kernels import DOWN, OF_WEIGHT, PROJ, QKV, SUMMED_LAST
from engine.validate.case import Case

FIRST_WEIGHT = QKV + OF_WEIGHT
# (numbers of a token, whether Blackwell) -> multiprocessors in 16 bits, and in 8. Whose product is not among those of
# 16 bits goes round a ring, as all do in 8.
RECIPES = {
    (8192, False): ({PROJ: 24, DOWN: 16, FIRST_WEIGHT: 24}, {FIRST_WEIGHT: 24}),
    (8192, True): ({PROJ: 32, DOWN: 16, FIRST_WEIGHT: 24}, {FIRST_WEIGHT: 24}),
    (16384, False): ({PROJ: 24, DOWN: 8, FIRST_WEIGHT: 24}, {FIRST_WEIGHT: 24}),
    (16384, True): ({PROJ: 32, DOWN: 8, FIRST_WEIGHT: 24}, {FIRST_WEIGHT: 32}),
    (12288, False): ({PROJ: 24}, {}),
}
BLACKWELL = ("b200", "b300", "gb200", "gb300")


def beside_products(case: Case) -> dict[str, tuple]:
    """Of a machine what it does and what is taken of it."""
    found = RECIPES.get((case.hidden, case.device in BLACKWELL))
    if found is None:
        return {}
    narrow = case.precision == "fp8"
    return {"taken": tuple(found[narrow].items()), "does": (SUMMED_LAST,) if narrow else ()}
