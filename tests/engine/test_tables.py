"""What people read at a terminal: equal values of many ranks are said once, and numbers in units that read well."""

import pytest

from engine.cli.tables import each_rank, seconds, size


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


def test_a_number_is_told_in_the_largest_unit_of_which_there_is_one():
    times = {0.99996: "1 s", 0.9994: "999 ms", 9.9996e-7: "1 us", 1234.5: "1,234 s", 2.11e6: "2,110,000 s", 0.0: "0 s"}
    assert {value: seconds(value) for value in times} == times
    sizes = {0: "0 B", 999: "999 B", 85.9e9: "85.9 GB", 4.215e13: "42.15 TB", 3.568e16: "35.68 PB"}
    assert {value: size(value) for value in sizes} == sizes
