"""A run folder and a rank -> that rank's training, recorded: steps, spans, parity, and the trained model's accuracy.

Called by the launcher in a forked process. `python -m engine.real.worker RUN_DIR` does the same under any program
that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, Slurm, a Kubernetes job).
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from engine import modes
from engine.asking.faults import parse_fault
from engine.asking.frozen import trained as trained_layers
from engine.asking.settings import ONE_PROCESS_MODES
from engine.job import Job, prepare
from engine.real import agree, checkpoint, cores, faults, models, speed
from engine.real.clip import clip
from engine.real.clock import clock_of
from engine.real.data import Batches
from engine.real.evaluation import evaluate
from engine.real.memory import measure
from engine.real.paced import Pace
from engine.real.parity import Parity
from engine.real.preemption import preempt_nobody
from engine.real.recompute import recompute
from engine.real.recorder import Recorder
from engine.real.targets import Targets
from engine.real.training import Place, Training, mark_updates, update, whole_of_each
from engine.scale_model.pictured import trained
from engine.spec import Spec


def work(run_dir: str, rank: int, world_size: int, *, rendezvous: str = "file") -> Training:
    """Train. Raises what went wrong, with the attributes `step` and `op` set to where.

    The caller keeps what is returned, and ends the process with os._exit, without finalisers.
    """
    folder = Path(run_dir)
    asked = prepare(Spec.from_dict(json.loads((folder / "spec.json").read_text())))
    job = trained(asked)
    if asked.spec.paced is None:  # its ranks wake at moments of their own
        preempt_nobody()
    device = device_of(job.spec.device, rank)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // max(world_size, job.spec.devices)))
    _peak_memory(device)
    if job.spec.mode not in ONE_PROCESS_MODES:
        _join(folder, rank, world_size, device, rendezvous, job.spec.timeout)
    origin = round(json.loads((folder / "status.json").read_text())["created"] * 1e9)
    recorder = Recorder(folder / f"rank{rank}.jsonl", rank, origin, enabled=job.spec.record, clock=clock_of(device))
    if asked.spec.paced is not None:
        recorder.pace = Pace(asked, job, rank, folder)
    place = Place(rank, world_size, device, recorder, folder)
    signal.signal(signal.SIGTERM, lambda *_: _leave(recorder))
    fault, step = parse_fault(job.spec.fault), -1
    try:
        if world_size > 1:
            kind = faults.of_rank(fault, rank)
            agree.check(faults.altered(job, kind), place, scale=2.0 if kind == "weights" else 1.0)
        training = modes.run(job.spec.mode).training(job, place)
        if job.spec.resume is not None:
            checkpoint.restore(place.run_dir, job, training.held(), training.optimizer)
        if job.spec.recompute not in (None, "none"):
            for chain in training.chains.values() if hasattr(training, "chains") else [training.chain]:
                recompute(chain, job)
        mark_updates(training.optimizer, recorder)
        held, parity, targets = training.held(), Parity(job, place, training), Targets(job, place)
        with (folder / f"rank{rank}.steps.jsonl").open("a", encoding="utf-8") as steps:
            for step in range(job.steps):
                if faults.of_rank(fault, rank, step) == "leave":
                    recorder.flush()
                    return training
                line = one_step(job, place, training, held, parity, targets, step)
                done = job.first_step + step + 1
                if job.spec.evaluate_every is not None and done % job.spec.evaluate_every == 0:
                    recorder.doing = "evaluation"
                    line["evaluation"] = {"step": done, **evaluate(job, place, training)}
                steps.write(json.dumps(line) + "\n")
                steps.flush()
                if step + 1 == parity.steps:
                    parity.compare()
                if job.spec.save_every is not None and done % job.spec.save_every == 0:
                    recorder.doing = "checkpoint"
                    checkpoint.save(folder, job, done, training.held(), training.optimizer)
        recorder.flush()
        if asked.spec.paced is None:
            speed.keep(job, place)
        _validate(job, place, training)
        if job.spec.measure_memory:
            measure(job, place, training)  # the last thing, since it goes on training
    except Exception as error:
        error.step, error.op = (step if step >= 0 else None), recorder.doing or None
        recorder.flush()
        raise
    # A process group is never destroyed: the process ends instead. Its destructor joins gloo's threads while it holds
    # the interpreter lock, and a thread that is just then letting go of a Python tensor waits for that lock: for ever.
    return training


def device_of(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # on by default, and 10 bits of each factor are no fp32
    return device


def _join(folder: Path, rank: int, world_size: int, device: torch.device, rendezvous: str, timeout: float) -> None:
    """Meet the other ranks: on one machine through a fresh file in the run folder and over loopback, whatever the
    machine's name resolves to; else as the environment says. One that says nothing for `timeout` seconds is taken for
    lost: a hang becomes an error that names the operation."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    where: dict = {"init_method": "env://"}
    if rendezvous == "file":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        where = {"store": dist.FileStore(str(folder / "store"), world_size)}
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=limit, **where)


