"""Closed forms: what a config alone says about parameters, bytes, FLOPs, state and what fits.

Everything rests on one inventory, :func:`weights`: every tensor of a model with its shape and its role.
Parameters are its areas, bytes are its areas times a recipe, and the FLOPs of a token are twice the areas
of the matrices that the token passes through.

Conventions. FLOPs are those of products (linear layers, attention scores and values, convolution, scan),
a multiply-add as 2. Causal attention is counted full and masked, as the square of scores that a plain
implementation computes; ``causal=True`` counts only the pairs that survive the mask. Bytes are bytes:
1 GB is 10^9, 1 GiB is 2^30. Activations are left out.

>>> from tokenbytoken.models import published
>>> count_parameters(published["llama-3.1-405b"]).total
405853388800
>>> state_bytes_per_token(published["llama-3.1-405b"])
516096
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from .._numbers import not_negative, positive, whole
from ..config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MambaConfig,
    MixerConfig,
    MoEConfig,
)
from ..models import AttentionShape
from .recipes import BLOCK as _BLOCK
from .recipes import Recipe
from .recipes import recipe_named as _recipe

__all__ = [
    "Footprint",
    "ParameterCount",
    "PassCost",
    "RecurrentState",
    "Weight",
    "attention_intensity",
    "cache_crossing",
    "count_parameters",
    "distinct_experts",
    "expected_tokens",
    "footprint",
    "latent_form",
    "max_batch",
    "max_context",
    "mtp_weights",
    "pass_cost",
    "prefill_crossing",
    "recurrent_state",
    "state_bytes",
    "state_bytes_per_token",
    "weight_bytes",
    "weights",
]

# --- the inventory -----------------------------------------------------------------------------------

Role = Literal[
    "embedding",
    "head",
    "attention",  # the projections of an attention mixer
    "mamba",  # the four linear layers of a Mamba mixer
    "feed_forward",  # a dense feed-forward or a shared expert
    "expert",  # a routed expert
    "router",
    "router_bias",
    "projection",  # joins the two inputs of a multi-token-prediction module
    "recurrence",  # Mamba's convolution, A and D: weights that meet no matrix product
    "norm",
    "bias",
]

#: Roles that multiply the hidden states of every layer: 2 FLOPs a token for each of their numbers.
_LINEAR: frozenset[Role] = frozenset({"attention", "mamba", "feed_forward", "expert", "router"})


class Weight(NamedTuple):
    """``copies`` tensors of ``rows`` x ``columns`` (out x in), of which one token passes through ``used``."""

    name: str
    role: str  # a Role
    rows: int
    columns: int = 1
    copies: int = 1
    used: int = 1
    layer: int | None = None

    @property
    def area(self) -> int:
        """Numbers in one copy."""
        return self.rows * self.columns


def _swiglu(hidden: int, width: int, role: Role, copies: int = 1, used: int = 1) -> Iterator[Weight]:
    yield Weight("gate_proj", role, width, hidden, copies, used)
    yield Weight("up_proj", role, width, hidden, copies, used)
    yield Weight("down_proj", role, hidden, width, copies, used)


def _mixer_weights(mixer: MixerConfig, hidden: int) -> Iterator[Weight]:
    if isinstance(mixer, AttentionConfig):
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        yield Weight("q_proj", "attention", queries, hidden)
        yield Weight("k_proj", "attention", keys, hidden)
        yield Weight("v_proj", "attention", keys, hidden)
        yield Weight("o_proj", "attention", hidden, queries)
        if mixer.bias:
            yield Weight("qkv_bias", "bias", queries + 2 * keys)
        if mixer.output_bias:
            yield Weight("o_bias", "bias", hidden)
    elif isinstance(mixer, LatentAttentionConfig):
        key_dim = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        if mixer.q_lora_rank is None:
            yield Weight("q_proj", "attention", mixer.num_heads * key_dim, hidden)
        else:
            yield Weight("q_a_proj", "attention", mixer.q_lora_rank, hidden)
            yield Weight("q_a_norm", "norm", mixer.q_lora_rank)
            yield Weight("q_b_proj", "attention", mixer.num_heads * key_dim, mixer.q_lora_rank)
        latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        yield Weight("kv_a_proj", "attention", latent, hidden)
        yield Weight("kv_a_norm", "norm", mixer.kv_lora_rank)
        yield Weight("kv_b_proj", "attention", _expanded_width(mixer), mixer.kv_lora_rank)
        yield Weight("o_proj", "attention", hidden, mixer.num_heads * mixer.v_head_dim)
        if mixer.bias:  # as the published code has it: on the projections out of and into the hidden state
            yield Weight("biases", "bias", (mixer.q_lora_rank or 0) + latent + hidden)
    else:
        inner, state, rank = mixer.inner_size, mixer.state_size, mixer.dt_rank
        yield Weight("in_proj", "mamba", 2 * inner, hidden)
        yield Weight("x_proj", "mamba", rank + 2 * state, inner)
        yield Weight("dt_proj", "mamba", inner, rank)
        yield Weight("out_proj", "mamba", hidden, inner)
        yield Weight("conv", "recurrence", inner, mixer.conv_size)
        yield Weight("A_log", "recurrence", inner, state)
        yield Weight("D", "recurrence", inner)
        yield Weight("dt_bias", "bias", inner)
        if mixer.conv_bias:
            yield Weight("conv_bias", "bias", inner)
        if mixer.proj_bias:
            yield Weight("proj_bias", "bias", 2 * inner + hidden)
        if mixer.inner_norms:
            yield Weight("inner_norms", "norm", rank + 2 * state)


def _feed_forward_weights(feed_forward: FeedForwardConfig, hidden: int) -> Iterator[Weight]:
    if isinstance(feed_forward, MoEConfig):
        experts, chosen = feed_forward.num_experts, feed_forward.experts_per_token
        yield Weight("router", "router", experts, hidden)
        if feed_forward.selection_bias:
            yield Weight("selection_bias", "router_bias", experts)
        yield from _swiglu(hidden, feed_forward.intermediate_size, "expert", experts, chosen)
        if feed_forward.shared_intermediate_size:
            yield from _swiglu(hidden, feed_forward.shared_intermediate_size, "feed_forward")
    else:
        yield from _swiglu(hidden, feed_forward.intermediate_size, "feed_forward")
        if feed_forward.bias:
            yield Weight("biases", "bias", 2 * feed_forward.intermediate_size + hidden)


def _layer_weights(layer: LayerConfig, hidden: int) -> Iterator[Weight]:
    yield Weight("mixer_norm", "norm", hidden)
    yield from _mixer_weights(layer.mixer, hidden)
    if layer.feed_forward is not None:
        yield Weight("feed_forward_norm", "norm", hidden)
        yield from _feed_forward_weights(layer.feed_forward, hidden)


@lru_cache(maxsize=64)
def weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Every tensor of the model, layer by layer; a tied head is not listed a second time."""
    hidden, vocab = config.hidden_size, config.vocab_size
    found = [Weight("embed", "embedding", vocab, hidden)]
    for i, layer in enumerate(config.layers):
        found += [weight._replace(layer=i) for weight in _layer_weights(layer, hidden)]
    found.append(Weight("norm", "norm", hidden))
    if not config.tie_embeddings:
        found.append(Weight("head", "head", vocab, hidden))
    return tuple(found)


