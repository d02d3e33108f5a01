"""Expert parallelism: the experts of each block are shared out over the ranks, and tokens travel to them and back."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Expert parallel",
    idea="Every rank sees its own part of the batch and holds some of the experts; a token travels to the ranks that "
    "hold the experts its router chose, and its outputs travel back.",
    steps=(
        Step("Experts shared out", "Each rank holds some of the experts; all the rest is whole on every rank."),
        Step("Data assignment", "Each rank loads its own part of the batch.", kinds=("load",)),
        Step(
            "Attention and router",
            "The router chooses each token's top k experts, and ranks tell each other how many tokens will come.",
            kinds=(*FORWARD, "all_to_all"),
            payload="control",
        ),
        Step(
            "Dispatch",
            "An all-to-all takes every token to the ranks of its experts.",
            kinds=("all_to_all",),
            payload="tokens",
            part="dispatch",
        ),
        Step(
            "Experts",
            "Each expert computes the tokens that it was given, whoever sent them: many, few or none.",
            kinds=FORWARD,
            part="experts",
        ),
        Step(
            "Combine",
            "A second all-to-all brings the outputs back; each token adds up its own, weighted by probability.",
            kinds=("all_to_all",),
            payload="tokens",
            part="combine",
        ),
        Step(
            "Backward",
            "Backward mirrors it: gradients of the outputs go to the experts, those of the tokens come back.",
            kinds=(*BACKWARD, "all_to_all"),
            payload="gradient",
        ),
        Step(
            "Gradient aggregation",
            "All-reduced as in DDP, but for the experts': those have met the tokens of all ranks already.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Update", "Each rank updates its experts, and its copy of all the rest.", kinds=("optimizer",)),
    ),
    use="Models with many experts: they can be much larger than one device, and a token computes with only k of them.",
    limits="Two all-to-alls a block in forward and two in backward, and nothing can be computed meanwhile. A rank "
    "whose experts are popular computes while the others wait.",
)
