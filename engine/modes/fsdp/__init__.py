"""fully_shard (FSDP2, ZeRO-3): parameters, gradients and optimizer state in shards; layers gathered when needed."""

from engine.lessons import BACKWARD, FORWARD, OWN_BATCH, Lesson, Step

LESSON = Lesson(
    title="Fully sharded data parallel (FSDP, ZeRO-3)",
    idea="Every rank sees its own part of the batch and keeps a shard of every layer: a whole layer exists only while "
    "it computes.",
    steps=(
        Step("Sharding", "The rows of every parameter are shared out: each rank keeps a shard of every layer."),
        OWN_BATCH,
        Step(
            "Gather and forward",
            "A layer's weights are all-gathered, the layer computes, and they are freed.",
            kinds=("all_gather", *FORWARD),
            payload="weights",
            before="forward",
        ),
        Step(
            "Gather and backward",
            "The weights are all-gathered once more, the next layer's before this layer computes.",
            kinds=("all_gather", *BACKWARD),
            payload="weights",
            before="backward",
        ),
        Step(
            "Gradients to shards",
            "After a layer's backward each rank gets the average for its shard (reduce-scatter).",
            kinds=("reduce_scatter",),
            payload="gradient",
        ),
        Step(
            "Update of shards",
            "Every rank updates its own shard. No rank ever holds the whole model.",
            kinds=("optimizer",),
        ),
    ),
    use="The model, its gradients or its optimizer state do not fit on one device.",
    limits="All weights travel twice a step and all gradients once: half as much again as in DDP. One layer must fit.",
)
