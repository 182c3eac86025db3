"""Softmax attention with grouped heads, as data, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .._algebra import Number
from .closed_forms import Flops, StateSize, Weight, is_known, pairs, positive_fields
from .rope import RopeConfig

__all__ = ["AttentionConfig"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Softmax attention with H query heads and K key/value heads: MHA (K = H), GQA, MQA (K = 1)."""

    module: ClassVar[str] = "tokenbytoken.layers.attention:Attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    bias: bool = False  # on the query, key and value projections
    output_bias: bool = False

    def __post_init__(self) -> None:
        positive_fields(self, "num_heads", "num_kv_heads", "head_dim")
        if is_known(self.num_heads, self.num_kv_heads) and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionConfig.num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.rope is not None and is_known(self.head_dim) and self.rope.dim > self.head_dim:
            raise ValueError(f"RopeConfig.dim ({self.rope.dim}) exceeds head_dim ({self.head_dim})")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head, H / K."""
        return self.num_heads // self.num_kv_heads

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield Weight("q_proj", "attention", queries, hidden_size)
        yield Weight("k_proj", "attention", keys, hidden_size)
        yield Weight("v_proj", "attention", keys, hidden_size)
        yield Weight("o_proj", "attention", hidden_size, queries)
        if self.bias:
            yield Weight("qkv_bias", "bias", queries + 2 * keys)
        if self.output_bias:
            yield Weight("o_bias", "bias", hidden_size)

    def state(self) -> StateSize:
        """A key and a value for each KV head: 2 K D numbers a token."""
        return StateSize(per_token=2 * self.num_kv_heads * self.head_dim)

    def flops(self, context: Number, new_tokens: Number, *, causal: bool = False, form: str = "auto") -> Flops:
        """4 D for each query head and pair: 2 D for its score, 2 D for its share of the values."""
        return Flops(attention=4 * pairs(context, new_tokens, causal) * self.num_heads * self.head_dim)

    def intensity(
        self, *, bytes_per_element: float, recurrent_bytes_per_element: float, new_tokens: int, form: str
    ) -> float:
        """4 H D FLOPs on 2 K D numbers: H / K FLOPs a byte, at two bytes a number."""
        return new_tokens * 4 * self.num_heads * self.head_dim / (self.state().per_token * bytes_per_element)

    def cache_share(self, tensor_parallel: Number) -> Number:
        """ceil(K / t) of K heads; with more GPUs than heads each head is kept t / K times.

        Raises ValueError where the heads do not divide.
        """
        t, heads, kv_heads = tensor_parallel, self.num_heads, self.num_kv_heads
        if is_known(t, heads, kv_heads) and t > kv_heads and (t % kv_heads or heads % t):
            raise ValueError(
                f"tensor_parallel = {t} does not divide {heads} query heads and {kv_heads} KV heads: "
                f"beyond {kv_heads} it must be a multiple of {kv_heads} and divide {heads}"
            )
        return math.ceil(kv_heads / t) / kv_heads

    def summed(self) -> tuple[Number, ...]:
        return ()

    def exchanged(self) -> tuple[Number, Number]:
        """The queries of all heads; of each head its sum over the values, its largest score and its sum of weights."""
        return self.num_heads * self.head_dim, self.num_heads * (self.head_dim + 2)
