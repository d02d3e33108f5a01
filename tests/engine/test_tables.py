"""What people read at a terminal: equal values of many ranks are said once."""

import pytest

from engine.cli.tables import each_rank


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "-"),
        ([3], "3"),
        ([3] * 16_384, "3 on every rank"),
        ([3, 3, 1, 3], "0–1: 3  2: 1  3: 3"),
        ([3] * 1024 + [2] * 15_360, "0–1023: 3  1024–16383: 2"),
        (list(range(17)), "  ".join(f"{i}: {i}" for i in range(16)) + "  ... 17 ranks"),
    ],
)
def test_ranks_side_by_side_that_have_the_same_are_said_together(values, said):
    assert each_rank(values, str) == said
