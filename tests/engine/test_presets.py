"""Published models have the sizes that their authors give; they can be planned in every mode, and not run."""

from __future__ import annotations

import pytest

from engine.asking.rules import SpecError
from engine.asking.settings import MODE_MODELS, PLANNED_EXPERTS, PLANNED_SIZES
from engine.job import prepare, prepare_real
from engine.model.presets import PRESETS, family
from engine.predict import predict
from engine.spec import MODES, Spec

ROUNDED = 0.001  # how far a published number of parameters is from the number itself


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_were_published(name):
    job = prepare(Spec(mode="single", devices=1, model=name))
    assert job.num_params == pytest.approx(PRESETS[name].params, rel=ROUNDED)


def test_mixtral_computes_with_two_of_eight_experts():
    """12.9e9 parameters of 46.7e9 work for a token (Jiang et al. 2024, section 2): a forward pass takes two FLOPs of
    each, but of the embedding, and the scores of attention beside."""
    layers = prepare(Spec(mode="single", devices=1, model="mixtral_8x7b", context=4096)).layers
    scores = 32 * 2 * 2 * 4096**2 * 4096
    active = (sum(layer.flops for layer in layers) - scores) / 2 / 4096 + 32_000 * 4096
    assert active == pytest.approx(12.9e9, rel=0.005)


def test_a_deepseek_token_works_with_37_of_671_billion_parameters():
    layers = prepare(Spec(mode="single", devices=1, model="deepseek_v3")).layers
    scores = 61 * 2 * 2 * 4096**2 * 128 * (128 + 64 + 128) // 2
    active = (sum(layer.flops for layer in layers) - scores) / 2 / 4096 + 129_280 * 7168
    assert active == pytest.approx(37.5e9, rel=0.02)  # "37B activated" without the embedding


def test_a_module_that_predicts_a_second_token_is_a_block_more_and_the_head_once_more():
    """DeepSeek-V3's has 11.5e9 parameters of its own (README_WEIGHTS.md of deepseek-ai/DeepSeek-V3), and the model's
    embedding and head; its block is given two tokens' widths (arXiv:2412.19437, section 2.2)."""
    spec = Spec(mode="single", devices=1, model="deepseek_v3")
    without, ahead = (prepare(spec.with_(mtp=modules)) for modules in (None, 1))
    assert ahead.num_params - without.num_params == pytest.approx(11.5e9, rel=0.01)
    *_, block, head = without.layers
    *_, last, join, more, twice = ahead.layers
    assert (last, more.flops, twice.flops, twice.saved) == (block, block.flops, 2 * head.flops, 2 * head.saved)
    assert join.flops == 2 * 4096 * 7168 * 2 * 7168 and twice.kernels == 2 * head.kernels
    stages = {"mode": "hybrid", "devices": 4, "pp": 4, "dp": 1, "microbatches": 4, "global_batch": 4}
    staged = prepare(spec.with_(mtp=1, **stages))
    assert staged.num_params == ahead.num_params
    copy = staged.layers[-3].num_params - join.num_params
    assert copy == 129_280 * 7168  # of the embedding, on the last stage
    with pytest.raises(SpecError, match="tensor ranks"):
        prepare(spec.with_(mtp=1, mode="hybrid", devices=2, tp=2, dp=1, global_batch=4))


def test_grouped_queries_share_keys_and_a_gate_is_a_third_matrix():
    """Llama 3 8B: queries of 32 heads, keys and values of 8, of 128 numbers each; three matrices of 4096 x 14336."""
    block = prepare(Spec(mode="single", devices=1, model="llama3_8b")).layers[1]
    shapes = dict(block.params)
    assert shapes["qkv.weight"] == ((32 + 2 * 8) * 128, 4096)
    assert shapes["gate.weight"] == shapes["up.weight"] == (14_336, 4096)
    assert block.flops == 2 * 8192 * 4096 * (6144 + 4096 + 3 * 14_336) + 4 * 8192**2 * 4096


def test_a_tied_head_counts_once_and_is_held_twice_by_the_ends_of_a_pipeline():
    tied = {"model": "gpt", "tied": True, "vocabulary": 96, "dataset": "synthetic"}
    one, two = (prepare(Spec(**tied, **mode)) for mode in ({"mode": "ddp"}, {"mode": "pipeline"}))
    assert one.num_params == two.num_params
    held = [sum(layer.num_params for layer in job.layers) for job in (one, two)]
    assert held[1] - held[0] == 96 * 128


@pytest.mark.parametrize(("vocabulary", "ranks", "padded"), [(50_257, 1, 50_257), (50_257, 8, 51_200), (512, 8, 512)])
def test_a_vocabulary_is_padded_where_ranks_could_not_share_it(vocabulary, ranks, padded):
    """Megatron-LM makes a vocabulary of 50,257 tokens divisible by 128 times the 8 ranks: 51,200."""
    sizes = {"model": "gpt", "heads": 8, "vocabulary": vocabulary, "dataset": "synthetic"}
    assert prepare(Spec(mode="tensor", devices=ranks, **sizes)).layers[-1].output[-1] == padded


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_cannot_run(name):
    with pytest.raises(SpecError) as refused:
        prepare_real(Spec(mode="ddp", model=name))
    assert (refused.value.code, refused.value.setting) == ("planned_model", "model")
    assert refused.value.suggest == (family(name),)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "moe", "shared_experts": 1},
        {"model": "gpt", "kv_heads": 2},
        {"model": "gpt", "tied": False},
        {"model": "gpt", "precision": "fp16"},
    ],
)
def test_sizes_that_are_not_built_cannot_run(settings):
    assert prepare(Spec(**settings)).layers
    with pytest.raises(SpecError) as refused:
        prepare_real(Spec(**settings))
    assert (refused.value.code, refused.value.setting) == ("planned_model", list(settings)[-1])
    assert set(PLANNED_SIZES).isdisjoint(PLANNED_EXPERTS)


SMALL = {"global_batch": 8, "layers": 8, "context": 1024, "machine": "h100"}


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "deepseek_v3"])
@pytest.mark.parametrize("mode", MODES)
def test_a_preset_is_planned_in_every_mode_that_takes_it(mode, name):
    spec = Spec(mode=mode, devices=1 if mode == "single" else 4, model=name, **SMALL)
    if name not in MODE_MODELS.get(mode, (name,)):
        with pytest.raises(SpecError):
            prepare(spec)
        return
    prediction = predict(spec)
    assert 0 < prediction.step_time < 60
    assert prediction.job.item == 2
    if mode != "data_parallel":
        assert all(op.kernels for p in prediction.plan.programs for op in p.ops if op.kind == "forward" and op.flops)
