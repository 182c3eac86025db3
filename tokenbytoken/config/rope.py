"""Rotary positions, as data: which numbers of a head turn, how fast, and how they are stretched."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .closed_forms import positive_fields

__all__ = ["Llama3Scaling", "RopeConfig", "YarnScaling"]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of RoPE: long wavelengths are divided, short ones left, the middle blended.

    Source: the ``rope_scaling`` block of the released configs, ``rope_type: llama3``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        positive_fields(self, "original_max_positions")
        if not (0 < self.factor < math.inf and 0 < self.low_freq_factor < self.high_freq_factor < math.inf):
            raise ValueError(f"Llama3Scaling needs factor > 0 and 0 < low_freq_factor < high_freq_factor: {self}")


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of RoPE, with DeepSeek's two attention-scale fields.

    ``mscale`` scales cos and sin, ``mscale_all_dim`` the softmax; equal values cancel in the first and
    leave the second. Source: Peng et al. 2023 (arXiv 2309.00071) and the DeepSeek-V2 configs.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        positive_fields(self, "original_max_positions")
        if not (0 < self.factor < math.inf and 0 < self.beta_slow < self.beta_fast < math.inf):
            raise ValueError(f"YarnScaling needs factor > 0 and 0 < beta_slow < beta_fast: {self}")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of the first ``dim`` numbers of a head.

    ``interleaved`` pairs (0, 1), (2, 3), …; otherwise element i is paired with i + dim/2 (half-split).
    """

    dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        positive_fields(self, "dim")
        if self.dim % 2:
            raise ValueError(f"RopeConfig.dim must be even (numbers turn in pairs), not {self.dim}")
        if not 0 < self.theta < math.inf:
            raise ValueError(f"RopeConfig.theta must be positive, not {self.theta}")
