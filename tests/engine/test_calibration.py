"""What was measured of a machine holds on that machine only, comes back from its file unchanged, and gives each op its
seconds by arithmetic that can be done by hand."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest

from engine.asking.rules import SpecError
from engine.calibration.calibrated import Arrival, Call, Sample, arrivals, costs, line, scale, unevenness
from engine.cost import calibration, kernels
from engine.cost.calibration import (
    DIFFERS,
    OLD,
    SHIPPED,
    VARIABLE,
    Calibration,
    Cost,
    along,
    check,
    find,
    load,
    place,
    store,
    this_machine,
)
from engine.cost.local import Local, moved, part_class, run_by
from engine.cost.machine import machine
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec

MADE = Calibration(
    identity=this_machine(),
    made=time.time(),
    seconds=20.0,
    together=0.9,
    crowded=0.8,
    uneven=1e-4,
    disturbed=0.1,
    probe={"1": (0.024, 0.026), "2": (0.04, 0.04, 0.04)},
    curves={
        # 1 us a call and a TFLOP/s; on two threads twice that
        "fp32/1": ((1e6, 2e-6), (1e9, 1.001e-3)),
        "fp32/2": ((1e6, 1.5e-6), (1e9, 0.501e-3)),
        "bf16/1": ((1e6, 2e-6), (1e9, 1.001e-3)),
        "memory/1": ((1e3, 1e-6), (1e6, 1e-3)),
        "all_reduce/2": ((0.0, 1e-4, 1.0), (1e6, 1.1e-3, 2.0)),
        "all_reduce/4": ((0.0, 3e-4, 2.0), (1e6, 3.3e-3, 2.0)),
        "send/2": ((0.0, 1e-4, 0.5), (1e6, 1.1e-3, 1.5)),
    },
    ops={
        "single/1/forward/block": Cost(1e-4, 2e-4, 1e-9, 0.0),
        "single/1/backward/block": Cost(0.0, 4e-4, 2e-9, 0.0),
        "fsdp/forward/block": Cost(1e-3, 3e-4, 1e-9, 1e-9),
        "fsdp/all_gather/*": Cost(5e-4, 0.0, 0.0, 1e-9),
        "pipeline/forward/": Cost(1e-4, scale=1.25),
    },
    rates={"memory": 1e9},
)


# The file


def test_it_comes_back_from_its_file_unchanged(tmp_path):
    path = tmp_path / "deep" / "folder" / "calibration.json"
    store(MADE, path)
    assert load(path) == MADE
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', "null", "nonsense", '{"version": 99}'])
def test_what_is_no_calibration_is_refused_with_what_would_work(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="python -m engine calibrate") as refused:
        load(path)
    assert refused.value.code == "bad_calibration"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "fast", True, None])
def test_so_is_one_with_an_impossible_number(tmp_path, value):
    values = MADE.to_dict() | {"together": value}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(values))
    with pytest.raises(SpecError):
        load(path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        store(MADE, tmp_path / "file" / "calibration.json")


# The machine


def test_it_holds_where_it_was_made():
    check(MADE, this_machine(), time.time())


OTHER = {
    "host": "0" * 16, "cpu": "another", "cores": 1234, "memory": 1, "gpus": ("another",), "system": "another",
    "torch": "0.1",
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERS)
def test_it_does_not_hold_elsewhere_or_with_another_torch(name):
    of_another = dataclasses.replace(MADE, identity=dataclasses.replace(MADE.identity, **{name: OTHER[name]}))
    with pytest.raises(SpecError, match="python -m engine calibrate") as refused:
        check(of_another, this_machine(), time.time())
    stale = name in ("torch", "cores")
    assert refused.value.code == ("stale_calibration" if stale else "foreign_calibration")
    assert name in str(refused.value)


def test_it_does_not_hold_for_ever():
    day = 86_400
    check(MADE, this_machine(), MADE.made + (OLD - 1) * day)
    with pytest.raises(SpecError, match=f"{OLD + 1} days") as refused:
        check(MADE, this_machine(), MADE.made + (OLD + 1.01) * day)
    assert refused.value.code == "old_calibration"


def test_every_part_of_an_identity_is_compared():
    assert set(DIFFERS) == {f.name for f in dataclasses.fields(calibration.Identity)}


# Which one is used


def test_a_machine_without_one_gets_what_is_shipped(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert place() == tmp_path / "lockstep" / "calibration.json"
    found = find()
    assert (found.source, found.refused) == ("shipped", None)
    assert found.calibration == load(SHIPPED)


def test_a_machine_with_one_gets_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store(MADE, place())
    assert find() == (MADE, "calibrated", None)
    assert machine("local").flop_rate == pytest.approx(1e9 / 1.001e-3)


def test_one_that_does_not_hold_is_left_for_what_is_shipped_and_the_reason_kept(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store(dataclasses.replace(MADE, made=0.0), place())
    found = find()
    assert found.source == "shipped" and found.refused.code == "old_calibration"
    assert calibration.told()["refused"] == str(found.refused)


def test_one_that_was_asked_for_by_name_and_does_not_hold_is_an_error(monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(SpecError) as missing:
        find()
    assert missing.value.code == "no_file"
    store(dataclasses.replace(MADE, made=0.0), path)
    with pytest.raises(SpecError) as old:
        find()
    assert old.value.code == "old_calibration"
    store(MADE, path)
    assert find() == (MADE, "calibrated", None)


# Seconds of an op


def test_between_two_sizes_time_is_on_their_line_and_beyond_them_it_goes_on():
    curve = ((10.0, 1.0), (20.0, 3.0), (40.0, 4.0))
    wanted = {0: 1.0, 10: 1.0, 15: 2.0, 20: 3.0, 30: 3.5, 40: 4.0, 60: 5.0}
    assert {size: along(curve, size) for size in wanted} == wanted
    assert along(((10.0, 1.0),), 99) == 1.0
    assert along(((0.0, 1.0, 2.0), (1.0, 2.0, 4.0)), 9, 2) == 4.0  # cores do not grow without end


def test_an_op_takes_its_fixed_part_its_bytes_and_its_flops():
    """2e-4 + 1e5 bytes at 1e-9 + 1e9 FLOPs at a TFLOP/s."""
    op = Op(kind="forward", stage=0, microbatch=0, part="block7", bytes=100_000, flops=10**9)
    alone = Local(MADE)
    assert alone.compute(op, 1) == pytest.approx(2e-4 + 1e-4 + 1e-3, rel=2e-3)
    assert Local(MADE, ("fsdp",)).compute(op, 1) == pytest.approx(3e-4 + 1e-4 + 1e-3, rel=2e-3)
    # What was not measured under its own name takes what it takes alone.
    assert Local(MADE, ("ddp",)).compute(op, 1) == alone.compute(op, 1)


# Of 10 tokens of 100 numbers: a product with a parameter, the same one's gradients, and attention of 4 heads.
PRODUCT = kernels.matmul(10, 200, 100, 4)
HEADS = kernels.Kernel(kernels.ATTENTION, 10, 10, 25, batch=4, item=4, weight=False, half=True)


def test_each_product_takes_what_one_of_its_size_does():
    """Two small ones take longer than one of as many FLOPs: here 1 us a MFLOP up to 10, and a tenth of that beyond."""
    curves = {**MADE.curves, "fp32/1": ((0.0, 0.0), (1e7, 1e-5), (1e8, 1.9e-5)), "fp32/2": ((0.0, 0.0), (1e8, 1.0))}
    alone = Local(dataclasses.replace(MADE, curves=curves, ops={}))
    large = kernels.matmul(1000, 1000, 10, 4)  # 2e7
    one = Op(kind="forward", part="block1", flops=4 * 10**7, kernels=(large, large))
    assert alone.matmul(one, 1) == pytest.approx(2 * 1.1e-5)
    assert alone.matmul(dataclasses.replace(one, kernels=()), 1) == pytest.approx(1.3e-5)
    # Heads are one call, each made by one thread, and no head is cut in two: four, of each half of two products.
    heads = Op(kind="forward", part="block1", flops=10**4, kernels=(HEADS,))
    assert alone.matmul(heads, 1) == pytest.approx(4 * 2 / 2 * 2 * 10 * 10 * 25 * 1e-12)
    assert alone.matmul(heads, 2) == pytest.approx(alone.matmul(heads, 1) / 2)
    back = dataclasses.replace(heads, kernels=kernels.backward((HEADS,), 1))
    assert alone.matmul(back, 1) == pytest.approx(2.5 * alone.matmul(heads, 1))


@pytest.mark.parametrize(("made", "weights"), [(kernels.forward, 1), (kernels.backward, 2)])
def test_what_a_product_reads_of_its_parameter_is_part_of_the_product(made, weights):
    """100 x 200 of 4 bytes, once forward; backward read for one product and written by the other."""
    op = Op(kind="forward", part="block1", bytes=weights * 80_000 + 500, kernels=made((PRODUCT, HEADS), 3))
    assert moved(op) == 500
    assert Local(MADE).beside(op, 1) == pytest.approx(2e-4 + 500e-9)
    assert moved(dataclasses.replace(op, kernels=())) == op.bytes


def test_more_threads_make_products_faster():
    op = Op(kind="forward", part="block1", flops=10**9)
    two = dataclasses.replace(MADE, ops={k.replace("single/1", "single/2"): v for k, v in MADE.ops.items()})
    assert Local(two).compute(op, 2) == pytest.approx(2e-4 + 0.5e-3, rel=2e-3)


def test_a_stage_takes_what_its_layers_take_and_what_its_schedule_adds():
    op = Op(kind="forward", stage=1, microbatch=0, bytes=200_000, flops=10**9)
    seconds = Local(MADE, ("pipeline",)).compute(op, 1, ("block1", "block2"))
    assert seconds == pytest.approx(1.25 * (2 * 2e-4 + 200_000 * 1e-9) + 1e-3, rel=2e-3)


def test_sharded_layers_have_their_hooks_within_a_stage():
    """Twice 3e-4 and 1e-3 before it, 200,000 bytes at 1e-9 and 1e-9; and no layer's lead before the stage."""
    op = Op(kind="forward", stage=1, microbatch=0, bytes=200_000, flops=10**9)
    mesh = Local(MADE, ("fsdp", "pipeline"))
    seconds = 1.25 * (2 * (3e-4 + 1e-3) + 200_000 * 2e-9)
    assert mesh.compute(op, 1, ("block1", "block2")) == pytest.approx(seconds + 1e-3, rel=2e-3)
    assert mesh.lead(op) == pytest.approx(1e-4)


