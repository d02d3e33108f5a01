"""Tensor with sequence parallelism: between the cut matrices, each rank keeps its part of the context only."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Tensor and sequence parallel",
    idea="Tensor parallel, and what lies between the cut matrices (norms, sums) is cut too: along the sequence.",
    steps=(
        Step("Matrix split", "Matrices are cut as in tensor parallel; what lies between them, along the sequence."),
        Step("Same batch", "Every rank loads the same batch and keeps its part of each sequence.", kinds=("load",)),
        Step(
            "Partial forward",
            "Norms and sums run on a rank's own tokens, a pair of matrices on all tokens with a part of the weights.",
            kinds=FORWARD,
        ),
        Step(
            "Gather of tokens",
            "An all-gather brings the tokens together before a pair of matrices.",
            kinds=("all_gather",),
            payload="activation",
        ),
        Step(
            "Sum and scatter",
            "A reduce-scatter adds the parts and leaves each rank its own tokens; the loss is summed by all-reduces.",
            kinds=("reduce_scatter", "all_reduce"),
            payload="activation",
        ),
        Step(
            "Backward",
            "In backward a reduce-scatter stands where the all-gather was, and the other way round.",
            kinds=(*BACKWARD, "all_gather", "reduce_scatter"),
            payload="gradient",
        ),
        Step(
            "Gradients of whole weights",
            "The gradients of norms, each of some tokens only, and of routers, each of a part of the experts, are "
            "all-reduced.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Update of shards", "Each rank updates its own shards.", kinds=("optimizer",)),
    ),
    use="Tensor parallel where activations fill the memory: long sequences, many layers.",
    limits="As many bytes travel as in tensor parallel; the degree must divide the heads and the context.",
)
