"""The search for layouts: which there are, that bounds are none too high, that pruning changes no answer, and what is
said of an answer that can be worked out by hand."""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from engine import schedules
from engine.__main__ import main
from engine.asking.rules import SpecError
from engine.cli import search_table
from engine.cost.machine import EVERYBODY, MACHINES
from engine.cost.memory import room
from engine.job import prepare
from engine.model.presets import family
from engine.predict import predict
from engine.search import Search, report
from engine.search.bounds import Bounds, in_flight
from engine.search.outline import Lengths, outline
from engine.search.pieces import Way
from engine.search.report import PARTS, parts_of
from engine.search.space import AXES, base_of, by_fewest, meshes, orders, pieces, products
from engine.spec import Spec

H100 = MACHINES["h100"]
TINY = {"model": "gpt", "layers": 6, "hidden": 256, "heads": 4, "context": 128, "precision": "bf16"}
SMALL = Spec(mode="hybrid", devices=8, machine="h100", global_batch=16, **TINY)
GIVEN = {"mode", "devices", "machine", "global_batch", *TINY}


def looked(spec: Spec, held=GIVEN, **options) -> Search:
    search = Search(spec, held, **options)
    for _ in search.steps():
        pass
    return search


def compositions(exponent: int, parts: int) -> int:
    """Ways to write a prime's power as a product of so many: stars and bars."""
    return math.comb(exponent + parts - 1, parts - 1)


@pytest.mark.parametrize(("number", "primes"), [(1, ()), (512, (9,)), (96, (5, 1)), (60, (2, 1, 1)), (16_384, (14,))])
@pytest.mark.parametrize("axes", (1, 4, 5))
def test_meshes_are_as_many_as_there_are_ordered_products_of_degrees(number, primes, axes):
    found = list(products(number, axes))
    assert len(found) == len(set(found)) == math.prod(compositions(exponent, axes) for exponent in primes)
    assert all(math.prod(degrees) == number for degrees in found)


@pytest.mark.parametrize(("given", "model"), [({"mode": "context"}, "gpt"), ({}, "cnn")])
def test_a_search_without_a_model_says_of_which_it_is(given, model):
    """Of one: that of the mode, if it is held, and else the cnn, of whatever mode a layout is."""
    search = looked(Spec(devices=2, machine="h100", **given), {"devices", "machine", *given})
    rows = report(search)["best"]
    assert rows and all(f" --model {model} " in row["command"] + " " for row in rows)


def test_degrees_that_are_given_are_held_and_divide_what_is_left():
    spec = Spec(mode="hybrid", devices=512, model="llama3_70b", machine="h100", tp=8, pp=4, context=32_768)
    found = list(meshes(base_of(spec, {"mode", "tp", "pp"}), {"mode", "tp", "pp"}))
    assert {one["dp"] * one["fsdp"] * one["cp"] for one in found} == {16}
    # dp, fsdp and cp of 16, and a rank has 4,096 tokens; each with tensor ranks that share tokens, or do not.
    assert {one["cp"] for one in found} == {1, 2, 4, 8}
    assert len(found) == 2 * (compositions(4, 3) - 1)
    known = {"mode", "devices", *AXES}  # and of a mesh that is given whole
    found = list(meshes(base_of(spec.with_(dp=16, fsdp=1, cp=1, ep=1), known), known))
    assert found == [{"mode": "hybrid"}, {"mode": "hybrid", "sequence_parallel": True}]


@pytest.mark.parametrize(("asked", "cut"), [({"context": 4096}, False), ({}, True), ({"cp": 2}, True)])
def test_sequences_of_published_models_are_dealt_out_where_they_are_long_or_it_is_asked_for(asked, cut):
    spec = Spec(mode="hybrid", devices=16, model="llama3_8b", machine="h100", **asked)
    found = list(meshes(base_of(spec, {"mode", *asked}), {"mode", *asked}))
    assert any(mesh.get("cp", asked.get("cp", 1)) > 1 for mesh in found) == cut


def test_every_mode_that_trains_the_same_is_searched_where_a_model_can_run():
    found = list(meshes(base_of(Spec(model="gpt", devices=4), {"model", "devices"}), {"model", "devices"}))
    assert {one["mode"] for one in found} >= {"ddp", "fsdp", "pipeline", "tensor", "context", "hybrid"}
    assert not {one["mode"] for one in found} & {"single", "local_sgd"}
    several = [{axis for axis in AXES if one.get(axis, 1) > 1} for one in found if one["mode"] == "hybrid"]
    assert all(len(axes) > 1 and axes != {"dp", "fsdp"} for axes in several)  # others are modes by another name


