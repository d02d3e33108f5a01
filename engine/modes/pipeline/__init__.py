"""A pipeline: stages on devices, microbatches following each other through them."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Pipeline parallel",
    idea="The model is cut into stages, one a device or several; microbatches follow each other through them.",
    steps=(
        "The model is split into stages, one a device or, in some schedules, several.",
        "The batch is cut into microbatches.",
        "A stage computes a microbatch and sends the activation on, then takes the next: stages work at the same time.",
        "Gradients travel back, microbatch by microbatch, and add up in each stage.",
        "When all microbatches are done, each stage updates its own weights.",
    ),
    use="The model does not fit on one device, and links are slow: only activations at the cuts travel.",
    limits="Filling and draining leave a bubble: (P-1)/(M+P-1) of the time with P stages and M microbatches (GPipe, "
    "1F1B). Several stages a device, or a backward in two halves, make it smaller, for more messages or more memory.",
)
