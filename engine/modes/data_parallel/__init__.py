"""nn.DataParallel: one process drives all devices; weights are copied out and gradients copied back in every step."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Data parallel (nn.DataParallel)",
    idea="One process keeps the model on device 0 and lends copies of it to the other devices for each batch.",
    steps=(
        "Scatter: device 0 cuts the batch into equal parts and sends one to each device.",
        "Replicate: the weights are copied from device 0 to every device.",
        "Parallel apply: every device runs forward on its part, each from a thread of the one process.",
        "Gather: the outputs come back to device 0, which computes the loss.",
        "Backward runs on every device; gradients are summed on device 0.",
        "The optimizer updates the weights on device 0 alone.",
    ),
    use="A quick try on the GPUs of one machine, with one changed line. PyTorch itself advises DDP instead.",
    limits="One process and one machine; device 0 is the bottleneck; weights and gradients travel in every step.",
)
