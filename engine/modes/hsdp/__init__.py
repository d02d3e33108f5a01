"""fully_shard on a mesh of two axes (HSDP): shards within a group of ranks, replicas across groups."""

from engine.lessons import BACKWARD, FORWARD, OWN_BATCH, Lesson, Step

LESSON = Lesson(
    title="Hybrid sharded data parallel (HSDP)",
    idea="Ranks form groups. Within a group the model is sharded as in FSDP; every group is a replica of the others.",
    steps=(
        Step(
            "Groups",
            "Ranks form groups that share a replica: the mesh axis fsdp runs within a group, dp across groups.",
        ),
        OWN_BATCH,
        Step(
            "Gather and forward",
            "A layer's weights are all-gathered within the group, the layer computes, and they are freed.",
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
            "After a layer's backward each rank gets its group's average for its shard (reduce-scatter).",
            kinds=("reduce_scatter",),
            payload="gradient",
        ),
        Step(
            "Average over replicas",
            "Each shard of gradients is averaged with the same shard of the other groups (all-reduce).",
            kinds=("all_reduce",),
            payload="gradient",
            axis="dp",
        ),
        Step(
            "Update of shards", "Every rank updates its own shard, and equal shards stay equal.", kinds=("optimizer",)
        ),
    ),
    use="Many nodes: a group is a node with fast links, and only gradient shards travel between nodes.",
    limits="A rank holds more than in FSDP over all ranks: the model divided by the group, not by all devices.",
)
