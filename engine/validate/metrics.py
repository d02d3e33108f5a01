"""What a row measured -> seconds of a step, and the bytes of the fullest rank, with how they follow from it.

Times come first from times, then from rates of tokens or samples, then from rates of FLOPs, for which the convention of
the source must be known (`engine.validate.flops`).
"""

from __future__ import annotations

from typing import NamedTuple

from engine.validate import flops
from engine.validate.case import OF_DEVICE, Case
from engine.validate.rows import Metric, Row, Unusable

TIMES = ("iteration_time", "step_time")
DERIVED = "derived_"  # worked out by the collection, from a rate that is printed
GIB = 2.0**30
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
MEMORY_UNITS = {"GiB": GIB, "MiB": 2.0**20, "GB": 1e9, "MB": 1e6, "B": 1.0}
# Vendors' peaks in dense 16-bit products (data sheets), which utilisations are of.
PEAKS = {
    "v100": 125e12,
    "a100": 312e12,
    "a100_40": 312e12,
    "a800": 312e12,
    "h100": 989e12,
    "h800": 989e12,
    "h200": 989e12,
}
MAX_OPEN = 0.05  # of the time: where two conventions differ by more, and the row does not say which, it is not used


class Measured(NamedTuple):
    value: float  # seconds, or bytes
    how: str
    inferred: tuple[str, ...] = ()
    kind: str = ""  # of memory: allocated, reserved, or the whole device


def step_seconds(case: Case) -> Measured:
    row = case.row
    for metric in row.metrics:
        if metric.name.startswith(TIMES) and not metric.name.endswith("_min"):
            return Measured(_seconds(metric), metric.name)
    tokens = case.global_batch * case.context
    for name, of in (
        ("tokens_per_s_per_gpu", case.devices),
        ("tokens_per_s_per_device", case.devices),
        ("tokens_per_s", 1),
    ):
        if (metric := row.metric(name)) is not None:
            return Measured(tokens / (_positive(metric) * of), name)
    for name, of in (("samples_per_gpu_per_s", case.devices), ("samples_per_s", 1)):
        if (metric := row.metric(name)) is not None:
            return Measured(case.global_batch / (_positive(metric) * of), name)
    for metric in row.metrics:
        if metric.name.startswith(DERIVED) and "time" in metric.name:
            return Measured(_seconds(metric), metric.name)
    return _from_flops(case)


def _from_flops(case: Case) -> Measured:
    row = case.row
    if (metric := row.metric("hardware_tflops_per_gpu")) is not None:
        full = flops.step_flops(case, causal=False, recompute=True)
        return Measured(full / (case.devices * _positive(metric) * 1e12), metric.name)
    names = ("model_tflops_per_gpu", "mfu_pct", "hfu_pct")
    if (metric := row.metric(*names)) is None:
        have = ", ".join(dict.fromkeys(metric.name for metric in row.metrics)) or "nothing"
        raise Unusable("no metric is a step's time, or a rate that gives it", have)
    repeated = metric.name == "hfu_pct"
    causal, inferred = _attention(case, repeated)
    rate = _positive(metric) * 1e12
    if metric.name.endswith("_pct"):
        if case.precision not in ("bf16", "fp16") or case.device not in PEAKS:
            raise Unusable("the peak that a utilisation is of is not known", f"{case.device}, {case.precision}")
        rate = _positive(metric) / 100 * PEAKS[case.device]
    return Measured(
        flops.step_flops(case, causal=causal, recompute=repeated) / (case.devices * rate), metric.name, inferred
    )


def _attention(case: Case, repeated: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether a utilisation counts causal attention, and what is inferred of it."""
    both = [flops.step_flops(case, causal=causal, recompute=repeated) for causal in (False, True)]
    apart = both[0] / both[1] - 1
    source = case.row.source.lower()
    if "maxtext" in source or "megatron-bridge" in source:
        return True, ()
    if any(name in source for name in ("megascale", "korthikanti", "sc21", "palm", "megatron-lm")):
        return False, ()
    if apart > MAX_OPEN:
        raise Unusable(
            "whether its rate counts full or causal attention is not said", f"the time differs by {100 * apart:.0f} %"
        )
    return False, (f"a rate counts full attention; causal would make the time {100 * apart:.1f} % less",)


def peak_memory(row: Row) -> Measured | None:
    """Bytes of the fullest rank; None where a row has none."""
    for metric in row.metrics:
        name = metric.name
        if isinstance(metric.value, bool) or "predicted" in name or not name.startswith(("peak_", "memory_G")):
            continue
        unit = next((unit for unit in MEMORY_UNITS if metric.unit.startswith(unit)), None)
        if unit is None:
            raise Unusable("a metric's unit is not known", f"{name} in {metric.unit or 'none'}")
        kind = OF_DEVICE if "nvidia_smi" in name else "allocated" if "allocated" in name else ""
        kind = kind or ("reserved" if "torchtitan" in row.group or "torchtitan" in row.source else "allocated")
        return Measured(_positive(metric) * MEMORY_UNITS[unit], name, kind=kind)
    return None


def ran_out_of_memory(row: Row) -> bool:
    metric = row.metric("oom")
    return metric is not None and metric.value is True


def _seconds(metric: Metric) -> float:
    unit = metric.unit.split()[0].rstrip(";,") if metric.unit else ""
    if unit not in UNITS:
        raise Unusable("a metric's unit is not known", f"{metric.name} in {metric.unit or 'none'}")
    return _positive(metric) * UNITS[unit]


def _positive(metric: Metric) -> float:
    if isinstance(metric.value, bool) or not metric.value > 0:
        raise Unusable("a metric is not above 0", f"{metric.name} {metric.value}")
    return metric.value
