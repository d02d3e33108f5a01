"""A job under torch's parallelize_module with SequenceParallel norms: outside pairs a rank has part of the context."""

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from engine.job import Job
from engine.modes.sequence.plan import parts
from engine.modes.tensor.run import parallel_chain
from engine.modes.tensor.shards import styles
from engine.real import models
from engine.real.data import Batches
from engine.real.training import LocalTraining, Place

CONTEXT = Shard(1)  # of [N, context, hidden]


def training(job: Job, place: Place) -> "SequenceTraining":
    plan = {
        "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=CONTEXT),
        "block*.norm*": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=CONTEXT, desired_input_layouts=Replicate(), use_local_output=True),
    }
    for name, style in styles(job).items():
        plan[name] = (
            ColwiseParallel(input_layouts=CONTEXT) if style == "column" else RowwiseParallel(output_layouts=CONTEXT)
        )
    chain = parallel_chain(job, place, plan)
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    optimizer = models.make_optimizer(job, chain.parameters())
    return SequenceTraining(job, place, chain, chain, Batches(job, 0, 1, place.device), optimizer)


class SequenceTraining(LocalTraining):
    """Each part of the context gives a part of the gradient of a norm's weight; they are summed after backward."""

    def make_gradients(self, step: int) -> float:
        loss = super().make_gradients(step)
        for parameter in self.chain.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                parameter.grad = gradient.redistribute(placements=[Replicate()])
        return loss
