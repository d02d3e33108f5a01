"""nn.DataParallel: one process drives all devices; weights are copied out and gradients copied back in every step."""

from engine.lessons import PASSES, Lesson, Step

LESSON = Lesson(
    title="Data parallel (nn.DataParallel)",
    idea="One process keeps the model on device 0 and lends copies of it to the other devices for each batch.",
    steps=(
        Step("Data split", "Device 0 loads the batch and cuts it into equal parts, one a device.", kinds=("load",)),
        Step(
            "Model replication",
            "The weights are copied from device 0 to every device (replicate), in every step anew.",
            kinds=("broadcast",),
            payload="weights",
        ),
        Step(
            "Data assignment",
            "Each part goes to its device (scatter). PyTorch sends the parts first and the weights after them.",
            kinds=("scatter",),
            payload="batch",
        ),
        Step(
            "Independent computation",
            "Every device runs forward and backward on its part (parallel apply); outputs meet on device 0.",
            kinds=(*PASSES, "gather", "scatter"),
            payload=("activation", "gradient"),
        ),
        Step("Gradient aggregation", "The gradients of all parts are summed on device 0.", kinds=("reduce",)),
        Step("Update", "The optimizer updates the weights, on device 0 alone.", kinds=("optimizer",)),
    ),
    use="A quick try on the GPUs of one machine, with one changed line. PyTorch itself advises DDP instead.",
    limits="One process and one machine; device 0 is the bottleneck; weights and gradients travel in every step.",
)
