"""One device: the reference that every other mode is compared with."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Single device",
    idea="One device holds the whole model and sees the whole batch.",
    steps=(
        "Load a batch.",
        "Forward: every layer in turn, keeping its activations.",
        "Backward: every layer in reverse, making gradients.",
        "The optimizer updates the weights.",
    ),
    use="The model and its activations fit on one device, and one device is fast enough.",
    limits="Memory and speed of one device.",
)
