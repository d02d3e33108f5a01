"""Tensor parallelism: each layer's matrices are cut, by columns and then by rows, and every rank computes a part."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Tensor parallel",
    idea="The matrices of each layer are cut over the devices; all see the whole batch and compute a part of it.",
    steps=(
        "Every rank loads the same batch.",
        "The first matrix of a pair is cut by columns: each rank computes some of its outputs. "
        "Attention is cut by heads.",
        "The second is cut by rows: each rank multiplies what it has, and gets a part of a sum.",
        "An all-reduce adds the parts, so that every rank has the layer's whole output.",
        "Backward mirrors it: an all-reduce adds the parts of the gradient of the pair's input.",
        "Each rank updates its own shards.",
    ),
    use="Layers too large for one device, on devices of one node with fast links between them.",
    limits="Two all-reduces a block in forward and two in backward, and nothing can be computed meanwhile; "
    "at most as many devices as attention heads.",
)
