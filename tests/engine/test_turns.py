"""What is made of trainings that took turns: ratios that are known, and intervals that hold them or do not."""

import random

import pytest

from bench.turns import FEWEST, WARMUP, Round, _cpu, _within, compared


def rounds(factor: float, *, rounds: int = 12, turns: int = 3, noise: float = 0.02, rare: float = 0.0) -> list[Round]:
    """Two trainings, the first so many times slower: the machine drifts by a half from round to round, processes by
    `noise`, and in each turn of the first one step takes `rare` seconds more."""
    drawn, made = random.Random(7), []
    for _ in range(rounds):
        pace = 0.05 * drawn.uniform(1.0, 1.5)
        one, other = pace * factor * drawn.gauss(1.0, noise), pace * drawn.gauss(1.0, noise)
        turn = ([one] * 8 + [one + rare], [other] * 9)
        made.append(Round([turn] * turns, (one + rare / 9, other), ()))
    return made


def holds(interval: list[float], value: float) -> bool:
    return interval[0] <= value <= interval[1]


def test_a_training_that_is_slower_is_told_from_one_that_is_not():
    slower, same = compared(rounds(1.1)), compared(rounds(1.0))
    assert holds(slower["ratio_95_percent"], 1.1) and not holds(slower["ratio_95_percent"], 1.0)
    assert holds(same["ratio_95_percent"], 1.0) and not holds(same["ratio_95_percent"], 1.1)


def test_seldom_long_steps_are_in_the_sums_and_not_in_the_medians():
    often, seldom = compared(rounds(1.0)), compared(rounds(1.0, rare=0.1))
    assert seldom["ratio"] == often["ratio"]
    assert seldom["ratio_of_sums"] > 1.1 * often["ratio_of_sums"]
    assert seldom["ratio_of_cpu"] > 1.1 * often["ratio_of_cpu"]


def test_turns_of_the_same_processes_are_no_new_rounds():
    """What differs between processes is not averaged out by more turns of them."""
    few, many = (compared(rounds(1.0, rounds=6, turns=turns))["ratio_95_percent"] for turns in (3, 30))
    assert many[1] - many[0] > 0.8 * (few[1] - few[0])


def test_a_few_rounds_give_a_ratio_and_no_interval():
    few, enough = (compared(rounds(1.1, rounds=number)) for number in (FEWEST - 1, FEWEST))
    assert few["ratio"] > 1.0 and few["ratio_95_percent"] is None
    assert enough["ratio_95_percent"] is not None


def test_rounds_without_a_turn_of_each_are_refused_and_told_what_would_do():
    with pytest.raises(ValueError, match="more steps"):
        compared([Round([], (0.05, 0.05), ())])


def test_a_step_counts_from_the_last_ranks_end_to_its_next_one_if_both_are_in_the_turn():
    ends = [[1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.5, 20.0], [1.1, 2.1, 3.1, 4.5, 4.9, 6.0, 9.0, 19.0]]
    cpu = [0.0, 5.0, 6.0, 7.0, 7.1, 7.2, 7.3, 7.6]
    ranks = [[{"end": end, "cpu": spent} for end, spent in zip(rank, cpu, strict=True)] for rank in ends]
    assert WARMUP == 4
    assert _within((4.0, 10.0), ranks) == [0.5, 2.0, 2.0]  # 4.5, 5, 7, 9
    assert _within((4.6, 10.0), ranks) == [2.0, 2.0]
    assert round(_cpu(ranks), 9) == 0.3  # (7.6 - 7) / 4, on each of two ranks
