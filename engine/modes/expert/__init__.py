"""Expert parallelism: the experts of each block are shared out over the ranks, and tokens travel to them and back."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Expert parallel",
    idea="Every rank sees its own part of the batch and holds some of the experts; a token travels to the ranks that "
    "hold the experts its router chose, and its outputs travel back.",
    steps=(
        "Each rank loads its own part of the batch and computes attention: all but the experts is whole on every rank.",
        "The router gives every token a probability for each expert; the token goes to the top k.",
        "The ranks tell each other how many tokens are on the way to each expert.",
        "Dispatch: an all-to-all takes every token to the ranks of its experts.",
        "Each expert computes the tokens that it was given, whoever sent them: many, few or none.",
        "Combine: a second all-to-all brings the outputs back, and each token adds up its own, by probability.",
        "Backward mirrors it: the gradients of the outputs go to the experts, those of the tokens come back.",
        "An expert's gradient has met the tokens of all ranks: it is divided by the number of ranks and travels no "
        "further. All other gradients are all-reduced, as in DDP.",
        "Each rank updates its experts, and its copy of all the rest.",
    ),
    use="Models with many experts: they can be much larger than one device, and a token computes with only k of them.",
    limits="Two all-to-alls a block in forward and two in backward, and nothing can be computed meanwhile. A rank "
    "whose experts are popular computes while the others wait.",
)
