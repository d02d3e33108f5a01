"""Context parallelism: each sequence is dealt out to the ranks, and attention brings its keys and values together."""

from engine.modes import Lesson

LESSON = Lesson(
    title="Context parallel",
    idea="Every rank holds the whole model and some tokens of every sequence; only attention needs what others hold.",
    steps=(
        "Each rank gets its part of every sequence: one run of tokens, or an early chunk and a late one (head-tail).",
        "Embedding, norms, matrices and loss work on a rank's own tokens, each at its place in the whole sequence.",
        "Ring: keys and values go round from rank to rank; each attends to what it has while the next is on its way.",
        "The partial results are merged by the log-sum-exp of their scores; blocks that lie in the future are skipped.",
        "All-gather: every rank gathers all keys and values. Ulysses: two all-to-alls exchange tokens for heads.",
        "In backward the gradients of keys and values travel back to their rank; "
        "weight gradients are averaged over all.",
    ),
    use="Sequences too long for the memory of one device.",
    limits="Under a causal mask late tokens see more: with one run of tokens each, 4 ranks attend to 1:2:3:4 blocks, "
    "and all wait for the last; head-tail makes them equal. Ulysses goes up to the number of heads.",
)
