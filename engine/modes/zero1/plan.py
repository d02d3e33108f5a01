"""A job under ZeroRedundancyOptimizer -> its plan: DDP's, then each owner updates and broadcasts its parameters."""

import dataclasses

from engine.asking.frozen import trained
from engine.job import Job
from engine.model import chain
from engine.model.shapes import FP32, Layer
from engine.modes.ddp import plan as ddp
from engine.modes.zero1.owners import Owned, owners
from engine.plan import Op, Plan, Program

# An owner of nothing broadcasts one number in fp32 all the same (ZeroRedundancyOptimizer._build_param_buckets).
NOTHING = FP32


def plan(job: Job, step: int) -> Plan:
    replicated = ddp.plan(job, step)
    (program,) = replicated.programs
    owned = owners(trained(job.layers), job.degree("dp"))
    broadcasts = tuple(_broadcast(rank, each) for rank, each in enumerate(owned))
    programs: dict[tuple[str, ...], Program] = {}
    for each in owned:
        if each.params in programs:  # of many ranks most own nothing, and are alike
            continue
        mine = [_only(layer, each) for layer in job.layers]
        ops = (*program.ops[:-1], chain.optimizer(mine, job.spec), *broadcasts)
        memory = program.memory | {"optimizer": chain.standing_memory(mine, job.spec)["optimizer"]}
        updates = tuple(
            own.param_bytes / whole.param_bytes if whole.param_bytes else 0.0
            for own, whole in zip(mine, job.layers, strict=True)
        )
        programs[each.params] = Program(ops, program.holds, memory, updates=updates)
    index = {params: i for i, params in enumerate(programs)}
    roles = tuple(index[each.params] for each in owned)
    return dataclasses.replace(replicated, programs=tuple(programs.values()), roles=roles)


def _only(layer: Layer, owned: Owned) -> Layer:
    """The layer with no parameters but those owned."""
    params = tuple((name, shape) for name, shape in layer.params if f"{layer.name}.{name}" in owned.params)
    return dataclasses.replace(layer, params=params)


def _broadcast(rank: int, owned: Owned) -> Op:
    """All owners' broadcasts are issued at once and waited for together, at the end of the step."""
    size = owned.bytes or NOTHING
    return Op(kind="broadcast", part=f"owner{rank}", payload="weights", axis="dp", bytes=size, asynchronous=True)
