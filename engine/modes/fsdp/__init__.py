"""fully_shard (FSDP2, ZeRO-3): parameters, gradients and optimizer state in shards; layers gathered when needed."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Fully sharded data parallel (FSDP, ZeRO-3)",
    idea="Every rank sees its own part of the batch and keeps a shard of every layer: a whole layer exists only while "
    "it computes.",
    steps=(
        "The rows of every parameter are shared out over the ranks: each keeps its shard of every layer.",
        "Forward: a layer's weights are all-gathered, the layer computes, and the gathered weights are freed.",
        "Backward: the weights are all-gathered once more, the next layer's before this layer computes.",
        "After a layer's backward its gradients are reduce-scattered: each rank gets the averages for its own shard.",
        "Every rank updates its own shard. No rank ever holds the whole model.",
    ),
    use="The model, its gradients or its optimizer state do not fit on one device.",
    limits="All weights travel twice a step and all gradients once: half as much again as in DDP. One layer must fit.",
)
