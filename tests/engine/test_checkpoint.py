"""A training that is saved and resumed, in any mode and on any number of ranks, goes on as if it had never stopped."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from engine import checkpoints
from engine.archive import read_spec
from engine.asking.rules import SpecError
from engine.cli import tables
from engine.job import prepare
from engine.launch import start
from engine.spec import Spec
from tests.engine.proof import finished, holds

GPT = {"model": "gpt", "layers": 2, "hidden": 32, "heads": 4, "context": 16, "dataset": "synthetic"}
MLP = {"model": "mlp", "hidden": 32, "global_batch": 24, "device": "cpu"}
# fp32 sums in another order: far below what a lost moment or a repeated batch changes (see the controls).
CLOSE = 1e-5


@pytest.mark.real
def test_one_training_is_handed_on_through_every_mode(launcher, runs_dir):
    """Three steps in each, saved, and resumed by the next on another number of ranks, as one device does them all."""
    training = {**GPT, "global_batch": 12, "optimizer": "adamw", "lr": 1e-3, "device": "cpu"}
    ring = [
        ("zero1", 3, {}), ("fsdp", 2, {}), ("pipeline", 2, {"schedule": "zbv"}), ("zero2", 3, {}), ("tensor", 2, {}),
        ("hsdp", 4, {}), ("sequence", 2, {}), ("layer_split", 3, {}), ("data_parallel", 2, {}), ("zero1", 2, {}),
        ("context", 4, {}), ("ddp", 4, {}),
    ]  # fmt: skip
    total = 3 * len(ring)
    alone = finished(Spec(mode="single", devices=1, steps=total, **training), launcher, runs_dir)
    losses, resume = [], None
    for k, (mode, devices, settings) in enumerate(ring):
        asked = {"mode": mode, "devices": devices, "steps": 3 * (k + 1), "save_every": 3, "resume": resume}
        result = finished(Spec(**asked, **settings, **training), launcher, runs_dir)
        holds(result)
        assert (result["first_step"], result["steps"], result["checkpoints"]) == (3 * k, 3, [3 * k + 3])
        losses += result["losses"]
        resume = result["run_id"]
    assert losses == pytest.approx(alone["losses"], abs=CLOSE)


@pytest.mark.real
def test_experts_that_were_shared_out_are_brought_together(launcher, runs_dir):
    training = GPT | {
        "model": "moe",
        "experts": 4,
        "global_batch": 12,
        "optimizer": "adamw",
        "lr": 1e-3,
        "device": "cpu",
    }
    whole = finished(Spec(mode="expert", devices=4, steps=6, save_every=3, **training), launcher, runs_dir)
    for mode, devices, mesh in (
        ("expert", 2, {}),
        ("hybrid", 4, {}),
        ("hybrid", 4, {"ep": 2, "tp": 2}),
        ("single", 1, {}),
    ):
        resumed = Spec(mode=mode, devices=devices, steps=6, resume=f"{whole['run_id']}:3", **mesh, **training)
        result = finished(resumed, launcher, runs_dir)
        holds(result)
        assert result["losses"] == pytest.approx(whole["losses"][3:], abs=CLOSE), mode


@pytest.mark.real
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_next_losses_are_those_of_the_run_that_went_on(optimizer, launcher, runs_dir):
    """Saved on four ranks after three of six steps; resumed on two, in stages, in shards and alone."""
    whole = Spec(mode="ddp", devices=4, steps=6, save_every=3, optimizer=optimizer, **MLP)
    whole = finished(whole, launcher, runs_dir)
    assert whole["checkpoints"] == [3, 6]
    for mode, devices in (("fsdp", 2), ("pipeline", 2), ("tensor", 2), ("single", 1)):
        spec = Spec(mode=mode, devices=devices, steps=6, resume=f"{whole['run_id']}:3", optimizer=optimizer, **MLP)
        result = finished(spec, launcher, runs_dir)
        holds(result)
        assert result["losses"] == pytest.approx(whole["losses"][3:], abs=CLOSE), mode


@pytest.fixture(scope="module")
def saved(launcher, tmp_path_factory):
    """The folder of runs, and a run in it with checkpoints after 2 and 4 of 4 steps, of shards on two ranks."""
    runs_dir = tmp_path_factory.mktemp("runs")
    spec = Spec(mode="fsdp", devices=2, steps=4, save_every=2, optimizer="adamw", **MLP)
    return runs_dir, start(spec, runs_dir=runs_dir, launcher=launcher).result(timeout=120)


@pytest.mark.real
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moments_are_of_the_precision_of_the_training_that_goes_on(precision, saved):
    """Not of the one that was saved, or twice as much would be kept as was planned, or half of it."""
    pytest.importorskip("torch")
    from engine.real import checkpoint, models

    runs_dir, whole = saved
    resumed = {"resume": f"{whole['run_id']}:2", "precision": precision, "optimizer": "adamw"}
    job = prepare(Spec(mode="single", devices=1, steps=4, **resumed, **MLP))
    model = models.build(job)
    optimizer, held = models.make_optimizer(job, model.parameters()), dict(model.named_parameters())
    checkpoint.restore(runs_dir / "this", job, held, optimizer, alone=True)
    for parameter in held.values():
        moments = [value for value in optimizer.state[parameter].values() if value.shape == parameter.shape]
        assert len(moments) == 2
        assert all(moment.dtype == parameter.dtype and moment.any() for moment in moments)


@pytest.mark.real
def test_without_its_moments_or_with_another_batch_a_training_goes_on_otherwise(saved):
    """The negative control: what a checkpoint holds beside the weights, and where the data goes on, is seen."""
    torch = pytest.importorskip("torch")
    from engine.real import checkpoint, models
    from engine.real.data import Batches

    runs_dir, whole = saved

    def next_losses(*, moments: bool = True, skip: int = 0) -> list[float]:
        job = prepare(Spec(mode="single", devices=1, steps=4, resume=f"{whole['run_id']}:2", optimizer="adamw", **MLP))
        model = models.build(job)
        optimizer = models.make_optimizer(job, model.parameters())
        held = dict(model.named_parameters())
        checkpoint.restore(runs_dir / "this", job, held, optimizer, alone=True)
        if not moments:
            optimizer.state.clear()
        batches, losses = Batches(job, 0, 1, torch.device("cpu")), []
        for step in range(2):
            inputs, targets = batches(step - skip)
            optimizer.zero_grad()
            loss = models.loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert next_losses() == pytest.approx(whole["losses"][2:], abs=CLOSE)
    assert abs(next_losses(moments=False)[1] - whole["losses"][3]) > 100 * CLOSE
    assert abs(next_losses(skip=1)[0] - whole["losses"][2]) > 100 * CLOSE


@pytest.mark.real
def test_shards_are_saved_as_shards_and_what_all_hold_alike_once(saved, launcher):
    """A weight of [32, 32] is two chunks of 16 rows under fsdp on two ranks, and one whole one under ddp."""
    pytest.importorskip("torch")
    from engine.real.checkpoint import Reader

    runs_dir, sharded = saved
    spec = Spec(mode="ddp", devices=2, steps=2, save_every=2, optimizer="adamw", **MLP)
    whole = finished(spec, launcher, runs_dir)
    for result, sizes in ((sharded, [[16, 32], [16, 32]]), (whole, [[32, 32]])):
        index = Reader(checkpoints.find(f"{result['run_id']}:2", runs_dir).folder).read_metadata()
        for name in ("model.fc2.weight", "optimizer.fc2.weight.exp_avg"):
            assert [list(chunk.sizes) for chunk in index.state_dict_metadata[name].chunks] == sizes
        assert index.state_dict_metadata["optimizer.fc2.weight.step"].size == ()


@pytest.mark.real
def test_an_index_that_would_run_code_is_not_read(saved, tmp_path):
    pytest.importorskip("torch")
    from engine.real.checkpoint import Reader

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(pickle.UnpicklingError, match="holds no"):
        Reader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.real
@pytest.mark.parametrize(
    ("changes", "code", "setting", "suggest"),
    [
        ({"model": "cnn", "hidden": None}, "resume_differs", "model", ("mlp",)),
        ({"hidden": 64}, "resume_differs", "hidden", (32,)),
        ({"optimizer": "sgd"}, "resume_differs", "optimizer", ("adamw",)),
        ({"dataset": "synthetic"}, "resume_differs", "dataset", ("digits",)),
        ({"seed": 7}, "resume_differs", "seed", (0,)),
        ({"global_batch": 48}, "resume_differs", "global_batch", (24,)),
        ({"resume": "ID:3"}, "no_checkpoint", "resume", ("ID:2", "ID:4")),
        ({"resume": "20200101-000000-ddp2-abcd"}, "no_run", "run", ()),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(changes, code, setting, suggest, saved, launcher):
    runs_dir, result = saved
    run_id = result["run_id"]
    values = {"mode": "ddp", "devices": 2, "optimizer": "adamw", "resume": "ID", **MLP, **changes}
    values["resume"] = values["resume"].replace("ID", run_id)
    with pytest.raises(SpecError) as refused:
        start(Spec(**values), runs_dir=runs_dir, launcher=launcher)
    named = tuple(s.replace("ID", run_id) if isinstance(s, str) else s for s in suggest)
    assert (refused.value.code, refused.value.setting, refused.value.suggest) == (code, setting, named)


@pytest.mark.real
def test_of_the_last_run_the_newest_that_has_checkpoints_is_meant(saved):
    runs_dir, _ = saved
    found = checkpoints.find("last", runs_dir)
    made = [path.parent.parent for path in sorted(runs_dir.glob("*/checkpoint/step-*"))]
    assert found.run_id == max(made, key=lambda run: json.loads((run / "status.json").read_text())["created"]).name
    assert found.step == checkpoints.steps_of(runs_dir / found.run_id)[-1]


@pytest.mark.real
def test_the_last_checkpoint_is_meant_where_none_is_named_and_the_run_says_which(saved, launcher):
    runs_dir, result = saved
    spec = Spec(mode="ddp", devices=2, steps=5, optimizer="adamw", lr=0.1, resume=result["run_id"], **MLP)
    handle = start(spec, runs_dir=runs_dir, launcher=launcher)
    assert read_spec(handle.run_dir).resume == f"{result['run_id']}:4"
    resumed = handle.result(timeout=120)
    assert resumed["first_step"] == 4
    # Its rate was 0.002, and would be if no other had been asked for.
    assert resumed["resumed_with"] == {"lr": {"from": 0.002, "to": 0.1}}
    told = tables.result(resumed, handle.run_dir)
    assert f"after the 4 of {result['run_id']}, with lr 0.1 where it had 0.002" in told
    kept = checkpoints.settings(result["run_id"], runs_dir)
    assert (kept["lr"], kept["precision"], kept["clip"], kept["optimizer"]) == (0.002, "fp32", None, "adamw")
    with pytest.raises(SpecError, match=r"has done 4 steps already; steps is 4\. Try: 24\.$"):
        start(spec.with_(steps=4), runs_dir=runs_dir, launcher=launcher)


@pytest.mark.real
def test_another_model_under_the_same_settings_is_refused(saved):
    """A checkpoint of an older Lockstep, say, whose model of that name had other parameters."""
    runs_dir, result = saved
    there = checkpoints.find(result["run_id"], runs_dir)
    copy = runs_dir / "older" / "checkpoint" / "step-4"
    copy.mkdir(parents=True)
    told = json.loads((there.folder / checkpoints.DESCRIPTION).read_text())
    del told["shapes"]["out.bias"]
    (copy / checkpoints.DESCRIPTION).write_text(json.dumps(told))
    job = prepare(Spec(mode="ddp", resume="older:4", optimizer="adamw", **MLP))
    with pytest.raises(SpecError, match=r"these parameters differ: out\.bias\."):
        checkpoints.resolve(job, runs_dir)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _turned(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [_cut, _turned, _a_folder, Path.unlink])
def test_a_damaged_checkpoint_is_not_begun_with(damage, name, tmp_path):
    """It could not be read, or worse, could; who asks for the last one is told of the one before."""
    job, own = prepare(Spec(mode="ddp")), {}
    shapes = {f"{layer.name}.{name}": list(shape) for layer in job.layers for name, shape in layer.params}
    for step in (2, 4):
        own[step] = checkpoints.folder_of(tmp_path / "run", step)
        own[step].mkdir(parents=True)
        for each in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            (own[step] / each).write_bytes(b"shards of " + each.encode())
        checkpoints.describe(own[step], job, step, shapes)
    asked = prepare(Spec(mode="ddp", resume="run"))
    assert checkpoints.resolve(asked, tmp_path).resume == "run:4"
    damage(own[4] / name)
    with pytest.raises(SpecError) as refused:
        checkpoints.resolve(asked, tmp_path)
    assert (refused.value.code, refused.value.suggest) == ("damaged_checkpoint", ("run:2",))
    assert f"run:4 {name}" in str(refused.value)


@pytest.mark.parametrize(
    "resume", ["../../etc", "a/b", "..", "", "run:", "run:x", "run:-1", "run:3/../4", "run:1:2", "run:9999999999"]
)
def test_what_is_no_run_s_id_is_refused(resume):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(resume=resume))
    assert refused.value.code == "bad_resume"


@pytest.mark.parametrize("settings", [{"mode": "local_sgd"}, {"mode": "ddp", "compress": "powersgd"}])
@pytest.mark.parametrize("asked", [{"save_every": 2}, {"resume": "run:2"}])
def test_what_replicas_keep_each_for_itself_is_not_saved(settings, asked):
    with pytest.raises(SpecError) as refused:
        prepare(Spec(**settings, **asked))
    assert (refused.value.code, refused.value.setting) == ("does_not_apply", next(iter(asked)))


def test_a_folder_that_was_left_half_written_is_no_checkpoint(tmp_path):
    folder = checkpoints.folder_of(tmp_path / "run", 3)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"shards")
    assert checkpoints.steps_of(tmp_path / "run") == []
    with pytest.raises(SpecError) as refused:
        checkpoints.find("run", tmp_path)
    assert refused.value.code == "no_checkpoint"
    checkpoints.describe(folder, prepare(Spec()), 3, {})
    assert checkpoints.find("run", tmp_path).name == "run:3"


@pytest.mark.real
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_resumed_epoch_goes_on_where_it_stopped(replicas):
    """Four batches of 512 an epoch: resumed in its middle, it goes on to its end, on any number of ranks."""
    torch = pytest.importorskip("torch")
    from engine.real.data import Batches

    settings = {"model": "mlp", "dataset": "synthetic", "global_batch": 512, "steps": 10}
    whole = Batches(prepare(Spec(mode="single", devices=1, **settings)), 0, 1, torch.device("cpu"))
    job = prepare(Spec(mode="ddp", devices=replicas, resume="run:3", **settings))
    assert (job.first_step, job.steps, job.batches_per_epoch) == (3, 7, 4)
    parts = [Batches(job, replica, replicas, torch.device("cpu")) for replica in range(replicas)]
    for step in range(7):
        seen = torch.stack([part(step)[0] for part in parts], dim=1).flatten(0, 1)
        assert torch.equal(seen, whole(3 + step)[0])
