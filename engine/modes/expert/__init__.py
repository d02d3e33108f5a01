"""Expert parallelism: the experts of each block are shared out over the ranks, and tokens travel to them and back."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Expert parallel",
    idea="Every rank sees its own part of the batch and holds some of the experts; a token travels to the ranks that "
    "hold the experts its router chose, and its outputs travel back.",
    steps=(
        Step(
            "Data and experts",
            "Each rank loads its part of the batch; it holds some experts of every block, and all the rest.",
            kinds=("load",),
        ),
        Step(
            "Routing",
            "After attention a router picks k experts for each token; the ranks exchange how many will come.",
            kinds=("all_to_all", *FORWARD),
            payload="control",
            part=("embed", ".attention", ".counts", "head"),
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
            "Gradients travel to the experts and back; an expert's own is divided by the number of ranks, and stays.",
            kinds=("all_to_all", *BACKWARD),
            payload="gradient",
        ),
        Step(
            "Average",
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
