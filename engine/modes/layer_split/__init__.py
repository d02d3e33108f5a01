"""Model parallelism by layers: each device holds a run of layers, and one device works at a time."""

from engine.lessons import PASSES, Lesson, Step

LESSON = Lesson(
    title="Model parallel by layers",
    idea="The model is cut into runs of layers, one a device; a batch goes through them one after the other.",
    steps=(
        Step("Model split", "The model is cut into pieces: runs of layers that follow each other."),
        Step("Assignment to devices", "Each device holds one piece, and no other's weights."),
        Step(
            "Communication",
            "The batch comes in, activations go from device to device, and their gradients come back the same way.",
            kinds=("load", "send"),
        ),
        Step(
            "Computation of each piece",
            "A device computes its piece when its input is there: forward, and later backward.",
            kinds=PASSES,
        ),
        Step(
            "Parameter synchronisation",
            "All pieces take the step of the same batch, each on its device: no weights have to travel.",
            kinds=("optimizer",),
        ),
    ),
    use="The model does not fit on one device, and nothing better is at hand.",
    limits="All devices but one are idle at any time: no speed-up over one device.",
)
