"""The gated feed-forward network of the Llama family (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .config import SwiGLUConfig

__all__ = ["SwiGLU"]


class SwiGLU(nn.Module):
    """down(silu(gate x) * (up x)): x (…, M) → (…, M)."""

    def __init__(self, config: SwiGLUConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
