"""Read a Hugging Face ``config.json``: what each publisher writes, and what of it this package can represent.

:data:`readers` has a function for each ``model_type``; a new one is registered there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from .._numbers import whole
from .attention import AttentionConfig
from .closed_forms import FeedForwardConfig
from .decoder import DecoderConfig, LayerConfig
from .feed_forward import MoEConfig, SwiGLUConfig
from .latent_attention import LatentAttentionConfig
from .mamba import MambaConfig
from .rope import Llama3Scaling, RopeConfig, YarnScaling

__all__ = ["Fields", "read", "readers"]


class Fields:
    """A config.json (or a block of one) whose missing, mistyped or unrepresentable fields are errors that name them.

    ``what`` stands before the name. Each reader takes a default for a field that is missing or null; without one,
    the field is needed.
    """

    def __init__(self, values: Mapping[str, Any], what: str = "config field ") -> None:
        self.values = values
        self.what = what

    def __call__(self, name: str, default: Any = ...) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise ValueError(f"{self.what}{name} is missing")
            return default
        return value

    def integer(self, name: str, default: Any = ..., least: int = 1) -> Any:
        value = self(name, default)
        return value if self.values.get(name) is None else whole(f"{self.what}{name}", value, least)

    def number(self, name: str, default: Any = ...) -> Any:
        value = self(name, default)
        if self.values.get(name) is None:
            return value
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{self.what}{name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.what}{name} must be true or false, not {value!r}")
        return value

    def block(self, name: str) -> Mapping[str, Any]:
        value = self(name, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.what}{name} must map names to values, not be {value!r}")
        return {key: part for key, part in value.items() if part is not None}

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value is present and is none of ``allowed``."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{self.what}{name} = {value!r} cannot be represented (only {allowed[0]!r} can)")

    def rope(self, dim: int, *, interleaved: bool = False, default_theta: float = 10_000.0) -> RopeConfig:
        new = self.block("rope_parameters")
        field = f"{self.what}{'rope_parameters' if new else 'rope_scaling'}."
        block = Fields({**self.block("rope_scaling"), **new}, field)
        for key, value in block.values.items():
            if isinstance(value, Mapping):  # a block for each kind of layer
                raise ValueError(f"{field}{key} = {value!r} cannot be represented (only one block for all layers can)")
        theta = block.number("rope_theta", self.number("rope_theta", default_theta))
        block.only("partial_rotary_factor", 1.0)
        self.only("partial_rotary_factor", 1.0)
        kind = block("rope_type", block("type", "default"))

        scaling: Llama3Scaling | YarnScaling | None
        if kind == "default":
            scaling = None
        elif kind == "llama3":
            scaling = Llama3Scaling(
                factor=block.number("factor"),
                low_freq_factor=block.number("low_freq_factor"),
                high_freq_factor=block.number("high_freq_factor"),
                original_max_positions=block.integer("original_max_position_embeddings"),
            )
        elif kind == "yarn":
            block.only("truncate", True)
            if block("attention_factor", None) is not None:
                raise ValueError(f"{field}attention_factor cannot be represented")
            scaling = YarnScaling(
                factor=block.number("factor"),
                original_max_positions=block.integer("original_max_position_embeddings"),
                beta_fast=block.number("beta_fast", 32.0) or 32.0,  # transformers takes 0 for absent, too
                beta_slow=block.number("beta_slow", 1.0) or 1.0,
                mscale=block.number("mscale", None),
                mscale_all_dim=block.number("mscale_all_dim", None),
            )
        else:
            raise ValueError(f"{field}rope_type = {kind!r} cannot be represented (only default, llama3 and yarn can)")
        return RopeConfig(dim=dim, theta=theta, interleaved=interleaved, scaling=scaling)

    def decoder(self, layers: list[LayerConfig], name: str, *, eps: float = 1e-6, tie: bool = False) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            layers=tuple(layers),
            norm_eps=self.number("rms_norm_eps", eps),
            tie_embeddings=self.flag("tie_word_embeddings", tie),
            max_positions=self.integer("max_position_embeddings", None),
            mtp_layers=self.integer("num_nextn_predict_layers", 0, least=0),
            name=name or str(self("_name_or_path", "")),
        )


def _attention(f: Fields, *, rope: bool, default_kv_heads: int | None = None) -> AttentionConfig:
    num_heads = f.integer("num_attention_heads")
    head_dim = f.integer("head_dim", None)
    if head_dim is None:
        hidden = f.integer("hidden_size")
        if hidden % num_heads:
            raise ValueError(
                f"config field hidden_size ({hidden}) is no multiple of num_attention_heads ({num_heads}) "
                "and head_dim is missing"
            )
        head_dim = hidden // num_heads
    bias = f.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=f.integer("num_key_value_heads", default_kv_heads or num_heads),
        head_dim=head_dim,
        rope=f.rope(head_dim) if rope else None,
        bias=bias,
        output_bias=bias,
    )


def _refuse_window(f: Fields) -> None:
    kinds = f("layer_types", [])
    if not isinstance(kinds, (list, tuple)) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"config field layer_types = {kinds!r} cannot be represented (only full_attention can)")
    if f("sliding_window", None) is not None and f.flag("use_sliding_window", True):
        raise ValueError(
            f"config field sliding_window = {f('sliding_window')!r} cannot be represented (only null can): "
            "this package attends to every earlier token"
        )


def _llama(f: Fields, name: str) -> DecoderConfig:
    f.only("hidden_act", "silu")
    _refuse_window(f)
    layer = LayerConfig(
        mixer=_attention(f, rope=True),
        feed_forward=SwiGLUConfig(intermediate_size=f.integer("intermediate_size"), bias=f.flag("mlp_bias", False)),
    )
    return f.decoder([layer] * f.integer("num_hidden_layers"), name)


def _mixtral(f: Fields, name: str) -> DecoderConfig:
    f.only("hidden_act", "silu")
    _refuse_window(f)
    layer = LayerConfig(
        mixer=_attention(f, rope=True, default_kv_heads=8),
        feed_forward=MoEConfig(
            num_experts=f.integer("num_local_experts", 8),
            experts_per_token=f.integer("num_experts_per_tok", 2),
            intermediate_size=f.integer("intermediate_size"),
        ),
    )
    return f.decoder([layer] * f.integer("num_hidden_layers"), name)


def _deepseek(f: Fields, name: str, *, v3: bool) -> DecoderConfig:
    f.only("hidden_act", "silu")
    f.only("moe_layer_freq", 1)
    rope_dim = f.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise ValueError(f"config field qk_rope_head_dim must be even (numbers turn in pairs), not {rope_dim}")
    mixer = LatentAttentionConfig(
        num_heads=f.integer("num_attention_heads"),
        q_lora_rank=f.integer("q_lora_rank", None),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_nope_head_dim=f.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=f.integer("v_head_dim"),
        rope=f.rope(rope_dim, interleaved=f.flag("rope_interleave", True)),
        bias=f.flag("attention_bias", False),
    )
    expert_width = f.integer("moe_intermediate_size")
    if v3:
        f.only("scoring_func", "sigmoid")
        f.only("topk_method", "noaux_tc")
    else:
        f.only("scoring_func", "softmax")
        f.only("topk_method", "greedy", "group_limited_greedy")
        f.only("norm_topk_prob", False)  # DeepSeek's code would divide and not scale, transformers does not divide
    grouped = v3 or f("topk_method", "greedy") == "group_limited_greedy"
    moe = MoEConfig(
        num_experts=f.integer("n_routed_experts"),
        experts_per_token=f.integer("num_experts_per_tok"),
        intermediate_size=expert_width,
        shared_intermediate_size=expert_width * f.integer("n_shared_experts", 0, least=0),
        scoring="sigmoid" if v3 else "softmax",
        normalize=f.flag("norm_topk_prob", v3),
        scale=f.number("routed_scaling_factor", 2.5 if v3 else 1.0),
        num_groups=f.integer("n_group", 1) if grouped else 1,
        groups_kept=f.integer("topk_group", 1) if grouped else 1,
        group_score="top2_sum" if v3 else "max",
        selection_bias=v3,
    )
    dense = SwiGLUConfig(intermediate_size=f.integer("intermediate_size"))
    first = f.integer("first_k_dense_replace", 0, least=0)
    count = f.integer("num_hidden_layers")
    return f.decoder([LayerConfig(mixer=mixer, feed_forward=dense if i < first else moe) for i in range(count)], name)


def _mamba_mixer(f: Fields, prefix: str, *, inner_norms: bool, eps: float) -> MambaConfig:
    hidden = f.integer("hidden_size")
    rank = f"{prefix}dt_rank" if prefix else "time_step_rank"
    return MambaConfig(
        inner_size=f.integer(f"{prefix}expand" if prefix else "expand", 2) * hidden,
        state_size=f.integer(f"{prefix}d_state" if prefix else "state_size", 16),
        conv_size=f.integer(f"{prefix}d_conv" if prefix else "conv_kernel", 4),
        dt_rank=math.ceil(hidden / 16) if f(rank, "auto") == "auto" else f.integer(rank),
        conv_bias=f.flag(f"{prefix}conv_bias" if prefix else "use_conv_bias", True),
        proj_bias=f.flag(f"{prefix}proj_bias" if prefix else "use_bias", False),
        inner_norms=inner_norms,
        norm_eps=eps,
    )


def _jamba(f: Fields, name: str) -> DecoderConfig:
    f.only("hidden_act", "silu")
    _refuse_window(f)
    eps = f.number("rms_norm_eps", 1e-6)
    attention = _attention(f, rope=False, default_kv_heads=8)
    mamba = _mamba_mixer(f, "mamba_", inner_norms=True, eps=eps)
    dense = SwiGLUConfig(intermediate_size=f.integer("intermediate_size"))
    experts = f.integer("num_experts", 16)
    moe: FeedForwardConfig = dense  # a single expert needs no router
    if experts > 1:
        moe = MoEConfig(
            num_experts=experts,
            experts_per_token=f.integer("num_experts_per_tok", 2),
            intermediate_size=dense.intermediate_size,
            normalize=False,
        )

    def on(kind: str, i: int, period: int, offset: int) -> bool:
        period, offset = f.integer(f"{kind}_layer_period", period), f.integer(f"{kind}_layer_offset", offset, least=0)
        return i % period == offset

    layers = [
        LayerConfig(
            mixer=attention if on("attn", i, 8, 4) else mamba,
            feed_forward=moe if on("expert", i, 2, 1) else dense,
        )
        for i in range(f.integer("num_hidden_layers"))
    ]
    return f.decoder(layers, name)


def _mamba(f: Fields, name: str) -> DecoderConfig:
    f.only("hidden_act", "silu")
    eps = f.number("layer_norm_epsilon", 1e-5)
    mixer = _mamba_mixer(f, "", inner_norms=False, eps=eps)
    inner = f.integer("intermediate_size", mixer.inner_size)
    if inner != mixer.inner_size:
        raise ValueError(f"config field intermediate_size = {inner} is not expand * hidden_size = {mixer.inner_size}")
    layer = LayerConfig(mixer=mixer, feed_forward=None)
    return f.decoder([layer] * f.integer("num_hidden_layers"), name, eps=eps, tie=True)


#: What reads the config of each model type: a function of its fields and a name.
#:
#: :meta hide-value:
readers: dict[str, Callable[[Fields, str], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "deepseek_v2": lambda f, name: _deepseek(f, name, v3=False),
    "deepseek_v3": lambda f, name: _deepseek(f, name, v3=True),
    "jamba": _jamba,
    "mamba": _mamba,
}


def read(hf: Mapping[str, Any], name: str = "") -> DecoderConfig:
    """The decoder that a ``config.json`` describes, see :meth:`~tokenbytoken.config.DecoderConfig.from_hf`."""
    if not isinstance(hf, Mapping):
        raise ValueError(f"a config maps names of fields to values: {hf!r} does not")
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in readers:
        raise ValueError(f"model_type {model_type!r} is not one of {', '.join(sorted(readers))}")
    return readers[model_type](Fields(hf), name)
