"""DistributedDataParallel: a replica a rank, gradients all-reduced in buckets while backward goes on."""

from engine.lessons import OWN_BATCH, PASSES, Lesson, Step

LESSON = Lesson(
    title="Distributed data parallel (DDP)",
    idea="Every rank holds the whole model and sees its own part of the batch; gradients are averaged over ranks.",
    steps=(
        Step(
            "Data split",
            "A sampler cuts every batch into equal parts, one a rank: no sample is in two of them.",
            payload="batch",
        ),
        Step("Model replication", "Every rank holds the whole model, with the weights that rank 0 began with."),
        OWN_BATCH,
        Step(
            "Independent computation",
            "Each rank runs forward and backward on its part, with no word from the others.",
            kinds=PASSES,
        ),
        Step(
            "Gradient aggregation",
            "Full buckets of gradients are averaged over the ranks (all-reduce) while backward goes on.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step(
            "Update",
            "Every rank takes the same step with the same gradients, so the replicas stay equal.",
            kinds=("optimizer",),
        ),
    ),
    use="The model fits on one device, and you want more samples a second.",
    limits="Each rank keeps everything: weights, gradients, optimizer state. All gradients travel once a step.",
)
