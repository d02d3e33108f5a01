"""A mesh of several axes: replicas, shards, tensor ranks and pipeline stages at once."""

from engine.lessons import PASSES, Lesson, Step
from engine.plan import FLAT

LESSON = Lesson(
    title="Hybrid: several parallelisms on one mesh",
    idea="Devices form a grid with an axis for each parallelism; every layer is cut along some axes, and every batch "
    "along others.",
    steps=(
        Step(
            "A mesh of axes",
            "The degrees multiply to the number of devices. Tensor ranks lie closest, stages furthest apart.",
        ),
        Step(
            "Cut of the model",
            "Stages take layers, ep ranks experts, tensor ranks parts of all matrices, or experts whole (expert-tp 1); "
            "fsdp ranks share what is left.",
        ),
        Step(
            "Data assignment",
            "Each replica, of dp, fsdp and ep alike, loads its part of the batch, and each rank of cp its tokens of "
            "every sequence; a pipeline cuts it into microbatches.",
            kinds=("load",),
        ),
        Step(
            "Layers gathered",
            "A layer is all-gathered along fsdp; in a pipeline it then stays whole until the step ends.",
            kinds=("all_gather",),
            payload="weights",
        ),
        Step(
            "Passes and sums",
            "Each rank computes its part, and tensor ranks add their parts up by all-reduces along tp; with "
            "sequences parallel too, by reduce-scatters, and gather tokens again.",
            kinds=(*PASSES, "all_reduce", "reduce_scatter", "all_gather"),
            axis="tp",
        ),
        Step(
            "Handing on",
            "Activations go to the next stage along pp, keys and values round along cp, or tokens to their experts "
            "along ep, and along tp where its ranks have them whole; gradients go back.",
            kinds=("send", "recv", "all_to_all"),
        ),
        Step(
            "Gradients to shards",
            "Gradients add up over microbatches, then are reduce-scattered along fsdp, once a step.",
            kinds=("reduce_scatter",),
            payload="gradient",
            axis="fsdp",
        ),
        Step(
            "Average over replicas",
            "Each shard of gradients is averaged with its like in the other replicas, along dp and cp, and so are "
            "experts; what every rank of ep has, over all ranks.",
            kinds=("all_reduce",),
            payload="gradient",
            axis=("dp", "cp", "ep", *FLAT),
        ),
        Step("Update", "Every rank updates its own shard.", kinds=("optimizer",)),
    ),
    use="Models and clusters so large that one axis does not suffice: tp within a node, fsdp and pp between nodes.",
    limits="Each degree has the limits of its own parallelism, and their products must fit: heads by tp, layers by pp, "
    "the batch by dp, fsdp, ep and microbatches, experts by ep.",
)