@pytest.mark.parametrize(("layers", "ranks"), [(82, 4), (128, 16), (8, 8), (5, 3)])
def test_of_numbers_of_stages_with_one_length_of_the_longest_the_fewest_is_searched(layers, ranks):
    found = [one for one in orders(SMALL, GIVEN, ranks, layers) if one["schedule"] == "interleaved_1f1b"]
    counts = [one["stages_per_rank"] for one in found]
    possible = range(2, layers // ranks + 1)
    longest = {math.ceil(layers / (ranks * count)) for count in possible}
    assert [math.ceil(layers / (ranks * count)) for count in counts] == sorted(longest, reverse=True)
    for count in counts:
        assert all(
            math.ceil(layers / (ranks * fewer)) > math.ceil(layers / (ranks * count)) for fewer in range(2, count)
        )


def cases(model: str, devices: int, number: int, **given):
    """Layouts drawn from all, that obey the rules."""
    draw, found = random.Random(f"{model} {devices}"), []
    shapes = list(itertools.product(*([d for d in range(1, devices + 1) if devices % d == 0] for _ in AXES)))
    shapes = [shape for shape in shapes if math.prod(shape) == devices]
    while len(found) < number:
        settings = dict(zip(AXES, draw.choice(shapes), strict=True)) | {
            "recompute": draw.choice(["none", "selective", "full"])
        }
        if settings["pp"] > 1:
            settings |= {"schedule": draw.choice(list(schedules.TABLE)), "microbatches": 2 ** draw.randrange(6)}
            settings |= {"stages_per_rank": draw.choice([None, 1, 2, 3])}
        else:
            settings |= {"accumulate": 2 ** draw.randrange(4)}
        settings |= {"sequence_parallel": True} if settings["tp"] > 1 and draw.random() < 0.5 else {}
        if family(model) == "moe":
            settings |= {"expert_tp": 1} if settings["tp"] > 1 and draw.random() < 0.5 else {}
        try:
            found.append(
                prepare(Spec(mode="hybrid", model=model, devices=devices, global_batch=96, **settings, **given))
            )
        except SpecError:
            continue
    return found


BOUNDED = [
    ("gpt", 24, {"layers": 7, "hidden": 96, "heads": 12, "context": 48, "machine": "a100"}),
    ("moe", 16, {"layers": 3, "machine": "h100"}),
    ("llama3_8b", 48, {"layers": 8, "machine": "h100", "flash": True, "share_optimizer": True, "clip": 1.0}),
    ("mixtral_8x7b", 32, {"layers": 6, "context": 2048, "machine": "b200", "master_weights": False}),
]


@pytest.mark.parametrize(("model", "devices", "given"), BOUNDED, ids=[case[0] for case in BOUNDED])
def test_no_layout_takes_less_or_holds_less_than_its_bounds(model, devices, given):
    bounds, shares = Bounds(), []
    for job in cases(model, devices, 14, **given):
        prediction, bound, outlined = predict(job.spec), *(of(job, Way.of(job)) for of in (bounds.of, bounds.outlined))
        about = {name: value for name, value in job.spec.to_params().items() if name in (*AXES, "schedule")}
        whole = bounds.of_mesh(job, job.spec.recompute)
        assert whole.seconds <= bound.seconds * (1 + 1e-9) and whole.bytes <= bound.bytes, about
        for one in (bound, outlined):
            assert one.seconds <= prediction.step_time * (1 + 1e-9), about
            assert one.bytes <= max(prediction.simulation.peak_memory), about
        if job.degree("pp") > 1:
            assert bound.seconds <= outlined.seconds * (1 + 1e-9) and bound.bytes <= outlined.bytes, about
            shares.append(outlined.seconds / prediction.step_time)
    assert max(shares) > 0.98  # and worth their name


@pytest.mark.parametrize("staged", (True, False))
@pytest.mark.parametrize("model", ("gpt", "moe"))
def test_a_batch_that_is_cut_further_is_bounded_by_no_less(model, staged):
    """So a number of pieces can wait for its turn until that of one that divides it has come; of others nothing is
    said. Each of the 12 divisors of 72 comes once."""
    spec = Spec(
        mode="hybrid", model=model, devices=4, machine="h100", global_batch=144, dp=2, **{"pp" if staged else "tp": 2}
    )
    job, bounds, found = prepare(spec), Bounds(), []
    name = "microbatches" if staged else "accumulate"

    def follow(numbers, count: int, seconds: float) -> None:
        for one, finer in by_fewest(numbers):
            assert one[name] % count == 0
            bound = bounds.of(job, Way(one[name], None)).seconds
            assert seconds <= bound * (1 + 1e-9)
            found.append(one[name])
            follow(finer, one[name], bound)

    follow(pieces(spec, GIVEN, staged, 72), 1, 0.0)
    assert sorted(found) == [number for number in range(1, 73) if 72 % number == 0]


SHAPES = [(4, 8, 1), (4, 8, 2), (3, 6, 2), (4, 10, 2), (4, 40, 1), (4, 40, 2), (2, 24, 3), (6, 72, 2)]


@pytest.mark.parametrize("schedule", schedules.TABLE)
def test_in_outline_a_step_is_as_long_as_simulated(schedule):
    """On `unit` a forward of a stage takes 1, a backward 2, its halves 1 each, and nothing else does."""
    for ranks, microbatches, stages in SHAPES[:5]:
        if schedules.check(schedule, ranks, stages, microbatches):
            continue
        layers = {"model": "mlp", "layers": 2 * ranks * stages - 1, "global_batch": 2 * microbatches}
        known = {"schedule": schedule, "microbatches": microbatches, "stages_per_rank": stages, "machine": "unit"}
        step = predict(Spec(mode="pipeline", devices=ranks, **layers, **known)).step_time
        number = ranks * stages
        seconds = [1.0] * number + [2.0] * number + [1.0] * 2 * number
        nothing = [0.0] * number
        lengths = Lengths(seconds, seconds, nothing, nothing, nothing)
        drawn = outline(schedule, ranks, microbatches, stages)
        through, ended = drawn.times(lengths, 0.0, 0.0)
        assert through.max() == ended.max() == step
        if schedule == "1f1b":
            assert step == 3 * (microbatches + ranks - 1)
            # A message before each forward but the first rank's, and back again.
            assert drawn.times(lengths, 0.5, 0.0)[0].max() >= step + 0.5 * 2 * (ranks - 1)


def test_in_outline_what_is_in_the_background_has_its_part_of_a_device():
    """On one rank that is never idle: of 3 s that a stage is gathered, and of 2 s that its gradients are reduced while
    others go back, a quarter each; what comes after the last pass is beside nothing."""
    each = [1.0, 1.0]
    lengths = Lengths([*each, 2.0, 2.0, *each, *each], [*each, 2.0, 2.0, *each, *each], [0.0] * 2, [3.0] * 2, [2.0] * 2)
    drawn = outline("looped_bfs", 1, 8, 2)
    through, ended = drawn.times(lengths, 0.0, 0.25)
    assert through[0] == pytest.approx(8 * 2 * 3 + 0.25 * (2 * 3.0 + 2.0))
    assert ended.max() == through[0] and ended[1] < ended[0]
    assert drawn.times(lengths._replace(ready=[5.0, 0.0]), 0.0, 0.0)[0][0] == 5.0 + 8 * 2 * 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", schedules.TABLE)
def test_in_flight_is_what_the_order_has_between_forwards_and_backwards(schedule, shape):
    """Beside a count action by action; 1F1B has min(M, P) (Narayanan et al. 2021), GPipe all M."""
    ranks, microbatches, stages = shape
    if schedules.check(schedule, ranks, stages, microbatches):
        return
    there, most = set(), 0
    for kind, stage, microbatch, _ in schedules.order(schedule, ranks, microbatches, stages)[0]:
        if kind == "forward":
            there.add((stage, microbatch))
        elif kind in ("backward", "backward_input"):
            there.remove((stage, microbatch))
        most = max(most, len(there))
    assert in_flight(schedule, ranks, microbatches, stages).sum(axis=1).max() == most
    if schedule in ("1f1b", "gpipe"):
        assert most == (microbatches if schedule == "gpipe" else min(microbatches, ranks))


def test_pruning_changes_no_answer():
    """Some settings are held, so that all layouts that are left can be simulated, too."""
    held = GIVEN | {"recompute"}
    spec = SMALL.with_(devices=4, global_batch=8, recompute="none")
    with_, without = looked(spec, held, top=4, close=0.0), looked(spec, held, top=4, prune=False)
    assert [one.step_time for one in with_.best] == [one.step_time for one in without.best]
    assert [one.settings["tp"] for one in with_.best] == [one.settings["tp"] for one in without.best]
    assert without.cut == 0 < with_.cut
    assert without.simulated > 3 * with_.simulated
    # By default what may be faster by a hundredth is not looked for.
    roughly = looked(spec, held, top=4)
    for one, exact in zip(roughly.best, without.best, strict=True):
        assert exact.step_time <= one.step_time <= 1.01 * exact.step_time
    assert roughly.simulated <= with_.simulated
    for search in (with_, without, roughly):
        assert search.done and search.total == search.decided
    assert with_.total == without.total


def test_each_layout_is_refused_by_the_rule_that_refuses_it_anywhere():
    """What is known of rules from other layouts, with the same pipeline or as many replicas, is true of this one."""
    spec, tried = SMALL.with_(global_batch=8, recompute="none"), {}
    search = Search(spec, GIVEN | {"recompute"}, prune=False)
    refuse, ordered = search._refuse, search._ordered
    search._ordered = lambda job, settings: tried.update({json.dumps(settings): settings}) or ordered(job, settings)
    codes = []
    search._refuse = lambda error: codes.append(error.code) or refuse(error)
    search._try = lambda bunch: None
    for _ in search.steps():
        pass
    for settings in random.Random(0).sample(list(tried.values()), 60):
        try:
            prepare(search.spec.with_(**settings))
            expected = None
        except SpecError as error:
            expected = error.code
        try:
            ordered(search._meshed({name: settings[name] for name in settings if name in ("mode", *AXES)}), settings)
            found = None
        except SpecError as error:
            found = error.code
        assert found == expected, settings
    assert codes


def test_where_communication_is_free_and_memory_ample_no_pipeline_wins():
    """Without one there is no bubble; nothing has to be computed again; and whoever computes, it is as much."""
    link = {"link_rate": math.inf, "link_latency": 0.0, "link_chunk": None, "call_overhead": 0.0, "switch": None}
    free = replace(H100, name="free", node_size=EVERYBODY, outer=(), memory_size=2**60, **link)
    given = {"model": "llama3_8b", "layers": 4, "context": 1024, "devices": 4, "global_batch": 8, "machine": "h100"}
    search = looked(Spec(mode="hybrid", cp=1, **given), {*given, "mode", "cp"}, on=free, top=3)
    found = report(search)["best"]
    # Replicas and tp of 4, as factors.
    assert len(found) == compositions(2, 2) == sum(row["settings"]["pp"] == 1 for row in found)
    for row in found:
        assert row["exposed_communication_fraction"] == pytest.approx(0.0, abs=1e-9)
        assert row["bubble_fraction"] == pytest.approx(0.0, abs=1e-9)
        assert row["parts"]["compute"] == pytest.approx(row["step_time"])
        assert row["step_time"] == pytest.approx(found[0]["step_time"], rel=0.04)
        assert "recompute" not in row["settings"]


def test_into_too_little_memory_nothing_fits_and_it_is_said_what_takes_it():
    """4 bytes of a parameter in fp32 and as many of its gradient and momentum, shared by all 8 ranks at most."""
    tiny = replace(H100, name="tiny", memory_size=1)
    search = looked(SMALL, on=tiny)
    assert not search.best and not search.simulated and not search.cut
    found = report(search)
    assert found["layouts"]["too_large"] + found["layouts"]["refused"] == found["layouts"]["total"]
    assert set(found["too_large"]) == {"model"}
    # With room for what stays and for nothing else, it is activations.
    fsdp = predict(SMALL.with_(fsdp=8, recompute="full"))
    stays = sum(size for name, size in fsdp.simulation.memory[0].items() if name != "activations")
    beside = H100.memory_size - room(H100, {"fsdp": 8})  # of CUDA and NCCL
    just = replace(H100, name="just", memory_size=stays + beside)
    found = report(looked(SMALL.with_(fsdp=8), GIVEN | {*AXES}, on=just))
    assert not found["best"] and found["too_large"]["activations"] > 0
    assert "activations are too large" in search_table.found(found)
    # And no less than the one that needs least, which computes everything again for a sample at a time.
    least = max(predict(SMALL.with_(fsdp=8, recompute="full", accumulate=2)).simulation.peak_memory)
    assert stays < found["smallest"] <= least and "or more" in search_table.found(found)


def test_of_a_pipeline_without_communication_stages_in_halves_have_the_least_bubble():
    """On `unit` each op takes its unit and nothing else does: what has the shortest step is worked out by its schedule,
    1F1B's is (M + P - 1)(F + B)."""
    spec = Spec(mode="pipeline", devices=4, model="mlp", layers=7, machine="unit", microbatches=8, global_batch=64)
    held = {"mode", "devices", "model", "layers", "machine", "microbatches", "global_batch"}
    one = looked(spec.with_(schedule="1f1b"), held | {"schedule"}).best[0]
    assert one.step_time == pytest.approx((8 + 4 - 1) * 3)
    best = looked(spec, held).best[0]
    assert best.step_time < one.step_time
    each = []
    for name in schedules.TABLE:
        try:
            each.append(predict(spec.with_(schedule=name)).step_time)
        except SpecError:
            continue
    assert best.step_time <= min(each) + 1e-9


def test_what_a_step_goes_to_adds_up_to_it_and_so_do_differences():
    search = looked(SMALL.with_(recompute="none"), GIVEN | {"recompute"}, top=4)
    found = report(search)
    for row in found["best"]:
        assert tuple(row["parts"]) == PARTS
        assert sum(row["parts"].values()) == pytest.approx(row["step_time"])
        assert min(row["parts"].values()) >= -1e-12
        exposed = sum(row["parts"][axis] for axis in AXES) / row["step_time"]
        assert exposed == pytest.approx(row["exposed_communication_fraction"])
        by = row["slower_by"]
        assert sum(by["parts"].values()) == pytest.approx(by["seconds"], abs=1e-12)
    again = parts_of(predict(SMALL.with_(tp=2, fsdp=4, recompute="full")))
    assert again["recompute"] > 0 and again["tp"] > 0 and again["dp"] == again["pp"] == 0.0


def test_ties_are_those_within_the_mean_error_of_published_predictions():
    found = report(looked(SMALL.with_(recompute="none"), GIVEN | {"recompute"}))
    error, first = found["error"], found["best"][0]["step_time"]
    assert 0.02 < error < 0.2
    assert [row["tied"] for row in found["best"]] == [row["step_time"] <= first * (1 + error) for row in found["best"]]


def test_models_that_are_planned_are_searched_as_software_has_them_today():
    spec = Spec(model="llama3_8b", devices=8, machine="h100")
    assert (found := base_of(spec, {"model"})).flash and found.share_optimizer and found.share_gradients
    assert base_of(spec.with_(flash=False), {"flash"}).flash is False
    assert base_of(Spec(model="gpt"), {"model"}).flash is None


COMMAND = ["search", "--mode", "hybrid", "--devices", "4", "--machine", "h100", "--global-batch", "8", "--top", "3"]
COMMAND += [word for name, value in TINY.items() for word in (f"--{name}", str(value))] + ["--recompute", "none"]


def test_the_command_prints_layouts_with_words_that_give_them(capsys):
    assert main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 3 and found["finished"] and found["layouts"]["left"] == 0
    first = found["best"][0]
    assert main([*first["command"].split()[3:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time"] == pytest.approx(first["step_time"])
    assert max(again["peak_memory"]) == first["peak_memory"]
    assert main(COMMAND) == 0
    told = capsys.readouterr().out
    assert told.count("python -m engine simulate --mode hybrid") == 3 and "slower than 1" in told


def test_who_stops_a_search_gets_the_best_so_far(capsys, monkeypatch):
    tries = Search._try

    def stop(search, bunch):
        if search.simulated == 2:
            raise KeyboardInterrupt
        tries(search, bunch)

    monkeypatch.setattr(Search, "_try", stop)
    assert main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["finished"] and found["layouts"]["left"] > 0 and found["best"]


@pytest.mark.parametrize(("words", "told"), [(["--top", "0"], "top must be between"), (["--machine", "z"], "machine")])
def test_wrong_words_are_answered_in_one_line(words, told, capsys):
    assert main([*COMMAND, *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("devices", [8, 16])
def test_a_ring_is_bounded_by_its_slowest_link_whichever_rank_it_leaves(devices):
    """Eight H100 are a node: of 16 two of the ring's links go from node to node, at an eighth of the rate of the
    others, and neither is rank 0's."""
    given = {"context": 16_384, "flash": True, "share_optimizer": True, "machine": "h100", "accumulate": 4}
    job = prepare(Spec(mode="hybrid", model="llama3_8b", devices=devices, cp=devices, global_batch=4, **given))
    bound, step = Bounds().of(job, Way.of(job)).seconds, predict(job.spec).step_time
    assert 0.95 < bound / step <= 1


def test_after_searches_beside_each_other_garbage_is_looked_for_as_before():
    """Visitors search at once, and some leave: the last one out puts it back."""
    before, seldom = gc.get_threshold(), []
    first, second = (Search(SMALL, GIVEN).steps() for _ in range(2))
    for turn in (first, second):
        next(turn)
        seldom.append(gc.get_threshold())
    first.close()
    seldom.append(gc.get_threshold())
    second.close()
    assert seldom[0] == seldom[1] == seldom[2] != before == gc.get_threshold()
