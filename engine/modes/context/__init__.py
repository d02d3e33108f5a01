"""Context parallelism: each sequence is dealt out to the ranks, and attention brings its keys and values together."""

from engine.lessons import BACKWARD, FORWARD, Lesson, Step

LESSON = Lesson(
    title="Context parallel",
    idea="Every rank holds the whole model and some tokens of every sequence; only attention needs what others hold.",
    steps=(
        Step(
            "Deal of the context",
            "Each sequence is cut over ranks: one run of tokens each, or an early chunk and a late one (head-tail).",
            payload="batch",
        ),
        Step("Own tokens", "Each rank loads its own tokens of every sequence of the batch.", kinds=("load",)),
        Step(
            "Forward of own tokens",
            "Each rank computes its own tokens, each at its place in the sequence. Partial attentions are merged by "
            "the log-sum-exp of their scores; blocks that lie in the future are skipped.",
            kinds=FORWARD,
        ),
        Step(
            "Exchange for attention",
            "Ring: keys and values go round, the next while a rank attends to those it has; in backward once more. "
            "All-gather: all keys and values on every rank. Ulysses: two all-to-alls exchange tokens for heads.",
            kinds=("send", "all_gather", "all_to_all"),
            payload="activation",
        ),
        Step("Backward", "From the last layer to the first, with the same blocks of attention.", kinds=BACKWARD),
        Step(
            "Gradients of keys and values",
            "What each rank found for the keys and values of others is summed on its way back to their rank.",
            kinds=("send", "reduce_scatter", "all_to_all"),
            payload="gradient",
        ),
        Step(
            "Gradient averaging",
            "Every rank has seen other tokens: the gradients of the weights are averaged, in DDP's buckets.",
            kinds=("all_reduce",),
            payload="gradient",
        ),
        Step("Update", "Every rank takes the same step, so the replicas stay equal.", kinds=("optimizer",)),
    ),
    use="Sequences too long for the memory of one device.",
    limits="Under a causal mask late tokens see more: with one run of tokens each, 4 ranks attend to 1:2:3:4 blocks, "
    "and all wait for the last; head-tail makes them equal. Ulysses goes up to the number of heads.",
)
