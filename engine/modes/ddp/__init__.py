"""DistributedDataParallel: a replica a rank, gradients all-reduced in buckets while backward goes on."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Distributed data parallel (DDP)",
    idea="Every rank holds the whole model and sees its own part of the batch; gradients are averaged over ranks.",
    steps=(
        "The sampler gives each rank its own part of the batch.",
        "Each rank runs forward on its part.",
        "Backward makes gradients from the last layer to the first; full buckets are all-reduced meanwhile.",
        "When the last bucket has arrived, every rank holds the same averaged gradients.",
        "Every rank takes the same optimizer step, so the replicas stay equal.",
    ),
    use="The model fits on one device, and you want more samples a second.",
    limits="Each rank keeps everything: weights, gradients, optimizer state. All gradients travel once a step.",
)
