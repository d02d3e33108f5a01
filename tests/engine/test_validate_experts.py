"""Rows with experts: the shapes that their models' authors published, what recipes say, and what is counted."""

import pytest

from engine.cost.catalogue import MACHINES
from engine.job import prepare
from engine.model import chain
from engine.model.presets import PRESETS
from engine.predict import predict
from engine.spec import Spec
from engine.validate import flops
from engine.validate.metrics import peak_memory
from engine.validate.recipes import Recipe, recipe_of
from engine.validate.rows import Unusable
from engine.validate.spec_of import machine_of, predicted, spec_of
from tests.engine.test_validate_reading import case, row_of

SHAPE = dict.fromkeys(("layers", "hidden", "heads", "ffn", "kv_heads", "vocab", "activation", "tied_embeddings"))
ONE_NODE = {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "ep": 8, "zero": 1, "etp": None}


def named(name: str, layers: int | None = None, **changes):
    """A row that names its model, and says no more of it than its tokens."""
    model = SHAPE | {"arch": name, "seq_len": 4096, "layers": layers}
    return {
        "model": model,
        "parallel": ONE_NODE,
        "schedule": "none",
        "precision": "bf16",
        "recompute": "none",
    } | changes


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("DeepSeekV3", "deepseek_v3"),
        ("deepseek_v2", "deepseek_v2"),
        ("Qwen3_30B_a3B", "qwen3_30b"),
        ("Qwen3_235B_a22B", "qwen3_235b"),
        ("Kimi_K2", "kimi_k2"),
    ],
)
def test_a_model_that_a_row_names_has_its_published_shape(name, preset):
    found, sizes = case(**named(name)), PRESETS[preset].sizes
    assert (found.preset, found.layers, found.experts) == (preset, sizes["layers"], sizes["experts"])
    spec, _ = spec_of(found)
    assert (spec.model, spec.ep, spec.context, spec.share_optimizer) == (preset, 8, 4096, True)
    assert spec_of(case(**named(name, layers=4)))[0].layers == 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GPT OSS 120B", "window of tokens"),
        ("Nemotron_3_Nano", "Mamba"),
        ("DeepSeekV4 Flash", "gives no shape"),
        ("DeepSeek-V2-Lite", "gives no shape"),
    ],
)
def test_a_model_that_cannot_be_planned_says_why(name, why):
    with pytest.raises(Unusable, match=why):
        case(**named(name))


def test_simumax_has_one_block_without_experts():
    there = {"repo": "MooreThreads/SimuMax"}
    assert case(**named("deepseek_v3", 4)).dense_layers == 3
    found = case(**named("deepseek_v3", 4, source=there))
    assert found.dense_layers == 1 and any("source's script" in text for text in found.inferred)


RECIPES = {
    "26.02 container table": ("qwen3_235b", "gb200", 1, 1, Recipe(sends_once=True)),
    "26.06.01 container table": ("qwen3_235b", "gb200", 3, 1, Recipe(True, True, True)),
    "26.04.01 container table": ("deepseek_v3", "b200", 2, 1, Recipe(sends_once=True, overlaps=True)),
    "25.11 container table": ("qwen3_235b", "h100", 4, 1, Recipe(overlaps=True)),
    "25.09 container table": ("qwen3_30b", "b200", 1, 1, Recipe()),
}


@pytest.mark.parametrize("where", RECIPES)
def test_what_a_recipe_says_of_experts_depends_on_its_release(where):
    model, device, stages, micro, expected = RECIPES[where]
    assert recipe_of(f"NVIDIA-NeMo/Megatron-Bridge, {where}", model, device, "fp8", stages, micro) == expected
    assert recipe_of(f"another software, {where}", model, device, "fp8", stages, micro) == Recipe()


def test_a_recipe_decides_how_tokens_travel():
    bridge = {"source": {"repo": "NVIDIA-NeMo/Megatron-Bridge", "where": "26.06 container table"}, "precision": "MXFP8"}
    on = {"hardware": {"gpu": "GB200", "gpus_per_node": 4}}
    there = machine_of(case(**named("Qwen3_30B_a3B", **bridge, **on)))
    assert (there.sent_once, there.overlaps_exchanges, there.fused_experts) == (8, True, True)
    plain = machine_of(case(**named("Qwen3_30B_a3B", **on)))
    assert (plain.sent_once, plain.overlaps_exchanges, plain.fused_experts) == (0, False, False)


