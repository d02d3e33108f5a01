"""Local SGD: every rank trains alone, and now and then all average their weights."""

from engine.lessons import OWN_BATCH, PASSES, Lesson, Step

LESSON = Lesson(
    title="Local SGD",
    idea="Every rank holds the whole model and trains it alone on its own part of the batch; every k steps the ranks "
    "average their weights.",
    steps=(
        Step("Model replication", "Every rank holds the whole model, from the same first weights."),
        OWN_BATCH,
        Step(
            "Computation alone",
            "Each rank runs forward and backward on its part. Its gradients stay its own: nothing is sent.",
            kinds=PASSES,
        ),
        Step(
            "Update alone",
            "Each rank updates its own weights. Step by step the replicas drift apart, each towards its own samples.",
            kinds=("optimizer",),
        ),
        Step(
            "Average",
            "After every k-th step all weights are averaged in one all-reduce, and all replicas are equal again.",
            kinds=("all_reduce",),
            payload="weights",
        ),
    ),
    use="Links are slow, and gradients every step would cost more than the steps themselves.",
    limits="It is not the same training as on one device: gradients are taken at different weights, the more so the "
    "larger k is. Each rank keeps everything, and its optimizer state is never averaged.",
)
