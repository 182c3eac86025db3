"""Multi-head latent attention: keys and values of all heads, kept as one small latent a token.

Sources: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19 and 37 to 47; the same in DeepSeek-V3 (arXiv 2412.19437),
equations 1 to 11. The cache holds c_KV after its norm, and one rotated key that all heads share; nothing else.

Two ways to attend to it give the same result, because a product of matrices may be bracketed either way:

- *expanded*: W_UK c and W_UV c are formed for every token held, and attention is that of H heads;
- *absorbed*: q (W_UK c) = (q W_UK) c, so the query moves into the latent space instead, and attention is that of H
  query heads on **one** key head: the cache as it lies is the key, its first R numbers are the value.

Absorbed, no work grows with the tokens held but scores and values; these are wider, R + rope and R numbers instead
of nope + rope and v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..config import LatentAttentionConfig, YarnScaling
from .attention import attend
from .cache import PLAIN, Cache, Entry, Format
from .norm import RMSNorm
from .rope import yarn_mscale

if TYPE_CHECKING:
    from ..decoder import Pass

__all__ = ["LatentAttention", "ShowsMatrix"]

# Rows of a block of scores. The forms change places below 171 new tokens in DeepSeek's models, and the choice counts
# masked pairs as well: in one block they are computed, too (until `attention.BLOCK_SCORES` asks for smaller ones).
BLOCK_ROWS = 256


@runtime_checkable
class ShowsMatrix(Protocol):
    """A linear layer that holds its weight in another form than a tensor, and can show it."""

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight, (out, in)."""


def _matrix(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    if isinstance(linear, ShowsMatrix):
        return linear.matrix(dtype)
    assert isinstance(linear, nn.Linear)
    return linear.weight


class LatentAttention(nn.Module):
    """Causal self-attention through a latent: x (B, T, M) → (B, T, M), with an optional cache of earlier latents.

    ``form`` is ``"absorbed"``, ``"expanded"``, or ``"auto"``: whichever needs fewer FLOPs for the T new tokens and
    the S held (:meth:`~tokenbytoken.config.LatentAttentionConfig.cheaper_form`). It can be set at any time;
    ValueError for another word.
    """

    def __init__(
        self,
        config: LatentAttentionConfig,
        hidden_size: int,
        form: Literal["auto", "absorbed", "expanded"] = "auto",
    ) -> None:
        super().__init__()
        self.config = config
        self.form = form
        H, R = config.num_heads, config.kv_lora_rank
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, H * key_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=config.bias)
            self.q_a_norm = RMSNorm(config.q_lora_rank, eps=config.norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, H * key_dim, bias=False)
        self.kv_a_proj = nn.Linear(hidden_size, R + config.qk_rope_head_dim, bias=config.bias)
        self.kv_a_norm = RMSNorm(R, eps=config.norm_eps)
        self.kv_b_proj = nn.Linear(R, H * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(H * config.v_head_dim, hidden_size, bias=config.bias)
        # The width of a head's own key, in both forms: absorbed scores are the same numbers.
        self.scale = key_dim**-0.5
        scaling = config.rope.scaling
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            self.scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # one for the query, one for the key
        self.cache_format: Format = PLAIN
        # The rotated key is short, and its error would meet every score.
        self.cache_entry = Entry(tile=128, tail=config.qk_rope_head_dim)

    @property
    def form(self) -> Literal["auto", "absorbed", "expanded"]:
        return self._form

    @form.setter
    def form(self, form: Literal["auto", "absorbed", "expanded"]) -> None:
        if form not in ("auto", "absorbed", "expanded"):
            raise ValueError(f"form must be 'auto', 'absorbed' or 'expanded', not {form!r}")
        self._form: Literal["auto", "absorbed", "expanded"] = form

    def new_state(self, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device) -> Cache:
        # Of each token its latent, then its rotated key.
        shape = (batch_size, max_length, self.config.kv_lora_rank + self.config.qk_rope_head_dim)
        return Cache.empty(dtype, device, self.cache_format, latent=shape)

    def forward(self, x: Tensor, step: Pass, cache: Cache | None = None) -> Tensor:
        B, T, _ = x.shape
        c = self.config
        if c.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.view(B, T, c.num_heads, -1).transpose(1, 2)  # (B, H, T, nope + rope)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = step.rotate(q_rope, c.rope)

        latent, k_rope = self.kv_a_proj(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_norm(latent)  # (B, T, R)
        k_rope = step.rotate(k_rope.unsqueeze(1), c.rope).squeeze(1)  # (B, T, rope)
        held = torch.cat((latent, k_rope), dim=-1)
        if cache is not None:
            (held,) = cache.append(step.start, latent=held)  # (B, S, R + rope)

        S = held.shape[1]
        form = c.cheaper_form(S - T, T) if self.form == "auto" else self.form
        attend_to = self._absorbed if form == "absorbed" else self._expanded
        out = attend_to(q_nope, q_rope, held, step.padding)  # (B, H, T, v)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, held: Tensor, padding: Tensor | None) -> Tensor:
        c = self.config
        B, S, _ = held.shape
        latent, k_rope = held.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(latent).view(B, S, c.num_heads, -1).transpose(1, 2)  # (B, H, S, nope + v)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, c.num_heads, -1, -1)), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        return attend(q, k, v, scale=self.scale, padding=padding, block_rows=BLOCK_ROWS)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, held: Tensor, padding: Tensor | None) -> Tensor:
        c = self.config
        weight = _matrix(self.kv_b_proj, held.dtype)
        # Each head's rows are those of its key, then those of its value. They are never multiplied into the other
        # projections: that would make H × R columns of what has nope or v of them.
        w_uk, w_uv = weight.view(c.num_heads, -1, c.kv_lora_rank).split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q = torch.cat((torch.einsum("bhtn,hnr->bhtr", q_nope, w_uk), q_rope), dim=-1)  # (B, H, T, R + rope)
        k = held.unsqueeze(1)  # (B, 1, S, R + rope): one key for all heads
        out = attend(q, k, k[..., : c.kv_lora_rank], scale=self.scale, padding=padding, block_rows=BLOCK_ROWS)
        return torch.einsum("bhtr,hvr->bhtv", out, w_uv)
