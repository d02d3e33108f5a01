"""Model parallelism by layers: each device holds a run of layers, and one device works at a time."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Model parallel by layers",
    idea="The model is cut into runs of layers, one a device; a batch goes through them one after the other.",
    steps=(
        "The model is split by layers; each device holds its piece.",
        "Forward: a device computes its piece and sends the activation on.",
        "The last device computes the loss.",
        "Backward: gradients of the activations travel the same way back.",
        "Each device updates its own piece.",
    ),
    use="The model does not fit on one device, and nothing better is at hand.",
    limits="All devices but one are idle at any time: no speed-up over one device.",
)
