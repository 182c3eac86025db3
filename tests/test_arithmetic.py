"""Closed forms against what this project did not write: published counts, transformers, torch's FLOP counter.

``Cnn`` in a name is the number of a publicly reported bug whose right value the test holds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import tokenbytoken as tbt
import tokenbytoken.cost
from tokenbytoken.config import (
    AttentionConfig,
    DecoderConfig,
    LatentAttentionConfig,
    LayerConfig,
    MambaConfig,
    MoEConfig,
    RopeConfig,
    SwiGLUConfig,
)
from tokenbytoken.cost import (
    attention_intensity,
    cache_crossing,
    count_parameters,
    distinct_experts,
    footprint,
    max_batch,
    max_context,
    mtp_weights,
    pass_cost,
    prefill_crossing,
    recurrent_state,
    state_bytes,
    state_bytes_per_token,
    weight_bytes,
    weights,
)
from tokenbytoken.cost.recipes import recipes
from tokenbytoken.models import AttentionShape, published

CONFIGS = {name: config for name, config in published.items() if isinstance(config, DecoderConfig)}
K = 1024
READER = 128 * K



def one_column_more(config: DecoderConfig) -> tuple[int, int]:
    """The recurrent state as codebases keep it that hold four inputs of a convolution of four taps, and not three."""
    state = recurrent_state(config)
    assert state.convolution % 3 == 0
    return state.scan, state.convolution // 3 * 4


# --- parameters --------------------------------------------------------------------------------------

# Published totals, or totals of the released checkpoint, with what one token passes through.
COUNTS = {
    "llama-3.1-8b": (8_030_261_248, 8_030_261_248),
    "llama-3.1-70b": (70_553_706_496, 70_553_706_496),
    "llama-3.1-405b": (405_853_388_800, 405_853_388_800),
    "llama-3.2-1b": (1_235_814_400, 1_235_814_400),
    "llama-2-7b": (6_738_415_616, 6_738_415_616),
    "llama-2-70b": (68_976_648_192, 68_976_648_192),
    "smollm2-135m": (134_515_008, 134_515_008),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "deepseek-67b": (67_425_001_472, 67_425_001_472),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v2": (235_741_434_880, 21_375_800_320),
    "deepseek-v3": (671_026_419_200, 37_552_297_472),
    "jamba-v0.1": (51_570_323_328, 12_110_311_296),
    "jamba-1.5-mini": (51_570_323_328, 12_110_311_296),
    "jamba-1.5-large": (398_555_145_696, 94_149_338_592),
    "mamba-130m": (129_135_360, 129_135_360),
    "mamba-2.8b": (2_768_345_600, 2_768_345_600),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_c64_c65_counts(name: str) -> None:
    counted = count_parameters(CONFIGS[name])
    assert (counted.total, counted.active) == COUNTS[name]


def _reference(name: str) -> tuple[type, Any]:
    """(class, config) of the same model in transformers, from our config or from its own defaults."""
    import transformers as hf

    config = CONFIGS[name]
    mixer, feed_forward = config.layers[0].mixer, config.layers[0].feed_forward
    if name in ("mixtral-8x7b", "jamba-v0.1", "deepseek-v3", "mamba-130m"):
        kind, options = {
            "mixtral-8x7b": ("Mixtral", {}),
            "jamba-v0.1": ("Jamba", {}),
            "deepseek-v3": ("DeepseekV3", {}),
            "mamba-130m": ("Mamba", {"num_hidden_layers": 24}),
        }[name]
        return getattr(hf, f"{kind}ForCausalLM"), getattr(hf, f"{kind}Config")(**options)
    assert isinstance(mixer, AttentionConfig)
    assert isinstance(feed_forward, SwiGLUConfig)
    return hf.LlamaForCausalLM, hf.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        intermediate_size=feed_forward.intermediate_size,
        tie_word_embeddings=config.tie_embeddings,
    )


DENSE = [name for name in CONFIGS if name.startswith(("llama", "smollm")) or name == "deepseek-67b"]


@pytest.mark.parametrize("name", [*DENSE, "mixtral-8x7b", "deepseek-v3", "jamba-v0.1", "mamba-130m"])
def test_c64_counts_equal_transformers_on_the_meta_device(name: str) -> None:
    model_class, hf = _reference(name)
    with torch.device("meta"):
        model = model_class(hf)
    model.tie_weights()
    counted = count_parameters(CONFIGS[name])
    # transformers keeps the router biases of DeepSeek-V3 as buffers, which parameters() does not list
    assert counted.total == sum(p.numel() for p in model.parameters()) + counted.router_bias
    assert counted.router_bias == (58 * 256 if name == "deepseek-v3" else 0)


@pytest.mark.parametrize("name", DENSE)
def test_counts_equal_this_package_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = tbt.Decoder(CONFIGS[name])
    assert sum(p.numel() for p in model.parameters()) == count_parameters(CONFIGS[name]).total


def test_c64_a_tied_table_is_counted_once() -> None:
    tied = CONFIGS["llama-3.2-1b"]
    assert count_parameters(replace(tied, tie_embeddings=False)).total == 1_498_482_688
    counted = count_parameters(tied)
    assert counted.active_without_embedding == counted.active  # the head multiplies by all of it
    assert counted.active - counted.active_without_embedding_and_head == 128256 * 2048


def test_deepseek_v3_active_by_each_way_of_counting() -> None:
    counted = count_parameters(CONFIGS["deepseek-v3"])
    assert counted.active == 37_552_297_472
    assert counted.active - counted.router_bias == 37_552_282_624
    assert counted.active_without_embedding == 36_625_618_432
    assert f"{counted.active_without_embedding_and_head / 1e9:.2f}" == "35.70"


def test_the_layers_of_deepseek_v3() -> None:
    layer = [w for w in weights(CONFIGS["deepseek-v3"]) if w.layer == 60]
    attention = sum(w.area for w in layer if w.role == "attention" or w.name in ("q_a_norm", "kv_a_norm"))
    assert attention == 187_107_328
    assert sum(w.area for w in layer if w.role == "expert") == 44_040_192
    routed = sum(w.area * w.copies for w in weights(CONFIGS["deepseek-v3"]) if w.role == "expert")
    assert f"{routed / count_parameters(CONFIGS['deepseek-v3']).total:.1%}" == "97.4%"


def test_multi_token_prediction_completes_the_checkpoint() -> None:
    config = CONFIGS["deepseek-v3"]
    counted = count_parameters(config)
    assert counted.mtp == 11_610_068_224
    stored_again = 2 * config.vocab_size * config.hidden_size
    # numbers by dtype in the released safetensors: BF16, F8_E4M3, and float32 router biases of 59 layers
    assert counted.total + counted.mtp + stored_again == 3_918_786_560 + 680_571_043_840 + 59 * 256


def test_jamba_large_shares_that_confirm_its_inferred_width() -> None:
    found = weights(CONFIGS["jamba-1.5-large"])
    total = count_parameters(CONFIGS["jamba-1.5-large"]).total
    experts = sum(w.area * w.copies for w in found if w.role == "expert")
    dense = sum(w.area for w in found if w.role == "feed_forward")
    assert experts / total > 0.85  # "more than 85 %" in the paper
    assert (experts + dense) / total > 0.90  # "more than 90 %"


def test_sixteen_kv_heads_of_the_first_upload() -> None:
    def doubled(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.mixer, AttentionConfig)
        return replace(layer, mixer=replace(layer.mixer, num_kv_heads=16))

    config = CONFIGS["llama-3.1-405b"]
    config = replace(config, layers=tuple(doubled(layer) for layer in config.layers))
    assert count_parameters(config).total == 410_081_247_232
    assert state_bytes(config, 1, 256 * K) == 252 * 2**30  # the Jamba-1.5 paper's "252 GB"


# --- bytes of the weights ----------------------------------------------------------------------------


def test_c66_units() -> None:
    size = weight_bytes(CONFIGS["llama-3.1-8b"])
    assert size == 16_060_522_496
    assert (f"{size / 1e9:.2f} GB", f"{size / 2**30:.2f} GiB") == ("16.06 GB", "14.96 GiB")


def test_c65_memory_holds_all_parameters_not_the_active_ones() -> None:
    v3 = CONFIGS["deepseek-v3"]
    assert f"{weight_bytes(v3, 'fp8-all') / 1e9:.1f} {weight_bytes(v3, 'bf16') / 1e9:.1f}" == "671.0 1342.1"
    assert weight_bytes(v3, "fp32") == 4 * count_parameters(v3).total


def test_c25_int8_counts_scales_and_leaves_the_rest_alone() -> None:
    assert weight_bytes(CONFIGS["llama-3.1-8b"], "int8") == 6_979_321_856 + 4 * 1_376_256 + 2 * 1_050_939_392


def test_llama_405b_in_its_own_fp8() -> None:
    config = CONFIGS["llama-3.1-405b"]
    one_byte = 124 * 3 * 16384 * 53248  # all feed-forwards but the first and the last
    scales = 124 * (2 * 53248 + 16384)
    assert weight_bytes(config, "fp8-ffn") == one_byte + 4 * scales + 2 * (405_853_388_800 - one_byte)
    assert f"{weight_bytes(config, 'fp8-ffn') / 1e9:.0f}" == "487"
    assert f"{weight_bytes(config) / 1e9:.1f} GB, {weight_bytes(config) / 2**30:.0f} GiB" == "811.7 GB, 756 GiB"


def test_deepseek_v3_as_its_checkpoint_stores_it() -> None:
    # BF16, F8 and float32 numbers, and block scales, of the released safetensors
    stored = 2 * 3_918_786_560 + 680_571_043_840 + 4 * 59 * 256 + 4 * 41_540_496
    assert weight_bytes(CONFIGS["deepseek-v3"], "fp8-block") == stored
    assert f"{stored / 1e9:.1f}" == "688.6"


@pytest.mark.parametrize(("name", "gigabytes"), [("jamba-1.5-large", "427"), ("jamba-1.5-mini", "55")])
def test_jamba_experts_int8(name: str, gigabytes: str) -> None:
    config = CONFIGS[name]
    moved = sum(w.area * w.copies for w in weights(config) if w.role in ("expert", "feed_forward"))
    assert weight_bytes(config, "int8-experts") == 2 * count_parameters(config).total - moved
    assert f"{weight_bytes(config, 'int8-experts') / 1e9:.0f}" == gigabytes


def test_ragged_blocks_have_a_scale_too() -> None:
    smol = CONFIGS["smollm2-135m"]  # 576 = 4.5 x 128
    q, kv, ff = 5 * 5, 2 * 5, 12 * 5  # blocks of 576 x 576, 192 x 576, 1536 x 576
    linear = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    scales = 30 * (2 * q + 2 * kv + 3 * ff)
    assert weight_bytes(smol, "fp8-block") == linear + 4 * scales + 2 * (134_515_008 - linear)


def test_unknown_recipe_is_named() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'fp4'"):
        weight_bytes(CONFIGS["smollm2-135m"], "fp4")


# --- bytes of the state ------------------------------------------------------------------------------

PER_TOKEN = {
    "gpt-3": 4_718_592,
    "llama-3.1-405b": 516_096,
    "llama-3.1-70b": 327_680,
    "llama-3.1-8b": 131_072,
    "llama-2-70b": 327_680,
    "llama-2-7b": 524_288,
    "llama-3.2-1b": 32_768,
    "smollm2-135m": 23_040,
    "mixtral-8x7b": 131_072,
    "deepseek-67b": 389_120,
    "deepseek-v2-lite": 31_104,
    "deepseek-v2": 69_120,
    "deepseek-v3": 70_272,
    "jamba-v0.1": 16_384,
    "jamba-1.5-mini": 16_384,
    "jamba-1.5-large": 36_864,
    "mamba-130m": 0,
    "mamba-2.8b": 0,
    "falcon-7b": 8_192,
    "falcon-40b": 122_880,
}


@pytest.mark.parametrize("name", published)
def test_c60_c62_c63_state_per_token(name: str) -> None:
    assert state_bytes_per_token(published[name]) == PER_TOKEN[name]


def test_c60_c63_whole_contexts() -> None:
    gib = 2**30
    assert state_bytes(CONFIGS["llama-3.1-8b"], 1, 8 * K) == gib
    assert state_bytes(CONFIGS["llama-3.1-8b"], 1, READER) == 16 * gib
    assert state_bytes(CONFIGS["llama-3.1-405b"], 1, READER) == 63 * gib
    assert state_bytes(published["gpt-3"], 1, READER) == 576 * gib
    growing = [state_bytes_per_token(CONFIGS[f"jamba-{name}"]) * 256 * K for name in ("v0.1", "1.5-large")]
    assert growing == [4 * gib, 9 * gib]


def test_c61_the_saving_of_gqa_is_the_group_size() -> None:
    mixer = CONFIGS["llama-3.1-8b"].layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    assert (mixer.num_kv_heads, mixer.group_size) == (8, 4)
    shape = AttentionShape(name="mha", num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128)
    assert state_bytes_per_token(shape) == 4 * state_bytes_per_token(CONFIGS["llama-3.1-8b"])


def test_c11_head_dim_is_its_own_parameter() -> None:
    fields = {
        "model_type": "llama",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
    }
    assert state_bytes_per_token(DecoderConfig.from_hf(fields)) == 147_456


def test_the_93_per_cent_of_deepseek_v2() -> None:
    old, new = CONFIGS["deepseek-67b"], CONFIGS["deepseek-v2"]
    assert f"{1 - state_bytes_per_token(new) / state_bytes_per_token(old):.2%}" == "82.24%"
    assert f"{1 - state_bytes_per_token(new, 6 / 8) / state_bytes_per_token(old):.2%}" == "93.34%"


def test_recurrent_state_as_other_codebases_store_it_and_as_this_one_does() -> None:
    large = CONFIGS["jamba-1.5-large"]
    assert one_column_more(large) == (16_515_072, 4_128_768)
    assert sum(one_column_more(large)) * 2 / state_bytes_per_token(large) == 1120
    assert sum(one_column_more(CONFIGS["jamba-v0.1"])) * 2 / 16_384 == 560
    assert one_column_more(CONFIGS["mamba-2.8b"]) == (5_242_880, 1_310_720)
    kept = recurrent_state(large)
    assert kept == (16_515_072, 3 * 63 * 16384)
    assert state_bytes(large, 3, 0) == 3 * (4 * kept.scan + 2 * kept.convolution)
    assert state_bytes(published["falcon-7b"], 1, 0) == 0


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b"])
def test_state_equals_what_this_package_allocates(name: str) -> None:
    with torch.device("meta"):
        state = tbt.Decoder(CONFIGS[name]).new_state(3, 50)
    assert state_bytes(CONFIGS[name], 3, 50, bytes_per_element=4) == state.nbytes


# --- one pass ----------------------------------------------------------------------------------------

TINY: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "Mixtral": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "DeepseekV3": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    "Jamba": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
}


def _run(kind: str, batch: int, context: int, new_tokens: int) -> tuple[DecoderConfig, dict[str, int], Any]:
    """(our config, FLOPs by operation, cache) of one pass of a tiny model of transformers."""
    import transformers as hf

    config = getattr(hf, f"{kind}Config")(vocab_size=97, **TINY[kind])
    # Attention as two products and experts one by one: torch's counter knows no rule for the fused forms.
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(hf, f"{kind}ForCausalLM")(config).eval()
    tokens = torch.randint(97, (batch, context + new_tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(tokens[:, :context], use_cache=True).cache if context else None
        with FlopCounterMode(display=False) as counter:
            cache = model(tokens[:, context:], use_cache=True, cache=cache).cache
    counted = {str(op).removeprefix("aten."): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    return DecoderConfig.from_hf(config.to_dict()), counted, cache


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "DeepseekV3"])
@pytest.mark.parametrize(("batch", "context", "new_tokens"), [(1, 0, 7), (3, 0, 7), (2, 9, 1), (2, 9, 4)])
def test_flops_equal_torchs_counter_on_transformers(kind: str, batch: int, context: int, new_tokens: int) -> None:
    config, counted, _ = _run(kind, batch, context, new_tokens)
    # transformers always re-expands the latent cache
    cost = pass_cost(config, batch, context, new_tokens, logits="all", form="expanded")
    assert cost.flops_linear + cost.flops_head == counted["mm"]
    assert cost.flops_attention == counted["bmm"]
    assert cost.flops == counted["mm"] + counted["bmm"]


@pytest.mark.parametrize("kind", ["Mamba", "Jamba"])
def test_flops_of_mamba_layers(kind: str) -> None:
    batch, new_tokens = 2, 7
    config, counted, _ = _run(kind, batch, 0, new_tokens)
    cost = pass_cost(config, batch, 0, new_tokens, logits="all")
    assert cost.flops_linear + cost.flops_head == counted["mm"]
    state = recurrent_state(config)
    # Of the scan's six FLOPs torch's counter sees the two of C·h, which transformers writes as a product.
    assert counted["bmm"] - cost.flops_attention == 2 * batch * new_tokens * state.scan
    inner = state.convolution // 3
    # transformers pads the convolution by three columns and computes those as well
    assert counted["convolution"] == 2 * 4 * batch * (new_tokens + 3) * inner
    assert cost.flops_recurrence == batch * new_tokens * (6 * state.scan + 2 * 4 * inner)


@pytest.mark.parametrize("kind", TINY)
def test_state_equals_the_cache_of_transformers(kind: str) -> None:
    config, _, cache = _run(kind, 2, 0, 7)
    growing = constant = 0
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            constant += sum(t.numel() for t in (*layer.recurrent_states.values(), *layer.conv_states.values()))
        else:
            growing += layer.keys.numel() + layer.values.numel()
    assert 2 * 7 * state_bytes_per_token(config, 4) == 4 * growing
    assert 2 * sum(one_column_more(config)) == constant  # it keeps one column more than we do
    assert (growing > 0, constant > 0) == (kind != "Mamba", kind in ("Mamba", "Jamba"))


def test_c69_a_step_reads_the_weights_but_one_row_of_the_embedding() -> None:
    config = CONFIGS["llama-3.1-8b"]
    cost = pass_cost(config, 1, 0)
    assert cost.weight_bytes == 2 * count_parameters(config).active_without_embedding + 2 * 4096
    assert cost.state_bytes == 131_072
    assert pass_cost(config, 1, 0, logits="none").weight_bytes == cost.weight_bytes - 2 * 128256 * 4096
    many = pass_cost(config, 2, 0, 100_000)  # never more rows than the table has
    assert many.weight_bytes == weight_bytes(config)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_c69_intensity_is_about_the_batch(batch: int) -> None:
    assert pass_cost(CONFIGS["llama-3.1-8b"], batch, 0).intensity == pytest.approx(batch, rel=0.01)


def test_a_cached_token_is_moved_once_and_a_recurrent_state_twice() -> None:
    llama, mamba = CONFIGS["llama-3.1-8b"], CONFIGS["mamba-2.8b"]
    assert pass_cost(llama, 3, 10, 4).state_bytes == state_bytes(llama, 3, 14)  # 10 read, 4 written
    assert pass_cost(mamba, 3, 10, 4).state_bytes == 2 * state_bytes(mamba, 3, 14)  # read and written
    narrow = pass_cost(mamba, 3, 10, state_bytes_per_element=1, recurrent_bytes_per_element=2)
    assert narrow.state_bytes == state_bytes(mamba, 3, 14)  # half the bytes, twice


def test_tied_table_is_read_once() -> None:
    config = CONFIGS["smollm2-135m"]
    assert pass_cost(config, 1, 0).weight_bytes == weight_bytes(config)
    # without a head only the row that is looked up
    without = pass_cost(config, 1, 0, logits="none").weight_bytes
    assert without == weight_bytes(config) - 2 * 49152 * 576 + 2 * 576


def test_logits_set_the_rows_of_the_head() -> None:
    config = CONFIGS["smollm2-135m"]
    heads = [pass_cost(config, 2, 0, 10, logits=which).flops_head for which in ("all", "last", "none")]
    assert heads == [20 * 2 * 49152 * 576, 2 * 2 * 49152 * 576, 0]


def test_fp8_share_of_the_flops() -> None:
    config = CONFIGS["llama-3.1-405b"]
    assert pass_cost(config, 1, 0).flops_fp8 == 0
    assert pass_cost(config, 3, 0, recipe="fp8-ffn").flops_fp8 == 3 * 2 * 124 * 3 * 16384 * 53248
    everything = pass_cost(config, 3, 0, recipe="fp8-all")
    assert everything.flops_fp8 == everything.flops_linear + everything.flops_head
    assert pass_cost(CONFIGS["jamba-1.5-large"], 1, 0, recipe="int8-experts").flops_fp8 == 0  # widened first


@pytest.mark.parametrize(
    ("name", "tokens", "read"),
    [
        ("deepseek-v3", 1, "8.0"),
        ("deepseek-v3", 32, "163.3"),
        ("deepseek-v3", 128, "251.6"),
        ("jamba-1.5-large", 1, "2.0"),
        ("jamba-1.5-large", 32, "15.8"),
        ("mixtral-8x7b", 1, "2.0"),
        ("mixtral-8x7b", 32, "8.0"),
    ],
)
def test_distinct_experts(name: str, tokens: int, read: str) -> None:
    moe = next(layer.feed_forward for layer in CONFIGS[name].layers if isinstance(layer.feed_forward, MoEConfig))
    assert f"{distinct_experts(moe, tokens):.1f}" == read


def test_distinct_experts_equals_a_drawn_router() -> None:
    moe = MoEConfig(num_experts=16, experts_per_token=2, intermediate_size=1)
    generator = torch.Generator().manual_seed(0)
    choices = torch.rand(4000, 10, 16, generator=generator).topk(2).indices  # 4,000 passes of 10 tokens
    read = torch.zeros(4000, 16).scatter_(1, choices.reshape(4000, 20), 1.0).sum(1)
    assert read.mean().item() == pytest.approx(distinct_experts(moe, 10), abs=4 * read.std().item() / 4000**0.5)


def test_experts_read_by_a_pass() -> None:
    config = CONFIGS["deepseek-v3"]
    one, many = (pass_cost(config, n, 0, recipe="fp8-all") for n in (1, 100_000))
    assert one.weight_bytes == pytest.approx(count_parameters(config).active_without_embedding, rel=1e-5)
    assert many.weight_bytes == pytest.approx(weight_bytes(config, "fp8-all"), rel=0.01)


def test_causal_counts_the_pairs_that_the_mask_leaves() -> None:
    config = CONFIGS["llama-3.1-8b"]
    per_pair = 32 * 4 * 32 * 128
    for context, new in [(0, 5), (7, 1), (7, 5)]:
        seen = sum(context + t + 1 for t in range(new))
        assert pass_cost(config, 2, context, new, causal=True).flops_attention == 2 * per_pair * seen
        assert pass_cost(config, 2, context, new).flops_attention == 2 * per_pair * new * (context + new)


def test_latent_attention_absorbs_in_decode_and_expands_in_prefill() -> None:
    mixer = CONFIGS["deepseek-v3"].layers[0].mixer
    assert isinstance(mixer, LatentAttentionConfig)
    assert mixer.cheaper_form(4096, 1) == "absorbed"
    assert mixer.cheaper_form(0, 4096) == "expanded"
    config = CONFIGS["deepseek-v3"]
    for context, new in [(4096, 1), (0, 4096), (1000, 100)]:
        costs = {form: pass_cost(config, 1, context, new, form=form).flops for form in ("absorbed", "expanded")}
        assert pass_cost(config, 1, context, new).flops == min(costs.values())
    # one pair costs 2 (576 + 512) a head absorbed, 2 (192 + 128) expanded
    absorbed, expanded = (pass_cost(config, 1, 9, 1, form=form) for form in ("absorbed", "expanded"))
    assert (absorbed.flops_attention, expanded.flops_attention) == (61 * 10 * 128 * 2176, 61 * 10 * 128 * 640)


BAD_PASSES: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size must be a positive integer, not 0"),
    ({"context": -1}, "context must be an integer of at least 0, not -1"),
    ({"new_tokens": 0}, "new_tokens must be a positive integer, not 0"),
    ({"batch_size": 1.5}, "batch_size must be a positive integer, not 1.5"),
    ({"batch_size": True}, "batch_size must be a positive integer, not True"),
    ({"batch_size": np.True_}, "batch_size must be a positive integer"),
    ({"context": 4.0}, "context must be an integer of at least 0, not 4.0"),
    ({"context": "4"}, "context must be an integer of at least 0, not '4'"),
    ({"context": 2**64}, r"context must be below 2\^63"),
    ({"new_tokens": math.nan}, "new_tokens must be a positive integer, not nan"),
    ({"state_bytes_per_element": True}, "state_bytes_per_element must be a number above 0, not True"),
    ({"state_bytes_per_element": 1e308}, r"state_bytes_per_element must lie between 2\^-63 and 2\^63"),
    ({"recurrent_bytes_per_element": "4"}, "recurrent_bytes_per_element must be a number above 0, not '4'"),
    ({"config": "llama-3.1-8b"}, "the config must be a DecoderConfig, not 'llama-3.1-8b'"),
    ({"logits": "some"}, "logits must be"),
    ({"state_bytes_per_element": 0}, "state_bytes_per_element must be a number above 0"),
    ({"recurrent_bytes_per_element": -4}, "recurrent_bytes_per_element must be a number above 0"),
    ({"form": "merged"}, "form must be"),
    ({"recipe": "fp4"}, "unknown recipe"),
    ({"config": published["gpt-3"]}, "gpt-3 is known here by the shape"),
]


@pytest.mark.parametrize(("change", "message"), BAD_PASSES)
def test_bad_passes_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"config": CONFIGS["smollm2-135m"], "batch_size": 1, "context": 0}
    with pytest.raises(ValueError, match=message):
        pass_cost(**good | change)


NOT_A_SIZE = [True, -1, math.nan, math.inf, 1.5, "1", None]
NOT_A_WIDTH = [True, 0, -2, math.nan, math.inf, 1e308, "2", None, 2j]


@pytest.mark.parametrize("config", [CONFIGS["llama-3.1-8b"], CONFIGS["jamba-v0.1"]], ids=["llama", "jamba"])
def test_sizes_of_a_wrong_kind_are_refused_by_name(config: DecoderConfig) -> None:
    # The good call first: `True` equals 1, and a cache that took it for 1 would let it pass.
    calls: dict[str, Any] = {
        "batch_size": lambda n: (state_bytes(config, n, 8), max_context(config, 1e12, n)),
        "context": lambda n: (state_bytes(config, 1, n), max_batch(config, 1e12, n)),
        "new_tokens": lambda n: (pass_cost(config, 1, 8, n), attention_intensity(config, new_tokens=n)),
    }
    for name, call in calls.items():
        call(1)
        for bad in NOT_A_SIZE:
            with pytest.raises(ValueError, match=f"^{name} must be "):
                call(bad)
    no_configs: list[Any] = ["llama-3.1-8b", None, {}]
    for no_config in no_configs:
        for call in (state_bytes, lambda c, *_: max_context(c, 1e12), lambda c, *_: prefill_crossing(c)):
            with pytest.raises(ValueError, match="the config must be a DecoderConfig, not"):
                call(no_config, 1, 8)
    for bad in NOT_A_WIDTH:
        for call in (
            lambda b: state_bytes(config, 1, 8, b),
            lambda b: state_bytes_per_token(config, b),
            lambda b: max_batch(config, 1e12, 8, bytes_per_element=b),
            lambda b: max_context(config, 1e12, recurrent_bytes_per_element=b),
            lambda b: cache_crossing(config, bytes_per_element=b),
            lambda b: attention_intensity(config, bytes_per_element=b),
        ):
            with pytest.raises(ValueError, match=r"^(recurrent_)?bytes_per_element must "):
                call(bad)
    for bad in (True, -1, math.nan, math.inf, "80", None):
        for call in (lambda m: max_context(config, m), lambda m: max_batch(config, m, 8)):
            with pytest.raises(ValueError, match=r"^memory_bytes must be a number of at least 0"):
                call(bad)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, torch.tensor])
def test_integers_of_numpy_and_torch_count_as_integers(kind: Any) -> None:
    config = CONFIGS["llama-3.1-405b"]
    width: Any = np.float32(2)
    got = state_bytes(config, kind(7), kind(100), width)
    assert (type(got), got) == (int, state_bytes(config, 7, 100))
    assert pass_cost(config, kind(7), kind(100), kind(3)) == pass_cost(config, 7, 100, 3)
    assert max_batch(config, np.float64(1e13), kind(100)) == max_batch(config, 1e13, 100)
    # 32 bits of numpy would overflow here; a plain integer does not.
    large: Any = np.int32(2**20)
    assert state_bytes(config, large, large) == 2**40 * 516_096


# --- what fits, crossings, intensities ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "context", "batch"),
    [(24 * 2**30, 54_415, 6), (23_034 * 2**20, 43_312, 5), (15_360 * 2**20, 0, 0)],
)
def test_c67_what_fits(memory: int, context: int, batch: int) -> None:
    config = CONFIGS["llama-3.1-8b"]
    assert max_context(config, 0.9 * memory) == context
    assert max_batch(config, 0.9 * memory, 8192) == batch


def test_what_fits_at_the_edges() -> None:
    config, mamba = CONFIGS["smollm2-135m"], CONFIGS["mamba-2.8b"]
    exact = weight_bytes(config) + state_bytes(config, 2, 100)
    assert (max_context(config, exact, 2), max_context(config, exact - 1, 2)) == (100, 99)
    assert (max_batch(config, exact, 100), max_batch(config, exact - 1, 100)) == (2, 1)
    assert max_context(mamba, 16e9) == math.inf
    assert max_context(mamba, 1e9) == 0
    with pytest.raises(ValueError, match="no batch is too large"):
        max_batch(config, 1e9, 0)


@pytest.mark.parametrize(
    ("name", "recipe", "tokens"),
    [
        ("smollm2-135m", "bf16", 11_677),
        ("llama-2-7b", "bf16", 25_705),
        ("llama-3.2-1b", "bf16", 75_428),
        ("llama-3.1-8b", "bf16", 122_532),
        ("deepseek-67b", "bf16", 346_551),
        ("llama-3.1-70b", "bf16", 430_626),
        ("mixtral-8x7b", "bf16", 712_628),
        ("llama-3.1-405b", "bf16", 1_572_783),
        ("jamba-1.5-mini", "bf16", 6_295_205),
        ("deepseek-v3", "fp8-all", 9_548_987),
        ("jamba-1.5-large", "bf16", 21_623_001),
    ],
)
def test_cache_crossing(name: str, recipe: str, tokens: int) -> None:
    assert math.floor(cache_crossing(CONFIGS[name], recipe) + 0.5) == tokens


def test_readers_at_which_the_cache_outweighs_the_weights() -> None:
    assert f"{cache_crossing(CONFIGS['llama-3.1-405b']) / READER:.1f}" == "12.0"
    assert cache_crossing(CONFIGS["llama-3.1-8b"]) < READER  # before the first reader's end
    assert cache_crossing(CONFIGS["mamba-2.8b"]) == math.inf


def test_prefill_crossing() -> None:
    names = ("smollm2-135m", "llama-3.1-8b", "llama-3.1-405b", "deepseek-v3", "jamba-1.5-large")
    tokens = {name: prefill_crossing(CONFIGS[name]) for name in names}
    assert [math.floor(n) for n in tokens.values()] == [6_144, 53_248, 194_560, 28_574, 1_262_808]
    assert prefill_crossing(CONFIGS["mamba-2.8b"]) == math.inf
    for name, n in tokens.items():
        for length, longer in ((math.floor(0.999 * n), False), (math.ceil(1.001 * n), True)):
            cost = pass_cost(CONFIGS[name], 1, 0, length, causal=True)
            assert (cost.flops_attention > cost.flops_linear + cost.flops_recurrence) == longer
        assert prefill_crossing(CONFIGS[name], causal=False) == n / 2


@pytest.mark.parametrize(
    ("name", "flops_a_byte"),
    [
        ("llama-2-7b", "1.0"),
        ("smollm2-135m", "3.0"),
        ("llama-3.1-8b", "4.0"),
        ("llama-3.1-70b", "8.0"),
        ("jamba-1.5-large", "8.0"),
        ("llama-3.1-405b", "16.0"),
        ("falcon-7b", "71.0"),
        ("deepseek-v2-lite", "30.2"),
        ("deepseek-v3", "241.8"),
        ("mamba-2.8b", "0.8"),
    ],
)
def test_attention_intensity(name: str, flops_a_byte: str) -> None:
    assert f"{attention_intensity(published[name]):.1f}" == flops_a_byte


def test_intensities_of_other_forms() -> None:
    v3 = CONFIGS["deepseek-v3"]
    assert f"{attention_intensity(v3, new_tokens=2):.1f}" == "483.6"
    assert attention_intensity(v3, form="expanded") == 1.0
    assert attention_intensity(CONFIGS["llama-3.1-8b"], bytes_per_element=1) == 8.0
    assert attention_intensity(CONFIGS["jamba-v0.1"].layers[0].mixer) == 0.75


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3", "jamba-1.5-large"])
def test_intensity_is_the_limit_of_a_long_step(name: str) -> None:
    config, context = CONFIGS[name], 10**8
    attention_only = replace(config, layers=tuple(x for x in config.layers if not isinstance(x.mixer, MambaConfig)))
    cost = pass_cost(attention_only, 1, context)
    assert cost.flops_attention / cost.state_bytes == pytest.approx(attention_intensity(config))


# --- properties --------------------------------------------------------------------------------------

counts = st.integers(1, 6)


@st.composite
def mixers(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["attention", "latent", "mamba"]))
    if kind == "attention":
        kv_heads = draw(counts)
        return AttentionConfig(
            num_heads=kv_heads * draw(counts), num_kv_heads=kv_heads, head_dim=draw(counts), bias=draw(st.booleans())
        )
    if kind == "latent":
        rope_dim = 2 * draw(counts)
        return LatentAttentionConfig(
            num_heads=draw(counts),
            q_lora_rank=draw(st.none() | counts),
            kv_lora_rank=draw(counts),
            qk_nope_head_dim=draw(counts),
            qk_rope_head_dim=rope_dim,
            v_head_dim=draw(counts),
            rope=RopeConfig(dim=rope_dim),
        )
    return MambaConfig(inner_size=draw(counts), state_size=draw(counts), conv_size=draw(counts), dt_rank=draw(counts))


@st.composite
def feed_forwards(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["none", "dense", "experts"]))
    if kind == "none":
        return None
    if kind == "dense":
        return SwiGLUConfig(intermediate_size=draw(counts), bias=draw(st.booleans()))
    experts = draw(counts)
    return MoEConfig(
        num_experts=experts,
        experts_per_token=draw(st.integers(1, experts)),
        intermediate_size=draw(counts),
        shared_intermediate_size=draw(st.integers(0, 4)),
        selection_bias=draw(st.booleans()),
    )


@st.composite
def decoders(draw: st.DrawFn) -> DecoderConfig:
    layer = st.builds(LayerConfig, mixer=mixers(), feed_forward=feed_forwards())
    return DecoderConfig(
        vocab_size=draw(st.integers(1, 50)),
        hidden_size=draw(st.integers(1, 20)),
        layers=tuple(draw(st.lists(layer, min_size=1, max_size=5))),
        tie_embeddings=draw(st.booleans()),
    )


@given(decoders())
@settings(max_examples=60, deadline=None)
def test_counts_are_ordered(config: DecoderConfig) -> None:
    counted = count_parameters(config)
    assert counted.total >= counted.active >= counted.active_without_embedding
    assert counted.active_without_embedding > counted.active_without_embedding_and_head >= 0
    assert (counted.mtp, mtp_weights(config)) == (0, ())
    assert weight_bytes(config, "bf16") == 2 * counted.total
    for recipe in recipes:
        assert counted.total <= weight_bytes(config, recipe) or recipe in ("fp8-all", "packed")


@given(decoders(), st.integers(1, 5), st.integers(0, 30), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_a_batch_costs_as_many_flops_as_its_rows_and_reads_the_weights_once(
    config: DecoderConfig, batch: int, context: int, new_tokens: int
) -> None:
    one, many = pass_cost(config, 1, context, new_tokens), pass_cost(config, batch, context, new_tokens)
    assert many.flops == batch * one.flops
    assert many.state_bytes == batch * one.state_bytes
    whole = weight_bytes(config)
    assert one.weight_bytes <= many.weight_bytes <= whole + 1  # an expected number of experts is rounded to a byte


@given(decoders(), st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_chunks_cost_what_the_whole_costs(config: DecoderConfig, context: int, chunks: list[int]) -> None:
    whole = pass_cost(config, 1, context, sum(chunks), logits="all", causal=True, form="absorbed")
    starts = [context + sum(chunks[:i]) for i in range(len(chunks))]
    parts = [
        pass_cost(config, 1, start, chunk, logits="all", causal=True, form="absorbed")
        for start, chunk in zip(starts, chunks, strict=True)
    ]
    assert sum(part.flops for part in parts) == whole.flops


@given(decoders(), st.integers(1, 4), st.integers(0, 10**7))
@settings(max_examples=100, deadline=None)
def test_what_fits_fits_and_one_more_does_not(config: DecoderConfig, batch: int, memory: int) -> None:
    size = footprint(config)
    context = max_context(config, memory, batch)
    if context == math.inf:
        assert state_bytes_per_token(config) == 0
    elif size.weights + batch * size.per_sequence > memory:
        assert context == 0
    else:
        assert isinstance(context, int)
        assert weight_bytes(config) + state_bytes(config, batch, context) <= memory
        assert weight_bytes(config) + state_bytes(config, batch, context + 1) > memory


@given(decoders(), st.integers(0, 50), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_auto_takes_the_cheaper_form(config: DecoderConfig, context: int, new_tokens: int) -> None:
    absorbed, expanded, auto = (
        pass_cost(config, 1, context, new_tokens, form=form).flops for form in ("absorbed", "expanded", "auto")
    )
    assert auto <= min(absorbed, expanded)  # below both, where layers of different shapes choose differently
    if len({layer.mixer for layer in config.layers}) == 1:
        assert auto == min(absorbed, expanded)