def test_deepseek_v3_predicts_a_second_token_where_its_recipe_does():
    bridge = {"source": {"repo": "NVIDIA-NeMo/Megatron-Bridge", "where": "26.02 container table"}}
    pipeline = {"parallel": ONE_NODE | {"pp": 2, "dp": 4, "ep": 4}, "schedule": "1F1B"}
    found = case(**named("DeepSeekV3", **bridge, **pipeline))
    spec, _ = spec_of(found)
    # 61 blocks: 31 and 30, the embedding, and the module, its block and the head.
    assert (found.mtp, spec.mtp, spec.split) == (1, 1, (32, 33))
    assert case(**named("DeepSeekV3", id="25.11_DeepSeekV3_(w/o_MTP)", **bridge)).mtp == 0
    assert case(**named("Kimi_K2", **bridge)).mtp == case(**named("DeepSeekV3")).mtp == 0
    beside = case(**named("DeepSeekV3", **bridge, parallel=ONE_NODE | {"tp": 2, "dp": 4, "ep": 4, "sp": True}))
    assert beside.mtp == 0 and any("second token" in text for text in beside.inferred)


def test_trays_of_four_are_of_a_rack_that_nvlink_joins():
    found = case(hardware={"gpu": "GB200", "gpus_per_node": 4})
    assert found.per_node == 72 and any("of a rack" in text for text in found.inferred)
    assert case(hardware={"gpu": "GB200", "gpus_per_node": 4, "nvlink_domain": 36}).per_node == 36
    assert case(hardware={"gpu": "B200", "gpus_per_node": 4}).per_node == 4


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_30b"])
def test_flops_of_a_step_are_those_of_the_layers_that_are_planned(name):
    """Three times the forward FLOPs of every layer, attention over the full square."""
    found = case(**named(name))
    layers = prepare(Spec(mode="single", devices=1, model=name, context=4096)).layers
    by_layers = 3 * found.global_batch * sum(layer.flops for layer in layers)
    assert flops.step_flops(found, recompute=False) == pytest.approx(by_layers, rel=1e-12)


# docs/b200/b200_release_v1.2_summary.md of MooreThreads/SimuMax: GiB that are allocated on the fullest of 8 B200s.
ALLOCATED = {
    ("deepseek_v2", 1): 45.63,
    ("deepseek_v2", 2): 44.70,
    ("deepseek_v3", 1): 104.30,
    ("deepseek_v3", 2): 114.0,
}
MOST = 0.03


@pytest.mark.parametrize(("name", "pp"), ALLOCATED)
def test_memory_of_experts_is_near_what_was_measured(name, pp):
    row = simumax(name, pp)
    measured = peak_memory(row_of(**row))
    assert predicted(case(**row)).memory / measured.value == pytest.approx(1, abs=MOST)


def test_each_rank_with_the_whole_state_of_what_is_alike_would_be_seen(monkeypatch):
    """Negative control: the state of all but experts lies on ranks with other experts too."""
    monkeypatch.setattr(chain, "_shared_out", lambda layers, spec: sum(layer.num_params for layer in layers))
    row = simumax("deepseek_v2", 1)
    found = case(**row)
    memory = max(predict(spec_of(found)[0], on=machine_of(found)).simulation.peak_memory)
    assert memory / peak_memory(row_of(**row)).value > 1 + 5 * MOST


def simumax(name: str, pp: int) -> dict:
    """Of 4 blocks, in 4 micro-batches of one sequence."""
    replicas = 8 // pp
    return named(
        name,
        4,
        source={"repo": "MooreThreads/SimuMax"},
        parallel=ONE_NODE | {"pp": pp, "dp": replicas, "ep": replicas},
        schedule="1F1B" if pp > 1 else "none",
        batch={"micro": 1, "global": 4 * replicas},
        hardware={"gpu": "B200-SXM-180GB", "gpus_per_node": 8, "intra": None},
        notes="cross-entropy fusion on (cef)",
        metrics=[{"name": "peak_allocated_GiB", "value": ALLOCATED[name, pp], "unit": "GiB"}],
    )


def test_machines_that_a_person_picks_send_each_copy():
    assert all(not found.sent_once and not found.overlaps_exchanges for found in MACHINES.values())
