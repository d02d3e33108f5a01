"""ZeroRedundancyOptimizer over DDP (ZeRO-1): each rank keeps the optimizer state of its own part of the parameters."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Sharded optimizer state (ZeRO-1)",
    idea="As in DDP, every rank holds the whole model; but each parameter has one owner, who alone keeps its optimizer "
    "state and updates it.",
    steps=(
        "Parameters are dealt out, the largest first, each to the rank that owns least so far.",
        "Forward and backward run as in DDP: gradients are all-reduced in buckets.",
        "Every rank updates only the parameters that it owns.",
        "Each owner broadcasts its updated parameters, so that all ranks are equal again.",
    ),
    use="Optimizer state is what does not fit: AdamW's is twice as large as the weights.",
    limits="Weights and gradients stay whole on every rank. The broadcasts come after the update, with no compute to "
    "hide behind.",
)