def mtp_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """The multi-token-prediction modules, without the embedding and head that they share with the model.

    One module is one more layer of the last kind, three norms, and a projection that takes the hidden
    state and the next token's embedding, side by side, back to the hidden size (arXiv 2412.19437, 2.2).
    """
    hidden = config.hidden_size
    module = (
        *_layer_weights(config.layers[-1], hidden),
        Weight("joining_projection", "projection", hidden, 2 * hidden),
        Weight("norms", "norm", 3 * hidden),
    )
    return module * config.mtp_layers


def _need_decoder(config: DecoderConfig | AttentionShape, what: str) -> DecoderConfig:
    if isinstance(config, AttentionShape):
        raise ValueError(
            f"{config.name} is known here by the shape of its attention only ({config.missing} are not built by this "
            f"package): its state can be computed, {what} cannot"
        )
    return _layers_known(config)


def _layers_known(config: DecoderConfig) -> DecoderConfig:
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"the config must be a DecoderConfig, not {config!r}")
    return config


# --- parameters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model: all of them, and those that one token passes through.

    ``active`` counts embedding and head whole; publishers differ, so the two narrower counts stand beside
    it. ``router_bias`` is part of ``total`` and ``active``; ``mtp`` (multi-token prediction) of neither.
    """

    total: int
    active: int
    active_without_embedding: int
    active_without_embedding_and_head: int
    router_bias: int
    mtp: int


@lru_cache(maxsize=64)
def count_parameters(config: DecoderConfig | AttentionShape) -> ParameterCount:
    """Count the parameters of a config, exactly.

    With tied embeddings the one table serves as head as well: ``active_without_embedding`` then still
    holds it, because the head multiplies by all of it, and ``active_without_embedding_and_head`` does not.
    Raises ValueError for an :class:`~tokenbytoken.models.AttentionShape`.
    """
    config = _need_decoder(config, "its parameters")
    total = sum(w.area * w.copies for w in weights(config))
    active = sum(w.area * w.used for w in weights(config))
    table = config.vocab_size * config.hidden_size
    inside = active - (table if config.tie_embeddings else 2 * table)
    return ParameterCount(
        total=total,
        active=active,
        active_without_embedding=inside + table,
        active_without_embedding_and_head=inside,
        router_bias=sum(w.area for w in weights(config) if w.role == "router_bias"),
        mtp=sum(w.area * w.copies for w in mtp_weights(config)),
    )


# --- bytes of the weights ----------------------------------------------------------------------------


def _is_one_byte(weight: Weight, recipe: Recipe, last_layer: int) -> bool:
    if weight.role not in recipe.one_byte:
        return False
    return not (recipe.skip_first_and_last_layer and weight.layer in (0, last_layer))


def _bytes_of_copy(weight: Weight, recipe: Recipe, last_layer: int) -> int:
    """Bytes of one copy of a tensor, its scales included."""
    if _is_one_byte(weight, recipe, last_layer):
        scales = {
            "none": 0,
            "row": weight.rows,
            "block": math.ceil(weight.rows / _BLOCK) * math.ceil(weight.columns / _BLOCK),
        }[recipe.scales]
        return weight.area + 4 * scales
    if weight.role == "router_bias" and recipe.float32_router_bias:
        return 4 * weight.area
    return recipe.bytes * weight.area


@lru_cache(maxsize=256)
def weight_bytes(config: DecoderConfig | AttentionShape, recipe: str = "bf16") -> int:
    """Bytes that hold all weights of a model, its scales included.

    ``fp32``, ``bf16``
        4 or 2 bytes for every parameter.
    ``fp8-all``
        1 byte for every parameter, no scales: the rule of thumb, which no release follows.
    ``fp8-ffn``
        Llama 3.1's: feed-forward matrices of all layers but the first and the last in 1 byte with a
        float32 scale a row; attention, embedding, head and norms in 2 (arXiv 2407.21783, section 6.2).
    ``fp8-block``
        DeepSeek-V3's checkpoint: all linear layers of the blocks in 1 byte with a float32 scale for each
        128 x 128 block; embedding, head, routers and norms in 2, router biases in 4; with the
        multi-token-prediction module and its own copy of embedding and head.
    ``int8``
        The same linear layers in 1 byte with a float32 scale a row; the rest in 2.
    ``int8-experts``
        Jamba's ExpertsInt8: experts and dense feed-forwards in 1 byte, the rest in 2; their scales, one a
        row and 0.03 % of the whole, are not counted (arXiv 2408.12570, section 3.1).

    Raises ValueError for an unknown recipe and for an :class:`~tokenbytoken.models.AttentionShape`.
    """
    config = _need_decoder(config, "its weights")
    chosen = _recipe(recipe)
    last = config.num_layers - 1
    total = sum(w.copies * _bytes_of_copy(w, chosen, last) for w in weights(config))
    if chosen.with_mtp and config.mtp_layers:
        total += sum(w.copies * _bytes_of_copy(w, chosen, last) for w in mtp_weights(config))
        total += config.mtp_layers * 2 * config.vocab_size * config.hidden_size * chosen.bytes
    return total


# --- bytes of the state ------------------------------------------------------------------------------


class RecurrentState(NamedTuple):
    """Numbers that the recurrent layers of one sequence keep, whatever its length."""

    scan: int
    convolution: int


def recurrent_state(config: DecoderConfig | AttentionShape, conv_columns: int | None = None) -> RecurrentState:
    """Elements of the constant state of one sequence: the scan's I x N a layer and the convolution's.

    This book keeps the last ``conv_size - 1`` inputs of the convolution, which is all that the next step
    needs; ``conv_columns=conv_size`` counts it as codebases do that keep one column more.
    """
    mixers = [] if isinstance(config, AttentionShape) else [layer.mixer for layer in _layers_known(config).layers]
    mamba = [mixer for mixer in mixers if isinstance(mixer, MambaConfig)]
    return RecurrentState(
        scan=sum(m.inner_size * m.state_size for m in mamba),
        convolution=sum(m.inner_size * (m.conv_size - 1 if conv_columns is None else conv_columns) for m in mamba),
    )


def _elements_per_token(mixer: MixerConfig | AttentionShape) -> int:
    """Numbers that one layer caches for each token: keys and values, or the latent and its rotary key."""
    if isinstance(mixer, LatentAttentionConfig):
        return mixer.kv_lora_rank + mixer.qk_rope_head_dim
    if isinstance(mixer, MambaConfig):
        return 0
    return 2 * mixer.num_kv_heads * mixer.head_dim


@lru_cache(maxsize=64)
def _state_elements_per_token(config: DecoderConfig | AttentionShape) -> int:
    if isinstance(config, AttentionShape):
        return config.num_layers * _elements_per_token(config)
    return sum(_elements_per_token(layer.mixer) for layer in config.layers)


def state_bytes_per_token(config: DecoderConfig | AttentionShape, bytes_per_element: float = 2) -> int:
    """Bytes by which the state of a sequence grows with each token.

    Attention caches a key and a value per KV head, ``2 K D`` numbers a layer; latent attention caches
    ``R + rope`` numbers a layer; Mamba caches nothing that grows. ``bytes_per_element`` may be a
    fraction (6-bit elements: 0.75).
    """
    return round(_state_elements_per_token(config) * positive("bytes_per_element", bytes_per_element))


def state_bytes(
    config: DecoderConfig | AttentionShape,
    batch_size: int,
    context: int,
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> int:
    """Bytes of the state of ``batch_size`` sequences of ``context`` tokens each.

    The cache and the inputs kept for the convolution take ``bytes_per_element``, the scan's state
    ``recurrent_bytes_per_element``.
    """
    batch_size, context = whole("batch_size", batch_size), whole("context", context, 0)
    constant = recurrent_state(config)
    elements = context * _state_elements_per_token(config) + constant.convolution
    growing = elements * positive("bytes_per_element", bytes_per_element)
    scan = constant.scan * positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    return round(batch_size * (growing + scan))


# --- one pass ----------------------------------------------------------------------------------------


def distinct_experts(feed_forward: MoEConfig, tokens: float) -> float:
    """Experts that a pass of ``tokens`` tokens is expected to read: E (1 - (1 - k/E)^n).

    For tokens that choose independently and evenly, as no real router quite does.
    """
    experts = feed_forward.num_experts
    return experts * (1 - (1 - feed_forward.experts_per_token / experts) ** not_negative("tokens", tokens))


def expected_tokens(acceptance: float, num_draft: int) -> float:
    """Tokens that a pass with ``num_draft`` guesses is expected to give: (1 - a^(g+1)) / (1 - a).

    Guess i counts if it and all before it are accepted, with probability a^i, and one token always comes from the pass
    itself: 1 + a + … + a^g. Each guess is taken to be accepted with the same probability a, independently of the
    others, as no real text quite does (Leviathan et al. 2022, arXiv 2211.17192, equation 1). ValueError for an
    acceptance outside 0 … 1.
    """
    if not_negative("acceptance", acceptance) > 1:
        raise ValueError(f"acceptance must lie between 0 and 1, not {acceptance}")
    return float(sum(acceptance**i for i in range(whole("num_draft", num_draft, 0) + 1)))


def _expanded_width(mixer: LatentAttentionConfig) -> int:
    """Numbers in the keys and values of all heads, once a latent is expanded (without the rotary key)."""
    return mixer.num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)


def _latent_flops(mixer: LatentAttentionConfig, context: int, pairs: int) -> dict[str, tuple[int, int]]:
    """(FLOPs of re-expanding the cache, FLOPs of scores and values) of one sequence, by form.

    Both forms also apply ``kv_b_proj`` once to each new token, in one bracketing or the other; that is
    counted with the linear layers.
    """
    scores = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    latent_scores = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return {
        "absorbed": (0, 2 * pairs * mixer.num_heads * (latent_scores + mixer.kv_lora_rank)),
        "expanded": (
            2 * context * _expanded_width(mixer) * mixer.kv_lora_rank,
            2 * pairs * mixer.num_heads * (scores + mixer.v_head_dim),
        ),
    }


def latent_form(mixer: LatentAttentionConfig, context: int, new_tokens: int = 1) -> Literal["absorbed", "expanded"]:
    """The form of latent attention with fewer FLOPs for ``new_tokens`` after ``context`` cached tokens.

    Absorbed scores live in the latent space: wider (576 + 512 against 192 + 128 numbers a head and pair
    in DeepSeek-V3), but the cache need not be expanded first. Decoding absorbs, prefill expands.
    """
    context, new_tokens = whole("context", context, 0), whole("new_tokens", new_tokens)
    flops = _latent_flops(mixer, context, new_tokens * (context + new_tokens))
    return "absorbed" if sum(flops["absorbed"]) <= sum(flops["expanded"]) else "expanded"


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """FLOPs and bytes of one pass.

    ``flops_linear`` are the products with the weights of the blocks, ``flops_attention`` scores and
    values, ``flops_recurrence`` Mamba's convolution and scan, ``flops_head`` the head. ``flops_fp8`` is
    the share of them all that the recipe multiplies in FP8.
    """

    flops_linear: int
    flops_attention: int
    flops_recurrence: int
    flops_head: int
    flops_fp8: int
    weight_bytes: int
    state_bytes: int

    @property
    def flops(self) -> int:
        return self.flops_linear + self.flops_attention + self.flops_recurrence + self.flops_head

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes


#: FLOPs of Mamba's scan for one element of its state and one token: the products Δ·A and (Δ x)·B, the
#: multiply-add of a·h + b, and that of the sum over C·h. The exponential is no product.
_SCAN_FLOPS = 6


@dataclass(frozen=True)
class _Profile:
    """What every pass of a model needs to know, summed once per (config, recipe)."""

    mixers: tuple[tuple[MixerConfig, int], ...]  # distinct mixers, layers that have each
    linear_flops: int  # a token
    fp8_linear_flops: int  # the share of these in FP8
    fixed_bytes: int  # read by every pass, embedding and head aside
    expert_bytes: tuple[tuple[MoEConfig, int], ...]  # one expert of each such layer, summed over equal layers
    state_elements: int  # cached for each token
    constant_state: RecurrentState


@lru_cache(maxsize=256)
def _profile(config: DecoderConfig, recipe: str) -> _Profile:
    chosen, last = _recipe(recipe), config.num_layers - 1
    linear = fp8 = fixed = 0
    experts: dict[MoEConfig, int] = {}
    for w in weights(config):
        if w.role in ("embedding", "head"):
            continue
        if w.role in _LINEAR:
            flops = 2 * w.area * w.used
            linear += flops
            if chosen.fp8_products and (chosen.bytes == 1 or _is_one_byte(w, chosen, last)):
                fp8 += flops
        size = _bytes_of_copy(w, chosen, last)
        moe = None if w.layer is None else config.layers[w.layer].feed_forward
        if w.role == "expert" and isinstance(moe, MoEConfig):
            experts[moe] = experts.get(moe, 0) + size
        else:
            fixed += size
    return _Profile(
        mixers=tuple(Counter(layer.mixer for layer in config.layers).items()),
        linear_flops=linear,
        fp8_linear_flops=fp8,
        fixed_bytes=fixed,
        expert_bytes=tuple(experts.items()),
        state_elements=_state_elements_per_token(config),
        constant_state=recurrent_state(config),
    )


def pass_cost(
    config: DecoderConfig | AttentionShape,
    batch_size: int,
    context: int,
    new_tokens: int = 1,
    *,
    recipe: str = "bf16",
    state_bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
    logits: Literal["all", "last", "none"] = "last",
    causal: bool = False,
    form: Literal["auto", "absorbed", "expanded"] = "auto",
) -> PassCost:
    """FLOPs and bytes of pushing T = ``new_tokens`` through each of ``batch_size`` sequences.

    Each sequence has seen S = ``context`` tokens before. A decode step is T = 1, a prefill S = 0.

    *FLOPs.* A linear layer costs 2 FLOPs a weight and token, the head the same for the rows of
    ``logits``. Attention meets T (S + T) pairs of query and key, ``causal=True`` only the
    T S + T (T + 1) / 2 that the mask leaves; a pair costs 4 D a query head. Latent attention takes the
    cheaper form (:func:`latent_form`) unless ``form`` says which. Mamba's scan costs 6 FLOPs a state element and token
    (Δ·A; Δx·B; a·h + b; the sum over C·h), its convolution 2 a tap.

    *Bytes.* Each weight is read once; of the embedding only the rows looked up; of the experts of a MoE
    the distinct ones expected (:func:`distinct_experts`). Each cached token is read once and each new
    one written once, S + T together; a recurrent state is read and written. Activations are left out.

    Raises ValueError for a size out of range, an unknown recipe and an :class:`~tokenbytoken.models.AttentionShape`.
    """
    config = _need_decoder(config, "the cost of a pass")
    batch_size, context = whole("batch_size", batch_size), whole("context", context, 0)
    new_tokens = whole("new_tokens", new_tokens)
    state_bytes_per_element = positive("state_bytes_per_element", state_bytes_per_element)
    recurrent_bytes_per_element = positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits must be 'all', 'last' or 'none', not {logits!r}")
    if form not in ("auto", "absorbed", "expanded"):
        raise ValueError(f"form must be 'auto', 'absorbed' or 'expanded', not {form!r}")
    profile = _profile(config, recipe)
    tokens = batch_size * new_tokens
    seen = context + new_tokens
    pairs = new_tokens * context + new_tokens * (new_tokens + 1) // 2 if causal else new_tokens * seen

    expanding = attention = recurrence = 0  # of one sequence
    for mixer, layers in profile.mixers:
        if isinstance(mixer, AttentionConfig):
            attention += layers * 4 * pairs * mixer.num_heads * mixer.head_dim
        elif isinstance(mixer, LatentAttentionConfig):
            chosen = latent_form(mixer, context, new_tokens) if form == "auto" else form
            again, products = _latent_flops(mixer, context, pairs)[chosen]
            expanding += layers * again
            attention += layers * products
        else:
            per_channel = _SCAN_FLOPS * mixer.state_size + 2 * mixer.conv_size
            recurrence += layers * new_tokens * mixer.inner_size * per_channel

    flops_head, table_bytes = _embedding_and_head(config, recipe, tokens, batch_size, logits)
    expert_bytes = sum(distinct_experts(moe, tokens) * size for moe, size in profile.expert_bytes)
    whole_fp8 = _recipe(recipe).fp8_products and _recipe(recipe).bytes == 1
    grown = seen * profile.state_elements * state_bytes_per_element
    constant = profile.constant_state
    kept = constant.scan * recurrent_bytes_per_element + constant.convolution * state_bytes_per_element
    return PassCost(
        flops_linear=tokens * profile.linear_flops + batch_size * expanding,
        flops_attention=batch_size * attention,
        flops_recurrence=batch_size * recurrence,
        flops_head=flops_head,
        flops_fp8=tokens * profile.fp8_linear_flops + (flops_head if whole_fp8 else 0),
        weight_bytes=round(profile.fixed_bytes + expert_bytes) + table_bytes,
        state_bytes=round(batch_size * (grown + 2 * kept)),
    )


def _embedding_and_head(
    config: DecoderConfig, recipe: str, tokens: int, batch_size: int, logits: str
) -> tuple[int, int]:
    """(FLOPs of the head, bytes read of the embedding table and the head)."""
    rows = {"all": tokens, "last": batch_size, "none": 0}[logits]
    row_bytes = config.hidden_size * _recipe(recipe).bytes
    head = config.vocab_size * row_bytes if rows else 0
    looked_up = 0 if config.tie_embeddings and rows else min(tokens, config.vocab_size) * row_bytes
    return 2 * rows * config.vocab_size * config.hidden_size, head + looked_up


# --- what fits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a model occupies in one memory: bytes of the weights, of each cached token, of each sequence.

    ``per_sequence`` is the constant part of a state, that of recurrent layers.
    """

    weights: float
    per_token: float
    per_sequence: float

    def bytes(self, batch_size: int, context: int) -> float:
        """Bytes of the weights and of ``batch_size`` sequences of ``context`` tokens."""
        return self.weights + batch_size * (context * self.per_token + self.per_sequence)

    def max_context(self, memory_bytes: float, batch_size: int = 1) -> int | float:
        """Tokens of context, rounded down, that each of ``batch_size`` sequences can have.

        0 when the weights do not fit; ``math.inf`` when they do and nothing grows.
        """
        batch_size = whole("batch_size", batch_size)
        free = not_negative("memory_bytes", memory_bytes) - self.weights - batch_size * self.per_sequence
        if free < 0:
            return 0
        return math.floor(free / (batch_size * self.per_token)) if self.per_token else math.inf

    def max_batch(self, memory_bytes: float, context: int) -> int:
        """Sequences of ``context`` tokens that fit, rounded down; 0 when the weights do not fit."""
        one = whole("context", context, 0) * self.per_token + self.per_sequence
        if one == 0:
            raise ValueError("a sequence of 0 tokens takes no memory: no batch is too large")
        return max(0, math.floor((not_negative("memory_bytes", memory_bytes) - self.weights) / one))


