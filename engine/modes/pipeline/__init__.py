"""A pipeline: stages on devices, microbatches following each other through them."""

from engine.lessons import PASSES, Lesson, Step

LESSON = Lesson(
    title="Pipeline parallel",
    idea="The model is cut into stages, one a device or several; microbatches follow each other through them.",
    steps=(
        Step("Stage split", "The model is split into stages, one a device or, in some schedules, several."),
        Step(
            "Data transfer",
            "The batch comes in as microbatches; activations travel on from stage to stage, and gradients back.",
            kinds=("load", "send"),
        ),
        Step(
            "Pipelined execution",
            "A stage computes a microbatch, then the next one: different stages work at the same time.",
            kinds=PASSES,
        ),
        Step(
            "Merging of results",
            "Each stage has added up the gradients of all microbatches: one update, as if the batch had come whole.",
            kinds=("optimizer",),
        ),
    ),
    use="The model does not fit on one device, and links are slow: only activations at the cuts travel.",
    limits="Filling and draining leave a bubble: (P-1)/(M+P-1) of the time with P stages and M microbatches (GPipe, "
    "1F1B). Several stages a device, or a backward in two halves, make it smaller, for more messages or more memory.",
)
