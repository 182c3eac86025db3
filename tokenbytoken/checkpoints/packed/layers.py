"""Layers whose weights stay packed, and the blocks of a decoder in which several of them are one product.

Activations are rounded to bfloat16 for a product and come out of it as bfloat16; everything between products keeps the
model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cost.recipes import GROUP
from ...layers.attention import Attention
from ...layers.feed_forward import Experts, SwiGLU
from ...layers.norm import RMSNorm
from ..tensors import Blocks
from .kernels import four_bit_places, halves, pack_four, product_eight, product_four

if TYPE_CHECKING:
    from ...decoder import Pass

__all__ = [
    "EightBitEmbedding", "EightBitExperts", "EightBitLinear", "FourBitLinear", "LoneRowNorm", "Packed",
    "PackedAttention", "PackedSwiGLU", "is_packed", "rows_of_eight_bits",
]  # fmt: skip

#: From so many rows on a product expands its weight first: the packed kernels widen it anew for every few rows, a
#: plain product of many rows is done once with that and makes better use of the processor. Measured with AVX2 and one
#: thread, the four products of a layer of SmolLM2: 19.6 ms packed and 19.9 expanded with 96 rows, 25.5 and 23.2 with
#: 128. Other processors differ; nothing is timed when a model is loaded.
EXPAND_ROWS = 96


class Packed(nn.Module):
    """What packed layers have in common: buffers that belong to one device and are kept by nobody."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.device.type not in (old.device.type, "meta"):
                raise ValueError(f"weights packed for {old.device.type} are of no use on {new.device.type}: load there")
            if new.dtype != old.dtype and name != "bias":  # model.to(dtype) would widen the scales
                setattr(self, name, old.to(new.device))
        return self

    def _save_to_state_dict(self, *_: Any) -> None:
        raise ValueError("packed weights differ from processor to processor and are not kept: save the model unpacked")


def is_packed(model: nn.Module) -> bool:
    """Whether some of the model's weights are packed."""
    return any(isinstance(module, Packed) for module in model.modules())


class _PackedLinear(Packed):
    """x (…, in) → (…, out): few rows by the packed product, many by a plain one with the expanded weight."""

    bias: Tensor | None

    def __init__(self, out_features: int, in_features: int, **buffers: Tensor | None) -> None:
        super().__init__(**buffers)
        self.out_features, self.in_features = out_features, in_features

    def packed_product(self, x: Tensor) -> Tensor:
        """x (n, in) bfloat16 → (n, out) bfloat16, without the bias."""
        raise NotImplementedError

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight, expanded: (out, in)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows >= EXPAND_ROWS or not rows:
            return F.linear(x, self.matrix(x.dtype), self.bias)
        y = self.packed_product(x.reshape(rows, self.in_features).bfloat16().contiguous())
        y = y.to(x).view(*x.shape[:-1], self.out_features)  # into its dtype
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}"


