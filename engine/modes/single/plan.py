"""A job on one device -> its plan: load, forward, backward, optimizer; nothing is communicated."""

from engine.graph.columns import joined
from engine.job import Job
from engine.model import chain
from engine.plan import Mesh, Plan, Program


def plan(job: Job, step: int) -> Plan:
    size, spec = job.micro_batch, job.spec
    passes = [*chain.forward(job.layers, size, spec=spec), *chain.backward(job.layers, size, spec=spec)]
    update = [*chain.clip(job.layers, job.spec), chain.optimizer(job.layers, job.spec)]
    ops = joined(chain.microsteps(job, lambda k, synced: passes), update)
    program = Program(ops, tuple(range(len(job.layers))), chain.standing_memory(job.layers, job.spec))
    return Plan(Mesh(("dp",), (1,)), (program,), (0,), tuple(layer.name for layer in job.layers))
