"""Expert parallelism: the experts of each block are shared out over the ranks, and tokens travel to them and back."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Expert parallel",
    idea="Every rank sees its own part of the batch and holds some of the experts; a token travels to the ranks that "
    "hold the experts its router chose, and its outputs travel back.",
    steps=(
        Step("Experts shared out", "Each rank holds a run of every block's experts, and all the rest of the model."),
        Step("Data assignment", "Each rank loads its own part of the batch.", kinds=("load",)),
        Step(
            "Attention and routing",
            "After attention the router gives each token a probability for every expert; it goes to the top k.",
            kinds=FORWARD,
            part=("embed", ".attention", "head"),
        ),
        Step(
            "Token counts",
            "The ranks tell each other how many tokens are on the way to each expert.",
            kinds=("all_to_all",),
            payload="control",
        ),
        Step(
            "Dispatch",
            "An all-to-all takes every token to the ranks of its experts.",
            kinds=("all_to_all", *FORWARD),
            payload="tokens",
            part=".dispatch",
        ),
        Step(
            "Experts",
            "Each expert computes the tokens that it was given, whoever sent them: many, few or none.",
            kinds=FORWARD,
            part=".experts",
        ),
        Step(
            "Combine",
            "A second all-to-all brings the outputs back; each token adds up its own, by probability.",
            kinds=("all_to_all", *FORWARD),
            payload="tokens",
            part=".combine",
        ),
        Step(
            "Backward",
            "Outputs' gradients go to the experts, tokens' come back. An expert has met the tokens of all ranks: its "
            "gradient is divided by their number, and stays.",
            kinds=("all_to_all", *BACKWARD),
            payload="gradient",
        ),
        Step(
            "Gradient aggregation",
            "The gradients of all the rest are averaged over the ranks (all-reduce), as in DDP.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Update", "Each rank updates its experts, and its copy of all the rest.", kinds=("optimizer",)),
    ),
    use="Models with many experts: they can be much larger than one device, and a token computes with only k of them.",
    limits="Two all-to-alls a block in forward and two in backward, and nothing can be computed meanwhile. A rank "
    "whose experts are popular computes while the others wait.",
)