class FourBitLinear(_PackedLinear):
    """A weight of four bits a number, with a scale and a zero in bfloat16 for 32 of them: scale × (code − 8) + zero.

    The codes are those of the blocks it is made of; all that is lost is what rounds scales and zeros to bfloat16.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, blocks: Blocks, bias: Tensor | None = None) -> None:
        # The middle of a block, rather than its minimum, is what is rounded: it is the smaller number.
        middle = blocks.minima + 8 * blocks.scales
        scales = torch.stack((blocks.scales, middle), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
        super().__init__(*blocks.codes.shape, packed=pack_four(blocks.codes), scales=scales, bias=bias)

    def packed_product(self, x: Tensor) -> Tensor:
        return product_four(x, self.packed, self.scales)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        shape = self.out_features, self.in_features
        places = four_bit_places(*shape, self.packed.device)
        codes = halves(self.packed).index_select(0, places).view(shape[0], -1, GROUP).to(torch.float32).sub_(8)
        scale, zero = self.scales.transpose(0, 1).to(torch.float32).unsqueeze(-2).unbind(-1)  # (out, groups, 1)
        return codes.mul_(scale).add_(zero).view(shape).to(dtype)


def rows_of_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values (…, out, in) int8, scales (…, out) bfloat16); the scale is rounded first, then the numbers.

    Raises ValueError for a weight that holds NaN or infinity.
    """
    largest = torch.maximum(weight.amax(dim=-1), -weight.amin(dim=-1))  # faster than of magnitudes
    if not bool(largest.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity: it has no scale")
    scales = (largest / 127).to(torch.bfloat16)
    step = scales.to(torch.float32).masked_fill(scales == 0, 1)
    return (weight / step.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scales


class EightBitLinear(_PackedLinear):
    """A weight of one byte a number, with one scale in bfloat16 for each row of it."""

    values: Tensor
    scales: Tensor

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(*values.shape, values=values, scales=scales, bias=bias)

    def packed_product(self, x: Tensor) -> Tensor:
        return product_eight(x, self.values, self.scales)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return (self.values.to(torch.float32) * self.scales.to(torch.float32)[:, None]).to(dtype)


class EightBitExperts(nn.Module):
    """:class:`~tokenbytoken.layers.feed_forward.Experts` in one byte a number; what does not fit stays as it is."""

    def __init__(self, experts: Experts, packed: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        for name, weight in experts.named_parameters():
            rows = packed.get(name)
            linears = None if rows is None else nn.ModuleList(EightBitLinear(*each) for each in zip(*rows, strict=True))
            setattr(self, name, weight if linears is None else linears)

    def _product(self, name: str, x: Tensor, expert: int) -> Tensor:
        weight = getattr(self, name)
        return F.linear(x, weight[expert]) if isinstance(weight, Tensor) else weight[expert](x)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """What one expert makes of x (n, M)."""
        gate, up = (self._product(name, x, expert) for name in ("gate_proj", "up_proj"))
        return self._product("down_proj", F.silu(gate) * up, expert)


class EightBitEmbedding(Packed):
    """tokens (…) → rows (…, M) in ``dtype``, from a table of one byte a number with a scale for each row."""

    values: Tensor
    scales: Tensor

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__(values=values, scales=scales)
        self.num_embeddings, self.embedding_dim = values.shape
        self.dtype = dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.values.device)).dtype
        return super()._apply(fn, recurse)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.values[tokens].to(self.dtype) * self.scales[tokens].to(self.dtype).unsqueeze(-1)


class LoneRowNorm(RMSNorm):
    """The norm, with its one sum read by the host where there is one row: five steps fewer, which is half its time.

    Beside products from four bits that time is seen: a decode step norms 61 times in SmolLM2.
    """

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if x.numel() != width or x.device.type != "cpu" or x.dtype != torch.float32:
            return super().forward(x)
        size = float(torch.linalg.vector_norm(x))
        return x * (size * size / width + (self.eps or 0)) ** -0.5 * self.weight


class PackedAttention(Attention):
    """Attention whose query, key and value projections are one product."""

    def __init__(self, attention: Attention, qkv: FourBitLinear) -> None:
        nn.Module.__init__(self)
        self.config, self.scale = attention.config, attention.scale
        self.cache_format, self.cache_entry = attention.cache_format, attention.cache_entry
        self.qkv_proj, self.o_proj = qkv, attention.o_proj

    def heads(self, x: Tensor, step: Pass) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        H, K, D = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        together = self.qkv_proj(x).view(B, T, -1, D).transpose(1, 2)  # (B, H + 2 K, T, D)
        turned, v = together.split([H + K, K], dim=1)
        if self.config.rope is not None:
            turned = step.rotate(turned, self.config.rope)
        q, k = turned.split([H, K], dim=1)
        return q, k, v


class PackedSwiGLU(SwiGLU):
    """A gated feed-forward whose gate and up projections are one product."""

    def __init__(self, feed_forward: SwiGLU, gate_up: FourBitLinear) -> None:
        nn.Module.__init__(self)
        self.config = feed_forward.config
        self.gate_up_proj, self.down_proj = gate_up, feed_forward.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