def test_a_half_of_a_backward_takes_half_of_what_it_takes_beside_its_products():
    half = Op(kind="backward_input", stage=0, microbatch=0, part="block1", bytes=0)
    assert Local(MADE, ("pipeline",)).compute(half, 1) == pytest.approx(2e-4)


def test_a_communication_takes_what_it_took_between_as_many_processes():
    op = Op(kind="all_reduce", axis="dp", bytes=500_000)
    assert Local(MADE).communication(op, 2) == (pytest.approx(6e-4), pytest.approx(1.5))
    assert Local(MADE).communication(op, 4) == (pytest.approx(1.8e-3), pytest.approx(2.0))
    # Not measured: a ring has as many turns as it has ranks, less one.
    assert Local(MADE).communication(op, 7)[0] == pytest.approx(2 * 1.8e-3)
    assert Local(MADE).communication(op, 1) == (0.0, 0.0)


def test_before_an_op_its_rank_spends_its_lead_where_it_waits_for_the_op():
    wrapped = Local(MADE, ("fsdp",))
    gather = Op(kind="all_gather", axis="fsdp", part="block3", bytes=10**6)
    assert wrapped.lead(gather) == pytest.approx(5e-4 + 1e-3)
    assert wrapped.lead(dataclasses.replace(gather, asynchronous=True)) == 0.0
    assert wrapped.lead(Op(kind="forward", part="block3", bytes=10**6)) == pytest.approx(1e-3 + 1e-3)


