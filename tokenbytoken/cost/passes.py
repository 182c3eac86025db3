"""What one pass costs: its FLOPs and the bytes that it moves.

Conventions. FLOPs are those of products (linear layers, attention scores and values, convolution, scan),
a multiply-add as 2. Causal attention is counted full and masked, as the square of scores that a plain
implementation computes; ``causal=True`` counts only the pairs that survive the mask. Bytes are bytes:
1 GB is 10^9, 1 GiB is 2^30. Activations are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, cast

from .._numbers import LIMIT, not_negative, positive, whole
from ..config import DecoderConfig, Flops, MixerConfig, Model, MoEConfig, Number, StateSize, Weight, distinct, minimum
from .memory import state_size
from .parameters import bytes_of_copy, is_one_byte, known, weight_bytes, whole_decoder
from .recipes import recipe_named

__all__ = [
    "PassCost",
    "attention_intensity",
    "cache_crossing",
    "distinct_experts",
    "expected_tokens",
    "pass_cost",
    "prefill_crossing",
]

Form = Literal["auto", "absorbed", "expanded"]

#: Roles that multiply the hidden states of every layer: 2 FLOPs a token for each of their numbers.
_LINEAR = frozenset({"attention", "mamba", "mixer", "feed_forward", "expert", "router"})


def distinct_experts(feed_forward: MoEConfig, tokens: float) -> float:
    """Experts that a pass of ``tokens`` tokens is expected to read: E (1 - (1 - k/E)^n).

    For tokens that choose independently and evenly, as no real router quite does.
    """
    return distinct(feed_forward.num_experts, feed_forward.experts_per_token, not_negative("tokens", tokens))


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
    flops_mixing: int = field(repr=False, default=0)  # of the mixers, their weights on the new tokens left out

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


class _Part(NamedTuple):
    """The weights of some parts of a model, as every pass needs to know them."""

    linear_flops: int = 0  # a token
    fp8_linear_flops: int = 0  # the share of these in FP8
    fixed_bytes: int = 0  # read by every pass
    chosen: tuple[tuple[int, int, int], ...] = ()  # of what has copies: how many, how many a token uses, bytes of one

    def bytes(self, tokens: Number) -> Number:
        """Bytes that a pass of ``tokens`` tokens reads, of copies those expected."""
        return self.fixed_bytes + sum(distinct(copies, used, tokens) * size for copies, used, size in self.chosen)

    @property
    def all_bytes(self) -> int:
        return self.fixed_bytes + sum(copies * size for copies, _, size in self.chosen)


@dataclass(frozen=True)
class _Profile:
    """What every pass of a model needs to know, summed once per (config, recipe)."""

    layers: tuple[tuple[MixerConfig, int], ...]  # distinct mixers, layers that have each
    mixers: _Part
    experts: _Part
    rest: _Part  # dense and shared feed-forwards, routers and norms; neither embedding nor head
    state: StateSize

    @property
    def parts(self) -> tuple[_Part, _Part, _Part]:
        return self.mixers, self.experts, self.rest


@lru_cache(maxsize=256)
def _profile(config: DecoderConfig, recipe: str) -> _Profile:
    mixers: list[Weight] = []
    others = [Weight("norm", "norm", config.hidden_size)]
    for i, layer in enumerate(config.layers):
        norm, *inside = (w._replace(layer=i) for w in layer.weights(config.hidden_size))
        count = sum(1 for _ in layer.mixer.weights(config.hidden_size))
        mixers += inside[:count]
        others += [norm, *inside[count:]]
    last = config.num_layers - 1
    return _Profile(
        layers=tuple(Counter(config.mixers).items()),
        mixers=_part(mixers, recipe, last),
        experts=_part((w for w in others if w.copies > 1), recipe, last),
        rest=_part((w for w in others if w.copies == 1), recipe, last),
        state=state_size(config),
    )


def _part(weights: Iterable[Weight], recipe: str, last_layer: int) -> _Part:
    chosen = recipe_named(recipe)
    linear = fp8 = fixed = 0
    copied: Counter[tuple[int, int]] = Counter()
    for w in weights:
        if w.role in _LINEAR:
            flops = 2 * w.area * w.used
            linear += flops
            if chosen.fp8_products and (chosen.bytes == 1 or is_one_byte(w, chosen, last_layer)):
                fp8 += flops
        size = bytes_of_copy(w, chosen, last_layer)
        if w.copies > 1:
            copied[w.copies, w.used] += size
        else:
            fixed += size
    return _Part(linear, fp8, fixed, tuple((copies, used, size) for (copies, used), size in copied.items()))


def pass_cost(
    config: Model,
    batch_size: int,
    context: int,
    new_tokens: int = 1,
    *,
    recipe: str = "bf16",
    state_bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
    logits: Literal["all", "last", "none"] = "last",
    causal: bool = False,
    form: Form = "auto",
) -> PassCost:
    """FLOPs and bytes of pushing T = ``new_tokens`` through each of ``batch_size`` sequences.

    Each sequence has seen S = ``context`` tokens before. A decode step is T = 1, a prefill S = 0.

    *FLOPs.* A linear layer costs 2 FLOPs a weight and token, the head the same for the rows of
    ``logits``. Attention meets T (S + T) pairs of query and key, ``causal=True`` only the
    T S + T (T + 1) / 2 that the mask leaves; a pair costs 4 D a query head. Latent attention takes the
    cheaper form unless ``form`` says which. Mamba's scan costs 6 FLOPs a state element and token
    (Δ·A; Δx·B; a·h + b; the sum over C·h), its convolution 2 a tap.

    *Bytes.* Each weight is read once; of the embedding only the rows looked up; of the experts of a MoE
    the distinct ones expected (:func:`distinct_experts`). Each cached token is read once and each new
    one written once, S + T together; a recurrent state is read and written. Activations are left out.

    Raises ValueError for a size out of range, an unknown recipe and an :class:`~tokenbytoken.models.AttentionShape`.
    """
    config = whole_decoder(config)
    batch_size, context = whole("batch_size", batch_size), whole("context", context, 0)
    new_tokens = whole("new_tokens", new_tokens)
    state_bytes_per_element = positive("state_bytes_per_element", state_bytes_per_element)
    recurrent_bytes_per_element = positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits must be 'all', 'last' or 'none', not {logits!r}")
    if form not in ("auto", "absorbed", "expanded"):
        raise ValueError(f"form must be 'auto', 'absorbed' or 'expanded', not {form!r}")
    profile, chosen = _profile(config, recipe), recipe_named(recipe)
    tokens, seen = batch_size * new_tokens, context + new_tokens
    mixing = Flops()  # of one sequence
    for mixer, layers in profile.layers:
        flops = mixer.flops(context, new_tokens, causal=causal, form=form)
        mixing = Flops(*(total + layers * more for total, more in zip(mixing, flops, strict=True)))

    flops_head, table_bytes = _embedding_and_head(config, recipe, tokens, batch_size, logits)
    whole_fp8 = chosen.fp8_products and chosen.bytes == 1
    state = profile.state
    grown = seen * state.per_token * state_bytes_per_element
    kept = state.recurrent * recurrent_bytes_per_element + state.constant * state_bytes_per_element
    return PassCost(
        flops_linear=tokens * sum(part.linear_flops for part in profile.parts) + batch_size * mixing.linear,
        flops_attention=batch_size * mixing.attention,
        flops_recurrence=batch_size * mixing.recurrence,
        flops_head=flops_head,
        flops_fp8=tokens * sum(part.fp8_linear_flops for part in profile.parts) + (flops_head if whole_fp8 else 0),
        weight_bytes=round(sum(part.bytes(tokens) for part in profile.parts)) + table_bytes,
        state_bytes=round(batch_size * (grown + 2 * kept)),
        flops_mixing=batch_size * sum(mixing),
    )


def _embedding_and_head(
    config: DecoderConfig, recipe: str, tokens: int, batch_size: int, logits: str
) -> tuple[int, int]:
    """(FLOPs of the head, bytes read of the embedding table and the head)."""
    rows = {"all": tokens, "last": batch_size, "none": 0}[logits]
    table = next(w for w in config.weights() if w.role == "embedding")  # the head is of the same shape
    row_bytes = bytes_of_copy(table._replace(rows=1), recipe_named(recipe), config.num_layers - 1)
    head = config.vocab_size * row_bytes if logits != "none" else 0
    looked_up = 0 if config.tie_embeddings and logits != "none" else minimum(tokens, config.vocab_size) * row_bytes
    return 2 * rows * config.vocab_size * config.hidden_size, head + looked_up


class PartBytes(NamedTuple):
    """Bytes of the weights of mixers, of routed experts, and of the rest, embedding and head included."""

    mixers: int
    experts: int
    rest: int


def bytes_in_parts(config: DecoderConfig, recipe: str) -> PartBytes:
    """:func:`~tokenbytoken.cost.weight_bytes`, part by part."""
    profile = _profile(config, recipe)
    mixers, experts = profile.mixers.all_bytes, profile.experts.all_bytes
    return PartBytes(mixers, experts, weight_bytes(config, recipe) - mixers - experts)


class Share(NamedTuple):
    """What the busiest GPU of those that share each layer does in one pass; its state is left to whoever places it."""

    weight_bytes: Number
    flops: Number
    flops_fp8: Number


def busiest_share(
    config: Model, cost: PassCost, own: PassCost, tokens: Number, own_tokens: Number,
    *, gpus: Number, recipe: str, whole_experts: bool, busiest: float,
) -> Share:  # fmt: skip
    """The busiest of ``gpus`` where readers are dealt to them, and every mixer is copied to each.

    ``cost``: the pass of all readers, ``tokens`` tokens. ``own``: that of the readers which the GPU has. What is not
    copied is divided evenly; with ``whole_experts`` everything but experts is copied, and the GPU's experts get
    ``busiest`` times the mean load.
    """
    profile = _profile(whole_decoder(config), recipe)
    mixers, experts, _ = profile.parts
    if not whole_experts:  # mixers on its own readers, the rest of the pass divided
        mixing = own_tokens * mixers.linear_flops + own.flops_mixing
        others = cost.flops - cost.flops_mixing - tokens * mixers.linear_flops
        fp8 = cost.flops_fp8 - tokens * mixers.fp8_linear_flops
        return Share(
            mixers.fixed_bytes + (cost.weight_bytes - mixers.fixed_bytes) / gpus,
            mixing + others / gpus,
            own_tokens * mixers.fp8_linear_flops + fp8 / gpus,
        )
    read = minimum(busiest * experts.bytes(tokens), experts.all_bytes) / gpus
    routed, routed_fp8 = (busiest * tokens / gpus * flops for flops in (experts.linear_flops, experts.fp8_linear_flops))
    return Share(
        own.weight_bytes - experts.bytes(own_tokens) + read,
        own.flops - own_tokens * experts.linear_flops + routed,
        own.flops_fp8 - own_tokens * experts.fp8_linear_flops + routed_fp8,
    )


def cache_crossing(config: Model, recipe: str = "bf16", bytes_per_element: float = 2) -> float:
    """Cached tokens, over all sequences, at which the growing state weighs as much as the weights."""
    growth = state_size(config).per_token * positive("bytes_per_element", bytes_per_element)
    return weight_bytes(config, recipe) / growth if growth else math.inf


def prefill_crossing(config: Model, *, causal: bool = True) -> float:
    """Prompt length at which prefill attention costs as many FLOPs as everything else in the layers.

    That is 2 FLOPs a token for each number in a product, and what a recurrence costs; the embedding is looked up, and
    the head meets one row of a prompt, so neither counts. Attention in a prompt of S tokens meets S^2 / 2 pairs, those
    that the causal mask leaves, at 4 D FLOPs a query head; latent attention is counted in its expanded form, which is
    the cheaper one here. ``causal=False`` counts the masked pairs as well, and gives half the length.
    """
    profile = _profile(whole_decoder(config), "bf16")
    mixers = profile.layers
    others_of_a_token = sum(part.linear_flops for part in profile.parts)
    others_of_a_token += sum(layers * mixer.flops(0, 1).recurrence for mixer, layers in mixers)

    def attention_of_a_token(length: float) -> float:
        whole_square = sum(layers * mixer.flops(0, length, form="expanded").attention for mixer, layers in mixers)
        return whole_square / length / (2 if causal else 1)

    longest = 1.0
    while attention_of_a_token(longest) < others_of_a_token:
        longest *= 2
        if longest > LIMIT:  # no attention, or one whose cost a token is bounded
            return math.inf
    if attention_of_a_token(1.0) * longest == attention_of_a_token(longest):  # as is usual: in proportion to length
        return others_of_a_token / attention_of_a_token(1.0)
    low, high = longest / 2, longest
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if attention_of_a_token(middle) < others_of_a_token else (low, middle)
    return high


def attention_intensity(
    config: Model | MixerConfig,
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
    if form not in ("absorbed", "expanded"):
        raise ValueError(f"form must be 'absorbed' or 'expanded', not {form!r}")
    if hasattr(config, "intensity"):
        mixer = cast(MixerConfig, config)
    else:
        mixers = known(config).mixers
        mixer = next((m for m in mixers if m.state().per_token), mixers[0])
    return mixer.intensity(
        bytes_per_element=bytes_per_element,
        recurrent_bytes_per_element=recurrent_bytes_per_element,
        new_tokens=new_tokens,
        form=form,
    )
