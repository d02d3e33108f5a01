"""ZeroRedundancyOptimizer over DDP (ZeRO-1): each rank keeps the optimizer state of its own part of the parameters."""

from engine.lessons import OWN_BATCH, PASSES, Lesson, Step

LESSON = Lesson(
    title="Sharded optimizer state (ZeRO-1)",
    idea="As in DDP, every rank holds the whole model; but each parameter has one owner, who alone keeps its optimizer "
    "state and updates it.",
    steps=(
        Step("Owners", "Each parameter is dealt to one rank, the largest first, to the rank that owns least so far."),
        OWN_BATCH,
        Step("Computation", "Each rank runs forward and backward on its part, as in DDP.", kinds=PASSES),
        Step(
            "Gradient aggregation",
            "Buckets of gradients are averaged over the ranks (all-reduce), as in DDP.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Owners' update", "Every rank updates only the parameters that it owns.", kinds=("optimizer",)),
        Step(
            "Weights to all",
            "Each owner broadcasts its updated parameters, so that all ranks are equal again.",
            kinds=("broadcast",),
            payload="weights",
        ),
    ),
    use="Optimizer state is what does not fit: AdamW's is twice as large as the weights.",
    limits="Weights and gradients stay whole on every rank. The broadcasts come after the update, with no compute to "
    "hide behind.",
)