def test_layers_that_differ_in_their_number_are_of_one_class():
    of = {"block12": "block", "block1.attention": "block.attention", "block1.attention0": "block.attention#"}
    of |= {"fc2": "fc", "conv1": "conv1", "conv2": "conv2", "owner3": "owner", "": ""}
    assert {part: part_class(part) for part in of} == of


def test_a_mesh_of_several_axes_is_run_by_several():
    assert run_by("hybrid", {"pp": 2, "fsdp": 2, "tp": 1, "dp": 1}) == ("fsdp", "pipeline")
    assert run_by("hybrid", {"pp": 2, "dp": 2}) == ("pipeline", "hsdp")
    assert run_by("hybrid", {"ep": 2, "dp": 2}) == ("expert", "ddp")
    assert run_by("hsdp", {"dp": 2, "fsdp": 2}) == ("hsdp", "fsdp")


# What is made of measurements


def test_a_stage_is_as_many_times_as_long_as_its_layers():
    assert scale([(1e-3, 2e-3), (4e-3, 8e-3)]) == pytest.approx(2.0)
    assert scale([]) == 1.0 and scale([(1e-3, -1e-3)]) == 0.0


def test_a_line_is_found_again_and_no_part_of_it_is_negative():
    assert line([(x, 1e-3 + 2e-6 * x) for x in (10, 100, 1000)]) == pytest.approx((1e-3, 2e-6))
    assert line([(10, 5e-3), (1000, 1e-3)])[1] == 0.0
    fixed, slope = line([(1000, 1e-3), (2000, 4e-3)])
    assert fixed == 0.0 and 1e-6 < slope < 2e-6
    assert line([]) == (0.0, 0.0)
    assert line([(10, 1e-3), (10, 3e-3)]) == (pytest.approx(2e-3), 0.0)  # the mean, not what is nearer to the smaller
    assert scale([(1e-3, 1e-3), (1e-3, 3e-3)]) == pytest.approx(2.0)
    fixed, slope = line([(1000, 1e-3), (2000, 4e-3)], steepest=1e-7)
    assert slope == 1e-7 and 1e-3 < fixed < 4e-3