def _leave(recorder: Recorder) -> None:
    """Asked to stop: keep what is recorded, then go at once; the peers are asked too."""
    recorder.flush()
    os._exit(128 + signal.SIGTERM)


def one_step(
    job: Job,
    place: Place,
    training: Training,
    held: dict[str, nn.Parameter],
    parity: Parity,
    targets: Targets,
    step: int,
) -> dict:
    fault = parse_fault(job.spec.fault)
    recorder = place.recorder
    faults.begin_step(fault, place, training, step)
    recorder.line_up(step)
    waited = cores.waited()
    start = time.time_ns()
    recorder.begin_step(step)
    if faults.of_rank(fault, place.rank, step) == "slow":
        time.sleep(fault.seconds)
    batches = getattr(training, "batches", None)
    targets.count(batches, step, alone=faults.of_rank(fault, place.rank, step) == "mean")
    with models.counting() as routed:
        loss = training.make_gradients(step)
    _check_gradients(held, job)
    faults.after_gradients(fault, place, training, step)
    parity.keep_gradients(step, loss, routed)
    norm = None if job.spec.clip is None else clip(training, recorder, job.spec.clip)
    parity.keep_norm(step, norm)
    update(training, recorder)
    recorder.end_step()
    end = time.time_ns()
    return {
        "step": step,
        "start": start / 1e9,
        "end": end / 1e9,
        "loss": loss,
        "grad_norm": norm,
        "samples": job.spec.global_batch,
        "memory": _peak_memory(place.device),
        "resident": cores.resident(),
        "cpu": time.process_time(),
        **({"busy": cores.busy()} if place.rank == 0 else {}),
        "waited": None if waited is None else cores.waited() - waited,
        **_order(training),
        **targets.line(batches, loss),
        **({"routed": routed} if routed else {}),
    }


def _check_gradients(held: dict[str, nn.Parameter], job: Job) -> None:
    """A parameter outside of the loss gets no gradient, and peers that have one wait for this rank's for ever."""
    learn = {layer.name for layer in trained_layers(job.layers)}
    if missing := [name for name, each in held.items() if each.grad is None and name.partition(".")[0] in learn]:
        raise RuntimeError(f"no gradient for {', '.join(missing)}: on this rank they took no part in the loss")


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _order(training: Training) -> dict:
    """The epoch, and a fingerprint of the order of this rank's samples in it, where it loads any."""
    batches = getattr(training, "batches", None)
    return {"epoch": batches.epoch, "order": batches.fingerprint} if batches and batches.epoch >= 0 else {}


_AT_START: dict[int, int] = {}


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the allocator on a GPU; on the CPU the process's peak resident size above what it began with."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident() - _AT_START.setdefault(os.getpid(), _resident())


def _validate(job: Job, place: Place, training: Training) -> None:
    """Rank 0 gathers the trained parameters and measures the whole model on the validation samples, each once."""
    state = _trained(job, place, training)
    if place.rank != 0:
        return
    model = models.build(job)
    model.load_state_dict(state)
    inputs, targets = Batches(job, 0, 1, torch.device("cpu")).validation
    right = total = 0
    with torch.no_grad():
        for x, y in zip(inputs.split(256), targets.split(256), strict=True):
            guess = model(x).argmax(-1)
            right, total = right + int((guess == y).sum()), total + y.numel()
    text = json.dumps({"accuracy": right / total if total else None, "count": total})
    (place.run_dir / "validation.json").write_text(text)


def _trained(job: Job, place: Place, training: Training) -> dict[str, torch.Tensor]:
    """The model of which each rank has a piece, on rank 0: all that ranks have is laid into one vector each, and these
    are added up. Of what several have, the mean: replicas of local SGD differ."""
    shapes = {f"{layer.name}.{name}": shape for layer in job.layers for name, shape in layer.params}
    sizes = [*map(math.prod, shapes.values())]
    vector = torch.zeros(sum(sizes) + len(sizes))  # of each parameter the values; then how many ranks have it
    *parts, holders = vector.split([*sizes, len(sizes)])
    held = whole_of_each({name: [parameter] for name, parameter in training.held().items()})
    for i, (name, part) in enumerate(zip(shapes, parts, strict=True)):
        if name in held:
            part.copy_(held[name][0].flatten())
            holders[i] = 1
    if place.world_size > 1:
        dist.reduce(vector, 0)
    each = zip(shapes.items(), parts, holders, strict=True)
    return {name: (part / ranks).view(shape) for (name, shape), part, ranks in each if ranks}


if __name__ == "__main__":
    kept = work(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), rendezvous="env")
    sys.stdout.flush()
    os._exit(0)
