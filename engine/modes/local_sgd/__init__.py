"""Local SGD: every rank trains alone, and now and then all average their weights."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Local SGD",
    idea="Every rank holds the whole model and trains it alone on its own part of the batch; every k steps the ranks "
    "average their weights.",
    steps=(
        "The sampler gives each rank its own part of the batch.",
        "Each rank runs forward and backward on its part, and updates its own weights: nothing is sent.",
        "Step by step the replicas drift apart, each towards what its own samples ask for.",
        "After every k-th step all weights are averaged in one all-reduce, and all replicas are equal again.",
    ),
    use="Links are slow, and gradients every step would cost more than the steps themselves.",
    limits="It is not the same training as on one device: gradients are taken at different weights, the more so the "
    "larger k is. Each rank keeps everything, and its optimizer state is never averaged.",
)
