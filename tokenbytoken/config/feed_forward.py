"""Feed-forward networks, as data: Llama's gated one, and mixtures of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from .._numbers import whole
from .closed_forms import Weight, gated_weights, is_known, positive_fields

__all__ = ["MoEConfig", "SwiGLUConfig"]


@dataclass(frozen=True, kw_only=True)
class SwiGLUConfig:
    """The gated feed-forward of Llama: down(silu(gate x) * (up x)) (Shazeer 2020, arXiv 2002.05202)."""

    module: ClassVar[str] = "tokenbytoken.layers.feed_forward:SwiGLU"

    intermediate_size: int
    bias: bool = False

    def __post_init__(self) -> None:
        positive_fields(self, "intermediate_size")

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        yield from gated_weights(hidden_size, self.intermediate_size, "feed_forward")
        if self.bias:
            yield Weight("biases", "bias", 2 * self.intermediate_size + hidden_size)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of SwiGLU experts and its router.

    ``scoring`` turns router logits into scores; ``normalize`` divides the chosen scores by their sum;
    ``group_score`` is how a group of experts is ranked when only ``groups_kept`` of ``num_groups`` may be
    used; ``selection_bias`` marks DeepSeek-V3's bias, which chooses but does not weigh.
    """

    module: ClassVar[str] = "tokenbytoken.layers.feed_forward:MoE"

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    selection_bias: bool = False

    def __post_init__(self) -> None:
        positive_fields(self, "num_experts", "experts_per_token", "intermediate_size", "num_groups", "groups_kept")
        whole("MoEConfig.shared_intermediate_size", self.shared_intermediate_size, 0)
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring must be 'softmax' or 'sigmoid', not {self.scoring!r}")
        if self.group_score not in ("max", "top2_sum"):
            raise ValueError(f"group_score must be 'max' or 'top2_sum', not {self.group_score!r}")
        if not is_known(self.num_experts, self.experts_per_token, self.num_groups, self.groups_kept):
            return
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts ({self.num_experts}) must be a multiple of num_groups ({self.num_groups})")
        if self.groups_kept > self.num_groups:
            raise ValueError(f"groups_kept ({self.groups_kept}) exceeds num_groups ({self.num_groups})")
        reachable = self.num_experts // self.num_groups * self.groups_kept
        if self.experts_per_token > reachable:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds the {reachable} within reach")

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        yield Weight("router", "router", self.num_experts, hidden_size)
        if self.selection_bias:
            yield Weight("selection_bias", "router_bias", self.num_experts)
        experts, chosen = self.num_experts, self.experts_per_token
        yield from gated_weights(hidden_size, self.intermediate_size, "expert", experts, chosen)
        if self.shared_intermediate_size:
            yield from gated_weights(hidden_size, self.shared_intermediate_size, "feed_forward")
