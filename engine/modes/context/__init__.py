"""Context parallelism: each sequence is dealt out to the ranks, and attention brings its keys and values together."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Context parallel",
    idea="Every rank holds the whole model and some tokens of every sequence; only attention needs what others hold.",
    steps=(
        Step("Model replication", "Every rank holds the whole model; it is the sequences that are dealt out."),
        Step(
            "Tokens dealt out",
            "Each rank gets its part of every sequence: one run of tokens, or an early and a late chunk (head-tail).",
            kinds=("load",),
        ),
        Step(
            "Own tokens",
            "Each rank computes its own tokens; parts of attention are merged by log-sum-exp, the future is skipped.",
            kinds=FORWARD,
        ),
        Step(
            "Keys and values",
            "They go round a ring while ranks compute, or are all-gathered; Ulysses trades tokens for heads instead.",
            kinds=("send", "all_gather", "all_to_all"),
            payload="activation",
        ),
        Step("Backward", "Backward goes the same ways, on each rank's own tokens.", kinds=BACKWARD),
        Step(
            "Gradients return",
            "The gradients of keys and values travel back to the rank whose tokens they are of.",
            kinds=("send", "reduce_scatter", "all_to_all"),
            payload="gradient",
        ),
        Step(
            "Gradient aggregation",
            "The gradients of the weights, each of some tokens only, are averaged over all ranks (all-reduce).",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Update", "Every rank takes the same step, so the replicas stay equal.", kinds=("optimizer",)),
    ),
    use="Sequences too long for the memory of one device.",
    limits="Under a causal mask late tokens see more: with one run of tokens each, 4 ranks attend to 1:2:3:4 blocks, "
    "and all wait for the last; head-tail makes them equal. Ulysses goes up to the number of heads.",
)
