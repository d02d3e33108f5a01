"""Units, conventions and statistics of published measurements, beside closed forms and numbers worked out by hand."""

from dataclasses import replace

import pytest

from engine.validate import families, flops, statistics
from engine.validate.case import Predicted
from engine.validate.compared import Compared, compare
from engine.validate.metrics import Measured, peak_memory, step_seconds
from engine.validate.residuals import explain
from engine.validate.rows import Unusable, parse
from tests.engine.test_validate_reading import case, entry, row_of


def timed(name: str, value: float, unit: str, **changes) -> float:
    return step_seconds(case(metrics=[{"name": name, "value": value, "unit": unit}], **changes)).value


def test_times_and_rates_become_seconds_of_a_step():
    """The row's step is 64 sequences of 2,048 tokens on 16 devices."""
    assert timed("iteration_time_s", 1.5, "s") == 1.5
    assert timed("iteration_time_ms", 1500, "ms") == pytest.approx(1.5)
    assert timed("step_time_s", 1.5, "s (mean of 10)") == 1.5
    assert timed("tokens_per_s_per_gpu", 4096, "tok/s/GPU") == pytest.approx(2.0)  # 131,072 / 16 / 4,096
    assert timed("tokens_per_s", 65_536, "tok/s") == pytest.approx(2.0)
    assert timed("samples_per_gpu_per_s", 2, "samples/GPU/s") == pytest.approx(2.0)


def test_a_time_counts_before_a_rate_and_a_minimum_never():
    metrics = [
        {"name": "tokens_per_s_per_gpu", "value": 1, "unit": "tok/s/GPU"},
        {"name": "iteration_time_s_min", "value": 1.0, "unit": "s"},
        {"name": "iteration_time_s_median", "value": 3.0, "unit": "s"},
    ]
    assert step_seconds(case(metrics=metrics)).value == 3.0


def equation_3(batch, s, layers, h, vocabulary):
    """Narayanan et al. 2021, equation 3, as printed there."""
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


def test_flops_are_those_of_equation_3():
    expected = equation_3(64, 2048, 24, 1024, 51_200)
    assert flops.step_flops(case()) == pytest.approx(expected, rel=1e-12)
    # Hardware rates count the repeated forward: seconds = FLOPs / (devices x rate).
    assert timed("hardware_tflops_per_gpu", 100, "TFLOP/s") == pytest.approx(expected / 16 / 100e12)


def test_utilisations_leave_the_repeated_forward_out():
    """6 for each parameter and token, and 12 l s h for attention over the full square (Chowdhery et al. 2022)."""
    per_token = 6 * (24 * 12 * 1024**2 + 51_200 * 1024) + 12 * 24 * 2048 * 1024
    expected = 64 * 2048 * per_token
    assert flops.step_flops(case(), recompute=False) == pytest.approx(expected)
    megatron = {"source": {"repo": "NVIDIA/Megatron-LM"}}
    assert timed("mfu_pct", 50, "%", **megatron) == pytest.approx(expected / 16 / 156e12)


def test_causal_attention_is_half_the_square():
    full, half = (flops.attention_products(case(), causal=causal) for causal in (False, True))
    assert half == full / 2 == 2 * 2048**2 * 1024


def test_a_gate_and_shared_keys_are_counted():
    """Per token and block: queries and output 2 h^2, keys and values 2 h^2 / 4, three matrices of h x 3,000."""
    found = case(model={"activation": "swiglu", "kv_heads": 4, "ffn": 3000})
    assert flops.block_products(found) == 2 * 2048 * (2.5 * 1024**2 + 3 * 1024 * 3000)


def test_a_convention_that_decides_and_is_not_said_is_refused():
    with pytest.raises(Unusable, match="full or causal"):
        timed("mfu_pct", 50, "%", model={"seq_len": 32_768})
    assert timed("mfu_pct", 50, "%", model={"seq_len": 32_768}, source={"repo": "AI/maxtext"}) > 0


def test_units_of_memory():
    def of(name, value, unit):
        return peak_memory(row_of(metrics=[{"name": name, "value": value, "unit": unit}]))

    assert of("peak_allocated_GiB", 2, "GiB")[0::3] == (2 * 2**30, "allocated")
    assert of("peak_memory_GB", 2, "GB (max over stages)").value == 2e9
    assert of("peak_memory_GB_nvidia_smi", 2, "GB").kind == "device"
    assert of("simumax_predicted_GiB", 2, "GiB") is None and of("oom", True, "bool") is None
    with pytest.raises(Unusable, match="unit"):
        of("peak_memory", 2, "")


