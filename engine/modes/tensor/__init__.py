"""Tensor parallelism: each layer's matrices are cut, by columns and then by rows, and every rank computes a part."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Tensor parallel",
    idea="The matrices of each layer are cut over the devices; all see the whole batch and compute a part of it.",
    steps=(
        Step(
            "Matrix split",
            "The first matrix of a pair is cut by columns, the second by rows; attention by heads, the vocabulary too.",
        ),
        Step("Same batch", "Every rank loads the same batch.", kinds=("load",)),
        Step(
            "Partial forward",
            "Each rank multiplies with what it holds of a pair, and gets a part of a sum.",
            kinds=FORWARD,
        ),
        Step(
            "Sum of outputs",
            "An all-reduce adds the parts, so that every rank has the layer's whole output.",
            kinds=("all_reduce",),
            payload="activation",
        ),
        Step("Partial backward", "Backward mirrors it, on the same parts of the matrices.", kinds=BACKWARD),
        Step(
            "Sum of gradients",
            "An all-reduce adds the parts of the gradient of a pair's input, and of a router's, before experts.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Update of shards", "Each rank updates its own shards.", kinds=("optimizer",)),
    ),
    use="Layers too large for one device, on devices of one node with fast links between them.",
    limits="Two all-reduces a block in forward and two in backward, and nothing can be computed meanwhile; "
    "at most as many devices as attention heads.",
)
