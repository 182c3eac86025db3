"""Multi-head latent attention, as data, and what its two forms cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from .._algebra import Number, where
from .._numbers import whole
from .closed_forms import Flops, StateSize, Weight, is_known, pairs, positive_fields
from .rope import RopeConfig

__all__ = ["LatentAttentionConfig"]


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19)."""

    module: ClassVar[str] = "tokenbytoken.layers.latent_attention:LatentAttention"

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    bias: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        positive_fields(self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.q_lora_rank is not None:
            positive_fields(self, "q_lora_rank")
        if is_known(self.qk_rope_head_dim) and self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even (numbers turn in pairs), not {self.qk_rope_head_dim}")
        if self.rope.dim != self.qk_rope_head_dim:
            raise ValueError(f"RopeConfig.dim ({self.rope.dim}) must equal qk_rope_head_dim ({self.qk_rope_head_dim})")

    @property
    def expanded_width(self) -> int:
        """Numbers in the keys and values of all heads, once a latent is expanded (without the rotary key)."""
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        key_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_lora_rank is None:
            yield Weight("q_proj", "attention", self.num_heads * key_dim, hidden_size)
        else:
            yield Weight("q_a_proj", "attention", self.q_lora_rank, hidden_size)
            yield Weight("q_a_norm", "norm", self.q_lora_rank)
            yield Weight("q_b_proj", "attention", self.num_heads * key_dim, self.q_lora_rank)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        yield Weight("kv_a_proj", "attention", latent, hidden_size)
        yield Weight("kv_a_norm", "norm", self.kv_lora_rank)
        yield Weight("kv_b_proj", "attention", self.expanded_width, self.kv_lora_rank)
        yield Weight("o_proj", "attention", hidden_size, self.num_heads * self.v_head_dim)
        if self.bias:  # as the published code has it: on the projections out of and into the hidden state
            yield Weight("biases", "bias", (0 if self.q_lora_rank is None else self.q_lora_rank) + latent + hidden_size)

    def state(self) -> StateSize:
        """The latent and the one rotated key: R + rope numbers a token, whatever the number of heads."""
        return StateSize(per_token=self.kv_lora_rank + self.qk_rope_head_dim)

    def flops(self, context: Number, new_tokens: Number, *, causal: bool = False, form: str = "auto") -> Flops:
        """Those of one form, or of the cheaper one.

        Both forms also apply ``kv_b_proj`` once to each new token, in one bracketing or the other: that is counted
        with the weights. Expanded, the cache passes through it again.
        """
        met = pairs(context, new_tokens, causal)
        expanded = Flops(
            linear=2 * context * self.expanded_width * self.kv_lora_rank,
            attention=2 * met * self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim),
        )
        # Absorbed, scores live in the latent space: R + rope numbers a head and pair, and R for the values.
        absorbed = Flops(attention=2 * met * self.num_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim))
        if form != "auto":
            return {"absorbed": absorbed, "expanded": expanded}[form]
        chosen = self._absorbs(context, new_tokens)
        return Flops(*(where(chosen, a, e) for a, e in zip(absorbed, expanded, strict=True)))

    def _absorbs(self, context: Number, new_tokens: Number) -> Number:
        # The choice counts masked pairs: a block of scores computes them.
        absorbed, expanded = (self.flops(context, new_tokens, form=form) for form in ("absorbed", "expanded"))
        return sum(absorbed) <= sum(expanded)

    def cheaper_form(self, context: int, new_tokens: int = 1) -> Literal["absorbed", "expanded"]:
        """The form with fewer FLOPs for ``new_tokens`` after ``context`` cached tokens.

        Absorbed scores are wider (576 + 512 against 192 + 128 numbers a head and pair in DeepSeek-V3), but the cache
        need not be expanded first. Decoding absorbs, prefill expands.
        """
        absorbs = self._absorbs(whole("context", context, 0), whole("new_tokens", new_tokens))
        return "absorbed" if absorbs else "expanded"

    def intensity(
        self, *, bytes_per_element: float, recurrent_bytes_per_element: float, new_tokens: int, form: str
    ) -> float:
        """Absorbed, 2 H (2 R + rope) FLOPs on R + rope numbers: about 2 H.

        Expanded: of a cache that holds the keys and values of all heads, the rotary key copied to each.
        """
        flops = self.flops(0, 1, form=form).attention
        rotated = self.num_heads * self.qk_rope_head_dim
        numbers = self.state().per_token if form == "absorbed" else self.expanded_width + rotated
        return new_tokens * flops / (numbers * bytes_per_element)

    def cache_share(self, tensor_parallel: Number) -> Number:
        """All of it: the latent has no heads that could be dealt."""
        return 1.0

    def summed(self) -> tuple[Number, ...]:
        return ()

    def exchanged(self) -> tuple[Number, Number]:
        """Absorbed queries of all heads; of each head its latent sum, its largest score and its sum of weights."""
        query = self.kv_lora_rank + self.qk_rope_head_dim
        return self.num_heads * query, self.num_heads * (self.kv_lora_rank + 2)
