"""What experts cost: their products, beside ones that were measured, and exchanges, beside closed forms."""

from dataclasses import replace
from statistics import mean

import pytest

from engine.cost.catalogue import MACHINES
from engine.cost.collectives import EXCHANGE_RATE, collective_seconds
from engine.cost.contention import hidden
from engine.cost.kernels import Kernel, backward, matmul
from engine.cost.matmul import LAUNCHED_EACH, kernel_seconds
from engine.plan import Op
from engine.predict import predict
from engine.spec import Spec

B200 = MACHINES["b200"].at("bf16")
# MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json, group_matmul: experts, tokens of each, outputs, inputs;
# and of 2,250 TFLOP/s what was reached: forward, and by weights' gradients that are added up in fp32.
MEASURED = (
    (256, 128, 4096, 7168, 0.2081, 0.0775),
    (256, 128, 7168, 2048, 0.1782, 0.0801),
    (128, 256, 4096, 7168, 0.2714, 0.1473),
    (128, 256, 7168, 2048, 0.3035, 0.1409),
    (64, 512, 4096, 7168, 0.3670, 0.2192),
    (64, 512, 7168, 2048, 0.4274, 0.2145),
    (32, 1024, 4096, 7168, 0.4571, 0.2888),
    (32, 1024, 7168, 2048, 0.3842, 0.2744),
    (160, 154, 3072, 5120, 0.1997, 0.0937),
    (160, 154, 5120, 1536, 0.1158, 0.0828),
    (80, 308, 3072, 5120, 0.3868, 0.1616),
    (80, 308, 5120, 1536, 0.2350, 0.1780),
    (40, 616, 3072, 5120, 0.4618, 0.2579),
    (40, 616, 5120, 1536, 0.3258, 0.2723),
    (20, 1232, 3072, 5120, 0.5134, 0.3276),
    (20, 1232, 5120, 1536, 0.3974, 0.3198),
)


def of_experts(experts: int, tokens: int, outputs: int, inputs: int) -> Kernel:
    return matmul(tokens, outputs, inputs, 2)._replace(batch=experts)


def gradient_errors(machine=B200) -> list[float]:
    errors = []
    for *shape, _, reached in MEASURED:
        product = of_experts(*shape)
        (of_weight,) = (kernel for kernel in backward((product,), 1) if kernel.of_weight)
        measured = product.flops / (2250e12 * reached)
        errors.append(kernel_seconds(of_weight, machine) / measured - 1)
    return errors


def test_gradients_of_experts_take_as_long_as_was_measured():
    errors = gradient_errors()
    assert mean(map(abs, errors)) < 0.08


def test_gradients_that_were_hidden_behind_their_products_would_be_seen(monkeypatch):
    """Negative control: as products of one matrix are."""
    monkeypatch.setattr("engine.cost.matmul._multiplying", lambda kernel, machine: kernel.flops / machine.flop_rate)
    kernel_seconds.cache_clear()
    assert mean(gradient_errors()) < -0.3
    kernel_seconds.cache_clear()


def test_a_launch_for_each_expert_is_the_least():
    """160 products of 154 tokens took 1.49 ms, 9.3 us each; in one kernel they need what is read: 2.5 GB."""
    product = of_experts(160, 154, 5120, 1536)
    assert kernel_seconds(product, B200) == pytest.approx(160 * LAUNCHED_EACH + B200.op_overhead)
    fused = kernel_seconds(product, replace(B200, fused_experts=True))
    assert 2.5e9 / B200.memory_rate < fused < 0.5 * 160 * LAUNCHED_EACH


def test_rows_of_a_weights_gradient_are_as_wide_as_what_it_is_made_of():
    """154 tokens do not begin at multiples of 16 bytes, and need not: they are what is summed over."""
    one = matmul(154, 4096, 4096, 2)
    odd, even = (
        kernel_seconds(one._replace(m=4096, k=tokens, of_weight=True), B200) - B200.op_overhead for tokens in (154, 160)
    )
    assert odd == pytest.approx(even, rel=0.05)
    narrow = matmul(4096, 4095, 4096, 2)  # of these rows do begin elsewhere
    assert kernel_seconds(narrow, B200) > 3 * kernel_seconds(matmul(4096, 4096, 4096, 2), B200)


