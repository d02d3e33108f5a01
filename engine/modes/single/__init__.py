"""One device: the reference that every other mode is compared with."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Single device",
    idea="One device holds the whole model and sees the whole batch.",
    steps=(
        Step("Load", "The device loads a batch.", kinds=("load",)),
        Step("Forward", "Every layer computes in turn and keeps its activations.", kinds=FORWARD),
        Step("Backward", "Every layer in reverse makes the gradients of its weights.", kinds=BACKWARD),
        Step("Update", "The optimizer updates the weights.", kinds=("optimizer",)),
    ),
    use="The model and its activations fit on one device, and one device is fast enough.",
    limits="Memory and speed of one device.",
)
