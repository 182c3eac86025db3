"""Reading config.json: what transformers writes comes through, what cannot be represented is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tokenbytoken as tbt
from tokenbytoken.config import AttentionConfig, LatentAttentionConfig, MambaConfig, MoEConfig, SwiGLUConfig

LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "vocab_size": 97, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 2}
MIXTRAL = {**LLAMA, "model_type": "mixtral"}


def attention(config: tbt.DecoderConfig) -> AttentionConfig:
    """The mixer of the first layer."""
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


def read(base: dict[str, Any], **changes: Any) -> tbt.DecoderConfig:
    merged = {**base, **changes}
    return tbt.DecoderConfig.from_hf({name: value for name, value in merged.items() if value != "absent"})


def test_llama_in_both_spellings() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    old = read(LLAMA, rope_theta=5e5, rope_scaling=scaling)
    new = read(LLAMA, rope_parameters={"rope_theta": 5e5, **scaling})
    assert old == new
    mixer = new.layers[1].mixer
    assert isinstance(mixer, AttentionConfig)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.group_size, mixer.head_dim) == (4, 2, 2, 16)
    assert mixer.rope == tbt.RopeConfig(
        dim=16, theta=5e5,
        scaling=tbt.Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192),
    )  # fmt: skip
    assert new.layers[0].feed_forward == SwiGLUConfig(intermediate_size=96)
    assert attention(read(LLAMA, num_key_value_heads="absent")).num_kv_heads == 4  # MHA where nothing is said
    assert attention(read(LLAMA, head_dim=32)).head_dim == 32


@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "MixtralConfig", "DeepseekV2Config",
                                  "DeepseekV3Config", "JambaConfig", "MambaConfig"])  # fmt: skip
def test_what_transformers_writes_is_read(name: str) -> None:
    import transformers

    given: dict[str, dict[str, Any]]
    given = {"MistralConfig": {"sliding_window": None}, "DeepseekV2Config": {"num_experts_per_tok": 6}}
    theirs = getattr(transformers, name)(**given.get(name, {}))
    config = tbt.DecoderConfig.from_hf(theirs.to_dict())
    assert config.num_layers == theirs.num_hidden_layers
    assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert config.tie_embeddings == theirs.tie_word_embeddings


def test_deepseek_v3() -> None:
    config = read(DEEPSEEK, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 1.0})  # fmt: skip
    mixer = config.layers[0].mixer
    assert isinstance(mixer, LatentAttentionConfig)
    assert mixer.rope.interleaved
    assert mixer.rope.scaling == tbt.YarnScaling(
        factor=40, original_max_positions=16, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=1
    )
    assert isinstance(config.layers[0].feed_forward, SwiGLUConfig)  # C46: the first layer is dense
    moe = config.layers[1].feed_forward
    assert moe == MoEConfig(
        num_experts=8, experts_per_token=3, intermediate_size=16, shared_intermediate_size=32, scoring="sigmoid",
        normalize=True, scale=2.5, num_groups=4, groups_kept=2, group_score="top2_sum", selection_bias=True,
    )  # fmt: skip


def test_deepseek_v2_groups_only_where_its_method_says_so() -> None:
    greedy = read(DEEPSEEK, model_type="deepseek_v2", topk_method="greedy").layers[1].feed_forward
    limited = read(DEEPSEEK, model_type="deepseek_v2", topk_method="group_limited_greedy").layers[1].feed_forward
    assert isinstance(greedy, MoEConfig)
    assert isinstance(limited, MoEConfig)
    assert (greedy.num_groups, greedy.normalize, greedy.scoring) == (1, False, "softmax")
    assert (limited.num_groups, limited.groups_kept, limited.group_score) == (4, 2, "max")


@pytest.mark.parametrize("config", [read(JAMBA), tbt.published["jamba-v0.1"]], ids=["defaults", "published"])
def test_c55_jamba_layers(config: tbt.DecoderConfig) -> None:
    attention = [i for i, layer in enumerate(config.layers) if isinstance(layer.mixer, AttentionConfig)]
    experts = [i for i, layer in enumerate(config.layers) if isinstance(layer.feed_forward, MoEConfig)]
    assert attention == [4, 12, 20, 28]
    assert experts == list(range(1, 32, 2))
    assert sum(isinstance(layer.mixer, MambaConfig) for layer in config.layers) == 28
    first, fifth = config.layers[0].mixer, config.layers[4].mixer
    assert isinstance(fifth, AttentionConfig)
    assert fifth.rope is None  # C56: no rotation
    assert isinstance(first, MambaConfig)
    assert first.inner_norms


@pytest.mark.parametrize(("hidden", "rank"), [(32, 2), (40, 3), (4096, 256)])
def test_c59_dt_rank_rounds_up(hidden: int, rank: int) -> None:
    jamba = read(JAMBA, hidden_size=hidden, mamba_dt_rank="auto")
    for config in (jamba, read(MAMBA, hidden_size=hidden, time_step_rank="auto")):
        mixer = config.layers[0].mixer
        assert isinstance(mixer, MambaConfig)
        assert mixer.dt_rank == rank


REFUSED = [
    (LLAMA, {"model_type": "gemma2"}, "model_type 'gemma2'"),
    (LLAMA, {"vocab_size": "absent"}, "vocab_size is missing"),
    (LLAMA, {"num_hidden_layers": "absent"}, "num_hidden_layers is missing"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (LLAMA, {"num_attention_heads": 3, "num_key_value_heads": 2}, "no multiple of num_attention_heads"),
    (LLAMA, {"num_attention_heads": 4, "num_key_value_heads": 3}, r"num_heads \(4\).*num_kv_heads \(3\)"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
    (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    (LLAMA, {"model_type": ["llama"]}, r"model_type \['llama'\]"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads must be a positive integer, not 0"),
    (LLAMA, {"head_dim": 16.0}, "head_dim must be a positive integer, not 16.0"),
    (LLAMA, {"vocab_size": True}, "vocab_size must be a positive integer, not True"),
    (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
    (LLAMA, {"attention_bias": 1}, "attention_bias must be true or false, not 1"),
    (LLAMA, {"mlp_bias": []}, r"mlp_bias must be true or false, not \[\]"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, not '1e-5'"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, not nan"),
    (LLAMA, {"max_position_embeddings": "4096"}, "max_position_embeddings must be a positive integer, not '4096'"),
    (LLAMA, {"layer_types": 3}, "layer_types = 3"),
    (LLAMA, {"rope_theta": "1e4"}, "rope_theta must be a number, not '1e4'"),
    (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling must map names to values, not be 'llama3'"),
    (LLAMA, {"rope_parameters": [8.0]}, r"rope_parameters must map names to values, not be \[8.0\]"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"rope_parameters\.full_attention = "),
    (LLAMA, {"rope_parameters": {"rope_theta": [1e4]}}, r"rope_parameters\.rope_theta must be a number"),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": "4", "original_max_position_embeddings": 32}},
        r"rope_scaling\.factor must be a number, not '4'",
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32.5}},
        r"rope_scaling\.original_max_position_embeddings must be a positive integer, not 32.5",
    ),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.rope_type = 'dynamic'"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor is missing"),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({**LLAMA, "model_type": "mistral"}, {"sliding_window": 4096}, "sliding_window = 4096"),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window = 4096"),
    (DEEPSEEK, {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),  # C39
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    (DEEPSEEK, {"n_shared_experts": -1}, "n_shared_experts must be an integer of at least 0, not -1"),
    (DEEPSEEK, {"first_k_dense_replace": 1.0}, "first_k_dense_replace must be an integer of at least 0, not 1.0"),
    (DEEPSEEK, {"routed_scaling_factor": "2.5"}, "routed_scaling_factor must be a number, not '2.5'"),
    (DEEPSEEK, {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, not 'yes'"),
    (DEEPSEEK, {"qk_rope_head_dim": "8"}, "qk_rope_head_dim must be a positive integer, not '8'"),
    (DEEPSEEK, {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, not 0"),
    (DEEPSEEK, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer of at least 0, not -1"),
    (JAMBA, {"attn_layer_period": 0}, "attn_layer_period must be a positive integer, not 0"),
    (JAMBA, {"mamba_dt_rank": "large"}, "mamba_dt_rank must be a positive integer, not 'large'"),
    (MAMBA, {"expand": 1.5}, "expand must be a positive integer, not 1.5"),
    (MAMBA, {"use_bias": 0}, "use_bias must be true or false, not 0"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ({**DEEPSEEK, "model_type": "deepseek_v2"}, {"norm_topk_prob": True}, "norm_topk_prob = True"),
    (DEEPSEEK, {"n_group": 3}, "num_groups"),
    (DEEPSEEK, {"num_experts_per_tok": 5}, "experts_per_token"),
    (JAMBA, {"sliding_window": 128}, "sliding_window = 128"),
    (MAMBA, {"intermediate_size": 81}, "intermediate_size = 81"),
    (MAMBA, {"hidden_act": "relu"}, "hidden_act = 'relu'"),
]


@pytest.mark.parametrize(("base", "changes", "words"), REFUSED)
def test_what_cannot_be_represented_is_refused(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    read(base)  # the unchanged one is fine
    with pytest.raises(ValueError, match=words):
        read(base, **changes)


def test_null_is_a_missing_field() -> None:
    nulls = {
        "tie_word_embeddings": None, "rope_scaling": None, "rope_theta": None, "head_dim": None, "mlp_bias": None,
        "num_key_value_heads": 2, "rms_norm_eps": None, "max_position_embeddings": None, "layer_types": None,
    }  # fmt: skip
    assert read(LLAMA, **nulls) == read(LLAMA, rms_norm_eps="absent")
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16}
    assert read(DEEPSEEK, rope_scaling={**yarn, "rope_theta": None, "mscale": None, "beta_fast": None}) == read(
        DEEPSEEK, rope_scaling=yarn
    )


def test_what_maps_nothing_is_no_config() -> None:
    for bad in ([1], None, "llama"):
        with pytest.raises(ValueError, match="maps names of fields to values"):
            tbt.DecoderConfig.from_hf(bad)  # type: ignore[arg-type]


def test_integers_of_numpy_become_plain_ones() -> None:
    config = read(LLAMA, vocab_size=np.int64(97), num_attention_heads=np.int32(4))
    assert config == read(LLAMA)
    assert type(config.vocab_size) is type(attention(config).num_heads) is int
    eight: Any = np.int64(8)
    assert type(SwiGLUConfig(intermediate_size=eight).intermediate_size) is int
    with pytest.raises(ValueError, match=r"SwiGLUConfig\.intermediate_size must be a positive integer, not True"):
        SwiGLUConfig(intermediate_size=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("scoring", "Sigmoid"), ("group_score", "top2"), ("shared_intermediate_size", -1), ("num_groups", 3)],
)
def test_a_mixture_that_nobody_meant_is_refused_by_name(field: str, value: Any) -> None:
    sizes = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 4}
    with pytest.raises(ValueError, match=field):
        MoEConfig(**{**sizes, field: value})


def test_importing_configs_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tokenbytoken as tbt\n"
        "print(tbt.count_parameters(tbt.published['llama-3.1-405b']).total, tbt.ledger()[0].label)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("405853388800 ")


def test_functions_stay_when_their_modules_are_imported() -> None:

    assert callable(tbt.generate)
    assert callable(tbt.ledger)
    assert "llama-3.1-8b" in tbt.published
    assert set(tbt.__all__) <= set(dir(tbt))
    with pytest.raises(AttributeError, match="nothing"):
        tbt.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rope_type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "Llama3Scaling"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "Llama3Scaling"),
        ({"rope_type": "yarn", "factor": -4.0}, "YarnScaling"),
        ({"rope_theta": float("inf")}, "theta"),
    ],
)
def test_scalings_that_would_give_nan_are_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(LLAMA, rope_parameters={"original_max_position_embeddings": 32, **block})
    with pytest.raises(ValueError, match="norm_eps"):
        read(LLAMA, rms_norm_eps=-1.0)