H100 = MACHINES["h100"]
TOKENS, WIDTH = 4096, 2 * 7168  # bytes of a token


def exchange(ranks: int, copies: int, once: bool) -> float:
    op = Op(kind="all_to_all", part="block1.dispatch", payload="tokens", axis="ep", bytes=TOKENS * copies * WIDTH)
    return collective_seconds(op, ranks, replace(H100, sent_once=copies if once else 0))


def test_an_exchange_in_a_node_sends_each_copy_once_at_the_rate_that_was_measured():
    """8 ranks: 7 of 8 parts leave."""
    took = exchange(8, 8, once=False) - H100.call_overhead - 7 * H100.link_chunk
    assert took == pytest.approx(7 / 8 * TOKENS * 8 * WIDTH / (EXCHANGE_RATE * H100.link_rate))


def test_a_token_of_many_copies_goes_to_a_device_once():
    """With one copy each there is nothing to spare, 7/8 leave; of ever more each device gets one of each token."""
    sizes = [
        (exchange(8, copies, once=True) - H100.call_overhead - 7 * H100.link_chunk) * H100.link_rate / (TOKENS * WIDTH)
        for copies in (1, 8, 64)
    ]
    assert sizes[0] == pytest.approx(7 / 8)
    assert sizes[1] == pytest.approx(7 * (1 - (7 / 8) ** 8))
    assert sizes[2] == pytest.approx(7, rel=1e-3)


def test_a_token_crosses_the_network_once_for_each_node_that_has_one_of_its_experts():
    """64 ranks in 8 nodes, 8 experts a token: it goes to 7 (1 - (7/8)^8) other nodes, 4.6, and each copy alone to 7."""
    (_, link), wait = H100.tiers[-1], H100.call_overhead + 7 * H100.link_chunk + 56 * H100.tiers[-1][1].chunk
    nodes = (exchange(64, 8, once=True) - wait) * link.rate / (TOKENS * WIDTH)
    assert nodes == pytest.approx(7 * (1 - (7 / 8) ** 8))
    each = (exchange(64, 8, once=False) - wait) * EXCHANGE_RATE * link.rate / (TOKENS * WIDTH)
    assert each == pytest.approx(7)


def waited(does: str, length: float) -> list[float]:
    """Of the exchanges (x) of a rank, each of some seconds; a forward pass (f) takes 1 s, a backward pass (b) 2."""
    kinds, seconds = does.split(), {"f": 1.0, "b": 2.0, "x": length}
    left = hidden([seconds[kind] for kind in kinds], *([kind == name for kind in kinds] for name in "xfb"))
    return [each for kind, each in zip(kinds, left, strict=True) if kind == "x"]


def test_what_is_waited_for_of_exchanges_beside_another_micro_batch():
    """From the first backward pass to the last forward pass 2 + 1 + 1 s are computed, and two exchanges go on."""
    both = "f x b x f x f x b x"
    assert waited(both, 1.0) == [1, 0, 0, 1, 1]
    assert waited(both, 4.0) == [4, 2, 2, 4, 4]  # 8 s beside 4
    assert waited("f x f x b x b x", 1.0) == [1, 1, 1, 1]  # no forward pass is left when the first backward begins


def test_a_step_is_as_much_shorter_as_its_exchanges_that_are_hidden():
    known = {"mode": "hybrid", "devices": 8, "ep": 8, "model": "qwen3_30b", "layers": 2, "global_batch": 64}
    spec = Spec(**known, accumulate=8, machine="b200", dp=1)
    plain, beside = (
        predict(spec, on=replace(MACHINES["b200"], overlaps_exchanges=overlaps)).step_time for overlaps in (False, True)
    )
    assert 0.5 * plain < beside < plain
