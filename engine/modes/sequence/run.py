"""A job under torch's parallelize_module with SequenceParallel norms: outside pairs a rank has part of the context."""

from torch.distributed.device_mesh import DeviceMesh
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
from engine.modes.tensor.run import LOGITS, TensorTraining, parallel_chain, routed, styles_alone
from engine.modes.tensor.shards import PARTIAL, partial
from engine.real import models
from engine.real.data import Batches
from engine.real.training import Place

CONTEXT = Shard(1)  # of [N, context, hidden]


def training(job: Job, place: Place) -> TensorTraining:
    chain = parallel_chain(job, place, layouts(job))
    place.recorder.parts = lambda kind, layer: parts(job, kind, layer)
    optimizer = models.make_optimizer(job, chain.parameters())
    return TensorTraining(job, place, chain, chain, Batches(job, 0, 1, place.device), optimizer)


def layouts(job: Job, experts: DeviceMesh | None = None) -> dict[str, ParallelStyle]:
    """Module name -> how its parameters, and the tokens that come in and go out, lie on the ranks. `experts`: as of
    tensor ranks that have all tokens."""
    cut = styles_alone(job)
    if not cut:
        return {}
    norms = [f"{layer.name}.{name}" for layer in job.layers for name in partial(layer, sequences=True)]
    norms = [name for name in norms if name.split(".")[1] not in PARTIAL]
    # [context, hidden], which is whole on every rank, to this rank's part of the context
    own_places = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    plan: dict[str, ParallelStyle] = {"embed.position": own_places} | {norm: SequenceParallel() for norm in norms}
    plan |= routed(job, CONTEXT, experts)
    for name, style in cut:
        if style == "vocabulary":
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=CONTEXT)
        elif style == "column":
            plan[name] = ColwiseParallel(input_layouts=CONTEXT, **(LOGITS if name == "head.linear" else {}))
        else:
            plan[name] = RowwiseParallel(output_layouts=CONTEXT)
    return plan
