"""fully_shard that keeps what it gathered until backward is done (ZeRO-2)."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Sharded gradients and optimizer state (ZeRO-2)",
    idea="As in FSDP, but a layer that was gathered in forward stays whole until its backward is done.",
    steps=(
        "Each rank keeps a shard of every layer between steps, and sees its own part of the batch.",
        "Forward: each layer's weights are all-gathered, and kept.",
        "Backward: nothing needs to be gathered again.",
        "After a layer's backward its gradients are reduce-scattered to the shards, and its whole weights are freed.",
        "Every rank updates its own shard.",
    ),
    use="The weights fit on one device, but not with gradients and optimizer state beside them.",
    limits="As much traffic as DDP, but at the end of forward every rank holds all weights.",
)