def footprint(
    config: DecoderConfig | AttentionShape,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> Footprint:
    """The footprint of a model in one memory; :func:`tokenbytoken.cost.hardware.footprint_per_gpu` divides it."""
    bytes_per_element = positive("bytes_per_element", bytes_per_element)
    recurrent_bytes_per_element = positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    constant = recurrent_state(config)
    return Footprint(
        weights=weight_bytes(config, recipe),
        per_token=_state_elements_per_token(config) * bytes_per_element,
        per_sequence=constant.scan * recurrent_bytes_per_element + constant.convolution * bytes_per_element,
    )


def max_context(
    config: DecoderConfig | AttentionShape,
    memory_bytes: float,
    batch_size: int = 1,
    *,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> int | float:
    """Tokens of context that fit beside the weights, for each of ``batch_size`` sequences; rounded down.

    0 when the weights do not fit; ``math.inf`` when they do and the state does not grow (pure Mamba).
    """
    size = footprint(config, recipe, bytes_per_element, recurrent_bytes_per_element)
    return size.max_context(memory_bytes, batch_size)


def max_batch(
    config: DecoderConfig | AttentionShape,
    memory_bytes: float,
    context: int,
    *,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> int:
    """Sequences of ``context`` tokens whose state fits beside the weights; rounded down, 0 if none does."""
    size = footprint(config, recipe, bytes_per_element, recurrent_bytes_per_element)
    return size.max_batch(memory_bytes, context)


# --- crossings and intensities -----------------------------------------------------------------------


def cache_crossing(config: DecoderConfig | AttentionShape, recipe: str = "bf16", bytes_per_element: float = 2) -> float:
    """Cached tokens, over all sequences, at which the growing state weighs as much as the weights."""
    growth = _state_elements_per_token(config) * positive("bytes_per_element", bytes_per_element)
    return weight_bytes(config, recipe) / growth if growth else math.inf


def prefill_crossing(config: DecoderConfig | AttentionShape, *, causal: bool = True) -> float:
    """Prompt length at which prefill attention costs as many FLOPs as the weights do.

    The weights cost 2 FLOPs a token for each active parameter, embedding and head counted whole (the
    usual rule of thumb, ``6ND`` without its backward pass). Attention in a prompt of S tokens meets
    S^2 / 2 pairs, those that the causal mask leaves, at 4 D FLOPs a query head; latent attention is
    counted in its expanded form, which is the cheaper one here. ``causal=False`` counts the masked pairs
    as well, and gives half the length.
    """
    config = _need_decoder(config, "its prefill")
    per_pair = 0
    for mixer, layers in _profile(config, "bf16").mixers:
        if isinstance(mixer, AttentionConfig):
            per_pair += layers * 4 * mixer.num_heads * mixer.head_dim
        elif isinstance(mixer, LatentAttentionConfig):
            per_pair += layers * _latent_flops(mixer, 0, 1)["expanded"][1]
    if not per_pair:
        return math.inf
    return 2 * count_parameters(config).active / (per_pair / 2 if causal else per_pair)


def attention_intensity(
    config: DecoderConfig | AttentionShape | MixerConfig,
    *,
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
    new_tokens: int = 1,
    form: Literal["absorbed", "expanded"] = "absorbed",
) -> float:
    """FLOPs for each byte of state that a decode step moves, for a long context.

    Attention does 4 D FLOPs a query head and cached token on 2 K D numbers: H / K FLOPs a byte at two
    bytes a number, 1 for MHA. Latent attention, absorbed, uses the one latent for all heads:
    2 H (2 R + rope) FLOPs on R + rope numbers, about 2 H. ``form="expanded"`` is latent attention whose
    cache holds the expanded keys and values. ``new_tokens`` queries share one reading. A
    :class:`~tokenbytoken.config.MambaConfig` gives the intensity of its scan, whose state is read and written: 0.75 in
    float32. A hybrid gives that of its attention layers; a model without any, that of its scan.
    """
    new_tokens = whole("new_tokens", new_tokens)
    bytes_per_element = positive("bytes_per_element", bytes_per_element)
    recurrent_bytes_per_element = positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    if isinstance(config, DecoderConfig):
        mixers = [layer.mixer for layer in config.layers]
        mixer: MixerConfig | AttentionShape = next((m for m in mixers if not isinstance(m, MambaConfig)), mixers[0])
    else:
        mixer = config
    if isinstance(mixer, MambaConfig):
        return _SCAN_FLOPS * new_tokens / (2 * recurrent_bytes_per_element)
    if isinstance(mixer, LatentAttentionConfig):
        flops = _latent_flops(mixer, 0, 1)[form][1]
        rotated = mixer.num_heads * mixer.qk_rope_head_dim  # the rotary key, copied to every head
        numbers = _elements_per_token(mixer) if form == "absorbed" else _expanded_width(mixer) + rotated
    else:
        flops = 4 * mixer.num_heads * mixer.head_dim
        numbers = _elements_per_token(mixer)
    return new_tokens * flops / (numbers * bytes_per_element)
