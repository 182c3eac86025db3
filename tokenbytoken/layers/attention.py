"""Softmax attention with grouped key/value heads (MHA, GQA and MQA are one class).

Sources: Vaswani et al. 2017 (arXiv 1706.03762), equation 1; Shazeer 2019 (arXiv 1911.02150) for one shared
key/value head; Ainslie et al. 2023 (arXiv 2305.13245) for groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import AttentionConfig
from . import devices
from .cache import PLAIN, Cache, Entry, Format

if TYPE_CHECKING:
    from ..decoder import Pass

__all__ = ["Attention", "attend"]

# Query rows whose scores exist at one time. 64 rows keep a block of scores in the processor's cache; the
# second bound keeps the block below 2²⁶ scores (256 MiB in float32) however long the context is.
BLOCK_ROWS = 64
BLOCK_SCORES = 2**26


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    padding: Tensor | None = None,
    block_rows: int | None = None,
) -> Tensor:
    """Causal attention of the newest T tokens over all S: q (B, H, T, D), k and v (B, K, S, D) → (B, H, T, D).

    Query row t stands at position S - T + t and sees keys up to its own (a mask aligned bottom-right).
    ``padding`` (B,) counts keys at the left of each row that nobody may see. Query head h reads key/value head
    h // (H / K); keys and values are never expanded: the group is folded into the query rows instead. Values may be
    of another width than keys. ``block_rows`` bounds the query rows that are scored at a time.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    G = H // K
    fused = padding is None and v.shape[-1] == D  # torch's fused attention on a CPU wants one width
    if fused and T == S and T > 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=G > 1)
    if fused and T == 1:  # everything held may be seen: no mask at all
        return F.scaled_dot_product_attention(q.reshape(B, K, G, D), k, v, scale=scale).view(B, H, 1, D)

    # A chunk on top of a cache, or rows of unequal length: blocks of query rows, each over the keys it can see.
    # Only the b × b corner on the diagonal and the columns of the longest padding need a mask.
    out = q.new_empty(B, H, T, v.shape[-1])
    block = max(1, min(block_rows or BLOCK_ROWS, BLOCK_SCORES // (B * H * S)))
    hidden = torch.finfo(q.dtype).min  # finite, so that a row that sees nothing (a pad) stays finite
    # On a GPU it is not read, for which the host would wait in each layer: a mask over all columns costs less there.
    longest = 0 if padding is None else devices.read(padding.max()) if padding.device.type == "cpu" else S
    for first in range(0, T, block):
        b = min(block, T - first)
        seen = S - T + first + b
        rows = q[:, :, first : first + b].reshape(B, K, G * b, D)
        scores = ((rows * scale) @ k[:, :, :seen].transpose(-1, -2)).view(B, K, G, b, seen)
        later = torch.ones(b, b, dtype=torch.bool, device=q.device).triu(1)
        scores[..., seen - b :].masked_fill_(later, hidden)
        if padding is not None and longest:
            columns = torch.arange(min(longest, seen), device=q.device)
            pad = columns < padding[:, None]  # (B, longest)
            scores[..., : len(columns)].masked_fill_(pad[:, None, None, None, :], hidden)
        weights = scores.softmax(-1, dtype=torch.float32 if q.dtype != torch.float64 else None).to(q.dtype)
        out[:, :, first : first + b] = (weights.view(B, K, G * b, seen) @ v[:, :, :seen]).view(B, H, b, -1)
    return out


class Attention(nn.Module):
    """Causal self-attention: x (B, T, M) → (B, T, M), with an optional cache of earlier keys and values."""

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(hidden_size, H * D, bias=config.bias)
        self.k_proj = nn.Linear(hidden_size, K * D, bias=config.bias)
        self.v_proj = nn.Linear(hidden_size, K * D, bias=config.bias)
        self.o_proj = nn.Linear(H * D, hidden_size, bias=config.output_bias)
        self.scale = D**-0.5
        self.cache_format: Format = PLAIN
        self.cache_entry = Entry(tile=D)  # a scale for each token and head, if any

    def new_state(self, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device) -> Cache:
        shape = (batch_size, self.config.num_kv_heads, max_length, self.config.head_dim)
        return Cache.empty(dtype, device, self.cache_format, k=shape, v=shape)  # keys are kept rotated

    def heads(self, x: Tensor, step: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, K, T, D) of x (B, T, M); what is rotated is rotated."""
        B, T, _ = x.shape
        D = self.config.head_dim
        q = self.q_proj(x).view(B, T, -1, D).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, -1, D).transpose(1, 2)  # (B, K, T, D)
        v = self.v_proj(x).view(B, T, -1, D).transpose(1, 2)  # (B, K, T, D)
        if self.config.rope is not None:
            q, k = (step.rotate(t, self.config.rope) for t in (q, k))
        return q, k, v

    def forward(self, x: Tensor, step: Pass, cache: Cache | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.heads(x, step)
        if cache is not None:
            k, v = cache.append(step.start, k=k, v=v)  # (B, K, S, D)
        out = attend(q, k, v, scale=self.scale, padding=step.padding)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
