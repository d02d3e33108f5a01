"""A job under torch's parallelize_module with SequenceParallel norms: outside pairs a rank has part of the context."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from engine.job import Job
from engine.modes.sequence.plan import parts
from engine.modes.tensor.run import LOGITS, TensorTraining, parallel_chain
from engine.modes.tensor.shards import styles
from engine.real import models
from engine.real.data import Batches
from engine.real.training import Place

CONTEXT = Shard(1)  # of [N, context, hidden]


def training(job: Job, place: Place) -> TensorTraining:
    cut = styles(job)
    plan: dict[str, ParallelStyle] = (
        {}
        if not cut
        else {
            # [context, hidden], which is whole on every rank, to this rank's part of the context
            "embed.position": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
            "block*.norm*": SequenceParallel(),
            "head.norm": SequenceParallel(),
        }
    )
    for name, style in cut.items():
        if style == "vocabulary":
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=CONTEXT)
        elif style == "column":
            plan[name] = ColwiseParallel(input_layouts=CONTEXT, **(LOGITS if name == "head.linear" else {}))
        else:
            plan[name] = RowwiseParallel(output_layouts=CONTEXT)
    chain = parallel_chain(job, place, plan)
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    optimizer = models.make_optimizer(job, chain.parameters())
    return TensorTraining(job, place, chain, chain, Batches(job, 0, 1, place.device), optimizer)
