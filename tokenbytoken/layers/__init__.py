"""What a decoder is made of: mixers, feed-forwards, norms, positions, and the caches and states that they keep."""

from __future__ import annotations

from .attention import Attention, attend
from .cache import PLAIN, Cache, Entry, Format, Plain
from .feed_forward import Experts, MoE, Router, SwiGLU, route
from .latent_attention import LatentAttention
from .mamba import SCANS, Mamba, MambaState, Scan, product, selective_scan
from .norm import RMSNorm
from .rope import frequencies, rotate, rotation, yarn_mscale

__all__ = [
    "PLAIN",
    "SCANS",
    "Attention",
    "Cache",
    "Entry",
    "Experts",
    "Format",
    "LatentAttention",
    "Mamba",
    "MambaState",
    "MoE",
    "Plain",
    "RMSNorm",
    "Router",
    "Scan",
    "SwiGLU",
    "attend",
    "frequencies",
    "product",
    "rotate",
    "rotation",
    "route",
    "selective_scan",
    "yarn_mscale",
]
