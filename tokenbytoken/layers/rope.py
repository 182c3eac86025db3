"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): frequencies, their stretching, the rotation.

A head of ``dim`` numbers is dim/2 pairs. Pair i turns by ``position * frequencies[i]`` radians, so the dot
product of a rotated query and a rotated key depends on the distance of their positions alone.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Llama3Scaling, RopeConfig, YarnScaling

__all__ = ["frequencies", "rotate", "rotation", "yarn_mscale"]


def frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair, after scaling: (dim/2,) float64.

    Plain: theta^(-2i/dim). Llama 3.1 and YaRN divide the slow pairs by their factor, leave the fast ones and
    blend in between; they differ in how the blend runs (by turns over the original context, by pair index).
    Sources: the Llama 3.1 release (``rope_type: llama3``); Peng et al. 2023, arXiv 2309.00071, section 3.2.
    """
    plain = rope.theta ** (-torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    match rope.scaling:
        case None:
            return plain
        case Llama3Scaling() as s:
            # Turns completed within the original context say how well a pair was trained.
            turns = s.original_max_positions * plain / (2 * math.pi)
            keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        case YarnScaling() as s:

            def pair_of(turns: float) -> float:  # the (fractional) pair that completes so many turns
                wavelength = s.original_max_positions / turns
                return rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(pair_of(s.beta_fast)), 0)
            high = min(math.ceil(pair_of(s.beta_slow)), rope.dim - 1)
            keep = 1 - (torch.arange(rope.dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.scaling.factor


def yarn_mscale(factor: float, mscale: float | None) -> float:
    """YaRN's attention scale, 0.1 m ln(factor) + 1; one where nothing is stretched (factor ≤ 1)."""
    return 0.1 * (1.0 if mscale is None else mscale) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _amplitude(rope: RopeConfig) -> float:
    s = rope.scaling
    if not isinstance(s, YarnScaling):
        return 1.0
    if s.mscale and s.mscale_all_dim:  # DeepSeek: the softmax takes mscale_all_dim, the tables the rest
        return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim)
    return yarn_mscale(s.factor, 1.0)


@lru_cache(maxsize=64)
def _frequencies_on(rope: RopeConfig, device: torch.device) -> Tensor:
    return frequencies(rope).to(device, torch.float32)


def rotation(rope: RopeConfig, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle: positions (…) → two tensors (…, dim/2).

    Angles are formed in float32 (float64 for float64 models), whatever the model's dtype: at position
    100,000 a bfloat16 angle is off by whole turns.
    """
    if dtype == torch.float64:
        angle = positions.to(torch.float64).unsqueeze(-1) * frequencies(rope).to(positions.device)
    else:
        angle = positions.to(torch.float32).unsqueeze(-1) * _frequencies_on(rope, positions.device)
    amplitude = _amplitude(rope)
    return (angle.cos() * amplitude).to(dtype), (angle.sin() * amplitude).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the pairs of the last axis: x (…, dim), cos and sin broadcastable to (…, dim/2).

    Half-split pairs element i with i + dim/2 (Hugging Face's layout); interleaved pairs 2i with 2i + 1
    (Meta's and GGUF's). The result keeps the layout of ``x``.
    """
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
