"""fully_shard that keeps what it gathered until backward is done (ZeRO-2)."""

from engine.lessons import BACKWARD, FORWARD, OWN_BATCH, Lesson, Step

LESSON = Lesson(
    title="Sharded gradients and optimizer state (ZeRO-2)",
    idea="As in FSDP, but a layer that was gathered in forward stays whole until its backward is done.",
    steps=(
        Step("Sharding", "The rows of every parameter are shared out: each rank keeps a shard of every layer."),
        OWN_BATCH,
        Step(
            "Gather and forward",
            "Each layer's weights are all-gathered, the layer computes, and the weights are kept for backward.",
            kinds=("all_gather", *FORWARD),
            payload="weights",
        ),
        Step("Backward", "Backward finds every layer whole: nothing is gathered again.", kinds=BACKWARD),
        Step(
            "Gradients to shards",
            "After a layer's backward each rank gets the average for its shard (reduce-scatter); the layer is freed.",
            kinds=("reduce_scatter",),
            payload="gradient",
        ),
        Step("Update of shards", "Every rank updates its own shard.", kinds=("optimizer",)),
    ),
    use="The weights fit on one device, but not with gradients and optimizer state beside them.",
    limits="As much traffic as DDP, but at the end of forward every rank holds all weights.",
)