def test_costs_are_found_again_from_what_ops_of_these_costs_take():
    """What the products took is not counted twice, and a core that is slower among others is so no longer."""
    alone = Local(dataclasses.replace(MADE, ops={}))
    samples = []
    for size, flops in ((10_000, 10**7), (1_000_000, 10**9)):
        op = Op(kind="forward", part="block1", bytes=size, flops=flops)
        seconds = (2e-4 + 1e-9 * size + alone.matmul(op, 1)) / 0.9
        samples.append(Sample(op, seconds, (1e-4 + 3e-9 * size) / 0.9))
    found = costs("ddp", samples, alone, 0.9)
    assert found["ddp/forward/block"] == pytest.approx(Cost(1e-4, 2e-4, 1e-9, 3e-9), rel=1e-6)
    assert found["ddp/forward/*"] == found["ddp/forward/block"]


def test_how_uneven_ranks_are_is_found_again_from_when_they_come():
    """Two ranks whose seconds are drawn from normal distributions of a variance of 1e-4 a second."""
    draw = np.random.default_rng(0)
    done = []
    for seconds in draw.uniform(1e-3, 1e-1, 4000):
        one, other = draw.normal(seconds, np.sqrt(1e-4 * seconds), 2)
        done.append(Arrival(abs(one - other), seconds))
    assert unevenness(done) == pytest.approx(1e-4, rel=0.05)
    assert unevenness([]) == 0.0 and unevenness([Arrival(0.0, 1.0)]) == 0.0


