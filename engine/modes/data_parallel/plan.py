"""A job under nn.DataParallel -> its plan: scatter, replicate, parallel apply, gather; gradients back to device 0."""

from dataclasses import replace

from engine.job import Job
from engine.model import chain
from engine.plan import Mesh, Op, Plan, Program


def plan(job: Job, step: int) -> Plan:
    devices = job.spec.devices
    part = {"inputs": _inputs(job) // devices, "outputs": job.layers[-1].output_bytes * job.micro_batch}
    holds = tuple(range(len(job.layers)))
    # Of all outputs device 0 keeps themselves, gathered, and their gradients, in parts.
    gathered = 2 * job.layers[-1].output_bytes * job.micro_batch * devices
    standing = chain.standing_memory(job.layers, job.spec) | part | {"outputs": part["outputs"] + gathered}
    first = Program(_ops(job, master=True), holds, standing)
    weights = sum(layer.param_bytes for layer in job.layers)
    replica = Program(_ops(job, master=False), holds, {"parameters": weights, "gradients": weights} | part)
    programs = (first, replica) if devices > 1 else (first,)
    roles = (0,) + (1,) * (devices - 1)
    return Plan(Mesh(("dp",), (devices,)), programs, roles, tuple(layer.name for layer in job.layers))


def _ops(job: Job, *, master: bool) -> tuple[Op, ...]:
    ops = chain.microsteps(job, lambda k, synced: _passes(job, master=master))
    whole = job.spec.global_batch // job.microsteps  # what device 0 loads, for all
    loads = {"bytes": job.sample_bytes * whole, "saved": job.sample_bytes * whole}
    ops = [replace(op, **loads) if op.kind == "load" else op for op in ops if master or op.kind != "load"]
    if master:
        ops += [*chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec)]
    return tuple(ops)


def _passes(job: Job, *, master: bool) -> list[Op]:
    """Collectives are rooted at device 0 and count the whole tensor's bytes: of the batch scattered, of all outputs."""
    inputs = _inputs(job)
    outputs = job.layers[-1].output_bytes * job.spec.global_batch // job.microsteps
    weights = sum(layer.param_bytes for layer in job.layers)
    ops = []
    if job.spec.devices > 1:
        ops += [_move("scatter", "inputs", "batch", inputs), _move("broadcast", "replicate", "weights", weights)]
    # Replicas have no loss. Device 0 keeps its logarithms until there are the outputs' gradients.
    *_, end = job.layers
    more = (end.logarithms - end.output_bytes) * job.micro_batch * job.spec.devices if master else 0
    layers = [*job.layers[:-1], replace(end, saved=end.saved - end.logarithms + end.output_bytes, logarithms=0)]
    *ahead, last = chain.forward(layers, job.micro_batch, sent=True, spec=job.spec)
    ops += [*ahead, replace(last, saved=last.saved - end.output_bytes * job.micro_batch)]  # kept for all
    if job.spec.devices > 1:
        ops.append(_move("gather", "outputs", "activation", outputs))
    if master:
        ops.append(Op(kind="forward", stage=0, microbatch=0, part="loss", bytes=outputs, remains=more))
    if job.spec.devices > 1:
        ops.append(_move("scatter", "output gradients", "gradient", outputs))
    first, *rest = chain.backward(layers, job.micro_batch, sent=True, spec=job.spec)
    ops += [replace(first, remains=-more), *rest]
    if job.spec.devices > 1:
        ops.append(_move("reduce", "gradients", "gradient", weights))
    return ops


def _inputs(job: Job) -> int:
    return (job.sample_bytes - job.target_bytes) * job.spec.global_batch // job.microsteps


def _move(kind: str, part: str, payload: str, size: int) -> Op:
    return Op(kind=kind, part=part, payload=payload, axis="dp", bytes=size)
