"""A run's folder and what a person wants to resume -> the checkpoint that is meant, if the training asked for fits it.

    runs/<id>/checkpoint/step-6/    what torch.distributed.checkpoint wrote (engine.real.checkpoint), after 6 steps
    runs/<id>/checkpoint/step-6/checkpoint.json    steps done, the settings, the shape of every parameter, and of each
                                                   file its size and CRC-32; written last

Steps count from the beginning of the training: a run that resumes after 6 of 10 steps has 4 of its own.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine import archive
from engine.asking.rules import SpecError
from engine.spec import Spec

if TYPE_CHECKING:
    from engine.job import Job

DESCRIPTION = "checkpoint.json"
# What makes it the same training: its model, its optimizer, and the order of its data. All else may change.
KEPT = (
    *("model", "layers", "hidden", "heads", "context", "experts", "top_k", "dataset", "masked", "data_dir"),
    *("optimizer", "seed", "global_batch"),
)
# What goes on as it was unless something else is asked for, which a result then says.
CARRIED = ("lr", "precision", "clip")
MAX_SUGGESTED = 3
CHUNK = 1 << 20  # bytes of a file that are read at once


class Checkpoint(NamedTuple):
    run_id: str
    step: int  # steps done
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.run_id}:{self.step}"


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoint" / f"step-{step}"


def describe(folder: Path, job: Job, step: int, shapes: dict[str, list[int]]) -> None:
    """Make a folder of shards a checkpoint."""
    told = {"step": step, "spec": job.spec.to_dict(), "shapes": shapes, "files": _files_in(folder)}
    archive.write_json(folder / DESCRIPTION, told)


def steps_of(run_dir: Path) -> list[int]:
    """After how many steps a run has checkpoints, in rising order."""
    numbers = [path.parent.name.removeprefix("step-") for path in run_dir.glob(f"checkpoint/step-*/{DESCRIPTION}")]
    return sorted(int(number) for number in numbers if number.isdigit())


def parse(text: str) -> tuple[str, int | None]:
    """RUN_ID or RUN_ID:STEP. SpecError("bad_resume"), also for an id that could be a path."""
    run_id, colon, step = text.partition(":")
    try:
        archive.check_run_id(run_id)
    except SpecError:
        raise SpecError("bad_resume", "resume", text) from None
    if colon and not (step.isascii() and step.isdigit() and len(step) <= 9):
        raise SpecError("bad_resume", "resume", text, suggest=[run_id])
    return run_id, int(step) if colon else None


def find(resume: str, runs_dir: str | Path) -> Checkpoint:
    """The checkpoint of a run after a step, or its last one; of the run `last`, the newest run that has any."""
    run_id, step = parse(resume)
    if run_id == "last":
        made = [status["run_id"] for status in archive.list_runs(runs_dir)]
        run_id = next((name for name in made if steps_of(Path(runs_dir) / name)), run_id)
    run_dir = archive.open_run(runs_dir, run_id)
    there = steps_of(run_dir)
    if not there or step not in (None, *there):
        near = sorted(there, key=lambda s: abs(s - (step or 0)))[:MAX_SUGGESTED]
        raise SpecError("no_checkpoint", "resume", resume, suggest=[f"{run_id}:{s}" for s in sorted(near)])
    step = there[-1] if step is None else step
    return Checkpoint(run_id, step, folder_of(run_dir, step))


def settings(resume: str, runs_dir: str | Path) -> dict[str, Any]:
    """The settings that a training which resumes must have, and those that it has unless others are asked for."""
    spec = _description(find(resume, runs_dir))["spec"]
    return {name: spec.get(name) for name in (*KEPT, *CARRIED)}


def changed(spec: Spec, runs_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Of a run that has resumed, the settings that it went on with otherwise: from what they were to what they are.
    None are known once the checkpoint is gone."""
    try:
        saved = _description(find(spec.resume, runs_dir))["spec"]
    except SpecError:
        return {}
    both = {name: {"from": saved.get(name), "to": getattr(spec, name)} for name in CARRIED}
    return {name: each for name, each in both.items() if each["from"] != each["to"]}


def resolve(job: Job, runs_dir: str | Path) -> Spec:
    """The job's spec, naming the one checkpoint that is meant. SpecError where it does not fit the job."""
    if job.spec.resume is None:
        return job.spec
    checkpoint = find(job.spec.resume, runs_dir)
    description = _description(checkpoint)
    for name in KEPT:
        saved, value = description["spec"][name], getattr(job.spec, name)
        if value != saved:
            suggest = [saved] if saved is not None else []
            raise SpecError("resume_differs", name, value, suggest=suggest, saved=saved, run=checkpoint.name)
    shapes = {f"{layer.name}.{name}": list(shape) for layer in job.layers for name, shape in layer.params}
    if shapes != description["shapes"]:
        odd = sorted(n for n in shapes | description["shapes"] if shapes.get(n) != description["shapes"].get(n))
        raise SpecError("resume_parameters", "resume", checkpoint.name, parameters=", ".join(odd))
    written, there = description.get("files", {}), _files_in(checkpoint.folder)  # older ones do not say
    if odd := [name for name in written if there.get(name) != written[name]]:
        steps = steps_of(archive.open_run(runs_dir, checkpoint.run_id))
        others = [f"{checkpoint.run_id}:{step}" for step in steps if step != checkpoint.step][-MAX_SUGGESTED:]
        raise SpecError("damaged_checkpoint", "resume", checkpoint.name, file=odd[0], suggest=others)
    return job.spec.with_(resume=checkpoint.name)


def _files_in(folder: Path) -> dict[str, list[int] | None]:
    return {path.name: _seen(path) for path in sorted(folder.iterdir()) if path.name != DESCRIPTION}


def _seen(path: Path) -> list[int] | None:
    """Size and CRC-32 of a file, if it can be read."""
    size = crc = 0
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                size, crc = size + len(part), zlib.crc32(part, crc)
    except OSError:
        return None
    return [size, crc]


def _description(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read as data that may be damaged: it must have what is asked of it."""
    found = archive.read_json(checkpoint.folder / DESCRIPTION) or {}
    spec, shapes = found.get("spec"), found.get("shapes")
    files = found.get("files", {})
    if not all(isinstance(each, dict) for each in (spec, shapes, files)) or not spec.keys() >= set(KEPT):
        raise SpecError("no_checkpoint", "resume", checkpoint.name)
    return found