def test_calls_of_two_ranks_are_paired_lane_by_lane():
    one = [Call("dp", 1.0, 0.5), Call("fsdp", 4.0, 0.2), Call("dp", 6.0, 1.0)]
    other = [Call("dp", 1.5, 0.7), Call("dp", 5.0, 1.0), Call("fsdp", 4.0, 0.4)]
    found = sorted(arrivals([one, other]))
    assert found == [(0.0, pytest.approx(0.3)), (0.5, pytest.approx(0.6)), (1.0, 1.0)]
    assert [*arrivals([one])] == []


def test_a_machine_is_slower_by_what_the_same_takes_in_as_many_processes():
    assert MADE.slower(1, 0.05) == pytest.approx(2.0)
    assert MADE.slower(2, 0.02) == pytest.approx(0.5)
    assert MADE.slower(4, 0.02) == MADE.slower(2, 0.02)  # of more than two ranks two did it
    assert dataclasses.replace(MADE, probe={}).slower(1, 0.05) is None


def test_a_difference_of_speed_that_was_seen_while_it_was_calibrated_is_none():
    """24 and 26 ms: a deviation of 2 ** 0.5 ms, and of a third one from their mean 1.5 ** 0.5 times that, 1.73 ms."""
    assert MADE.slower(1, 0.025 + 2 * 1.74e-3) == pytest.approx(1.139, abs=1e-3)
    assert MADE.slower(1, 0.025 - 2 * 1.74e-3) == pytest.approx(0.861, abs=1e-3)
    assert MADE.slower(1, 0.025 + 2 * 1.72e-3) is None and MADE.slower(1, 0.025 - 2 * 1.72e-3) is None
    # Three that were alike are no reason to tell of 2 %.
    assert MADE.slower(2, 0.04 * 1.02) is None and MADE.slower(2, 0.04 * 1.04) == pytest.approx(1.04)
    # Of one it is not known by how much another would have been off.
    assert dataclasses.replace(MADE, probe={"1": (0.025,)}).slower(1, 0.05) is None


# GPUs


def test_a_job_on_gpus_is_predicted_by_what_was_measured_of_them(monkeypatch):
    """8e12 FLOPs in 0.1 s, 1e9 bytes in 1 ms, messages of 20 us and 50 GB/s; on the CPU as before."""
    of_gpus = {
        "cuda:fp32/1": ((1e3, 1e-5), (8e12, 0.1)),
        "cuda:bf16/1": ((1e3, 1e-5), (8e12, 0.01)),
        "cuda:memory/1": ((1e3, 1e-5), (1e9, 1e-3)),
        "cuda:send/2": ((64.0, 2e-5, 1.0), (1e9, 0.02, 1.0)),
    }
    made = dataclasses.replace(MADE, curves={**MADE.curves, **of_gpus})
    monkeypatch.setattr(calibration, "find", lambda: calibration.Found(made, "calibrated", None))
    gpu = machine("local", "cuda")
    assert (gpu.cores, gpu.local, gpu.op_overhead, gpu.link_latency) == (0, None, 1e-5, 2e-5)
    assert (gpu.flop_rate, gpu.memory_rate, gpu.link_rate) == pytest.approx((8e13, 1e12, 5e10))
    assert gpu.at("bf16").flop_rate == pytest.approx(8e14)
    assert machine("local").cores == machine("local", "cpu").cores > 0
    spec = Spec(mode="ddp", devices=2, model="gpt", dataset="synthetic")
    assert predict(spec.with_(device="cuda")).step_time == pytest.approx(predict(spec, on=gpu).step_time)
    assert predict(spec).machine.cores > 0
    # Where none were measured, there is nothing else to predict with.
    monkeypatch.setattr(calibration, "find", lambda: calibration.Found(MADE, "calibrated", None))
    assert machine("local", "cuda") == machine("local")
