"""Tensor with sequence parallelism: between the cut matrices, each rank keeps its part of the context only."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Tensor and sequence parallel",
    idea="Tensor parallel, and what lies between the cut matrices (norms, sums) is cut too: along the sequence.",
    steps=(
        "Every rank loads the same batch and keeps its part of each sequence.",
        "Each rank computes the norm of its own tokens.",
        "An all-gather brings the tokens together before a matrix that is cut by columns.",
        "After the matrix cut by rows, a reduce-scatter adds the parts and leaves each rank its own tokens.",
        "In backward a reduce-scatter stands where the all-gather was, and the other way round.",
        "The gradients of the norms' weights, each of some tokens only, are all-reduced.",
    ),
    use="Tensor parallel where activations fill the memory: long sequences, many layers.",
    limits="As many bytes travel as in tensor parallel; the degree must divide the heads and the context.",
)