def test_errors_of_predictions():
    """Of 0.1, -0.2, 0 and 0.5: the mean size is 0.2, the mean 0.1; nine tenths of the way from 1st to 4th is 0.41."""
    found = statistics.errors([1.1, 0.8, 1.0, 1.5], [1.0, 1.0, 1.0, 1.0])
    assert found == pytest.approx({"rows": 4, "mape": 0.2, "bias": 0.1, "p90": 0.41, "max": 0.5})
    assert statistics.errors([], []) is None


def test_the_floor_is_a_median_of_rates():
    """Loads 1, 2, 9 in 1, 1, 1 s: rates 1, 2, 9, the median 2, so it predicts 0.5, 1 and 4.5 s."""
    assert statistics.floor([1, 2, 9], [1, 1, 1]) == pytest.approx([0.5, 1.0, 4.5])


def test_the_floor_counts_the_pipelines_idle_time():
    """Two stages and 8 micro-batches: one more turn for each 8."""
    found = case()
    assert statistics.floor_load(found) == pytest.approx(flops.step_flops(found) * (1 + 1 / 8) / 16)


def test_rank_correlation():
    assert statistics.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert statistics.spearman([3, 2, 1], [10, 20, 30]) == pytest.approx(-1)
    # No ties: 1 - 6 sum d^2 / (n (n^2 - 1)) = 1 - 6 x 2 / 60.
    assert statistics.spearman([1, 3, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.8)
    assert list(statistics.ranks([5, 1, 5])) == [2.5, 1, 2.5]
    assert statistics.spearman([1, 1], [1, 2]) is None


def test_regret_and_order():
    assert statistics.regret([2, 1, 3], [10, 12, 30]) == pytest.approx(0.2)
    predicted, measured = {"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 1, "c": 2}
    assert statistics.order(predicted, measured) == (1, 2)  # a and c were measured alike


def compared(predicted: float, measured: float, **changes) -> Compared:
    found = case(metrics=[{"name": "iteration_time_s", "value": measured, "unit": "s"}], **changes)
    return Compared(found, Predicted(predicted, 0), step_seconds(found), None, False, None)


def test_families_of_layouts():
    rows = [
        compared(1.0, 2.0, id="a", parallel={"tp": 1, "dp": 8}),
        compared(2.0, 1.5, id="b"),
        compared(3.0, 3.0, id="c", parallel={"tp": 4, "dp": 2}),
    ]
    found = families.layouts(rows)
    assert found["spearman"] == pytest.approx(0.5) and found["worst_regret"] == pytest.approx(2.0 / 1.5 - 1)
    assert found["families"][0]["measured_best"] == "tp2 pp2 dp4 micro-batch 2 1f1b"
    assert families.layouts(rows[:2]) is None


def test_schedules_beside_1f1b():
    rows = [compared(1.0, 1.0, id="a"), compared(0.8, 0.9, id="b", schedule="ZB-1p")]
    (cell,) = families.schedules(rows)["cells"]
    assert (cell["pairs_right"], cell["pairs"]) == (1, 1)
    assert cell["ratios_to_1f1b"]["b"] == pytest.approx({"measured": 1 / 0.9, "predicted": 1.25})
    assert cell["worst_ratio_error"] == pytest.approx(0.125)


def test_scaling_compares_throughput_a_device():
    larger = {"parallel": {"gpus": 32, "dp": 8}, "batch": {"global": 128}}
    found = families.scaling([compared(1.0, 1.0, id="a"), compared(1.0, 1.25, id="b", **larger)])
    (series,) = found["series"]
    assert series["efficiencies"] == [{"devices": 32, "measured": 0.8, "predicted": 1.0}]
    assert found["worst_points"] == series["points"] == pytest.approx(20)


def test_what_the_errors_go_with():
    rows = [
        compared(1 + 0.1 * tp, 1.0, id=f"{tp}{i}", parallel={"tp": tp, "dp": 8 // tp}) for tp in (1, 4) for i in "abcd"
    ]
    found = explain(rows)
    assert found["property"] == "tp" and found["share_of_variance"] == pytest.approx(1)
    assert found["mean_error"] == pytest.approx({"1": 0.1, "4": 0.4})


def test_a_row_is_used_or_refused_and_never_lost():
    entries = [entry(), entry(id="b", batch={"micro": None}), entry(id="c", metrics=[])]
    used, calls, refused = compare(parse({"entries": entries}, "here").rows, lambda case: Predicted(1.0, 1.0))
    assert [each.row.id for each in used] == ["a"] and [row.id for row, _ in refused] == ["b", "c"]
    assert calls == []


@pytest.mark.parametrize(("kind", "held"), [("allocated", 10e9), ("reserved", 10e9), ("device", 13e9)])
def test_what_a_whole_device_held_is_held_to_more_than_what_pytorch_allocates(kind, held):
    memory, predicted = Measured(12e9, "peak", (), kind), Predicted(1.0, 10e9, room=77e9, beside=3e9)
    assert replace(compared(1.0, 1.0), memory=memory, predicted=predicted).held == held
