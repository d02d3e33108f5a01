"""fully_shard on a mesh of two axes (HSDP): shards within a group of ranks, replicas across groups."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Hybrid sharded data parallel (HSDP)",
    idea="Ranks form groups. Within a group the model is sharded as in FSDP; every group is a replica of the others.",
    steps=(
        "The mesh has two axes: dp counts the replicas, fsdp the ranks that share one.",
        "Forward and backward gather each layer within the group alone.",
        "After a layer's backward its gradients are reduce-scattered within the group.",
        "Each shard of gradients is then all-reduced with the same shard in the other replicas.",
        "Every rank updates its own shard, and equal shards stay equal.",
    ),
    use="Many nodes: a group is a node with fast links, and only gradient shards travel between nodes.",
    limits="A rank holds more than in FSDP over all ranks: the model divided by the group, not by all devices.",
)
