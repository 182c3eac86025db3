"""Caches in one byte a number, for any mixer that says how its entries may be divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..decoder import Decoder
from ..layers.cache import PLAIN, Format
from .number_formats import DTYPES, QuantizedTensor, known, quantize
from .quantized_layers import shared_copy

__all__ = ["OneByte", "quantize_cache"]


@dataclass(frozen=True)
class OneByte:
    """A :class:`~tokenbytoken.layers.cache.Format`: codes with one float32 scale for each ``tile`` of an entry.

    The last ``tail`` numbers of an entry stay as they are. Parts are the codes (…, S, numbers), the scales
    (…, S, tiles) and, if there is one, the tail (…, S, tail). A token is quantised once, by itself, when it arrives:
    chunks equal the whole. Reading expands all that is held; a kernel that expands on the way would save the bytes of
    the transfer too. An entry of DeepSeek-V3 takes 512 + 4 × 4 + 2 × 64 = 656 bytes, the layout of DeepSeek's FlashMLA.
    """

    format: str
    tile: int
    tail: int = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        *places, width = shape
        numbers = width - self.tail
        codes = torch.zeros(*places, numbers, dtype=DTYPES[self.format], device=device)
        scales = torch.ones(*places, -(-numbers // self.tile), device=device)
        return (codes, scales, *([torch.zeros(*places, self.tail, dtype=dtype, device=device)] if self.tail else []))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        numbers, *tail = x.split([x.shape[-1] - self.tail, self.tail], dim=-1) if self.tail else [x]
        tiles = quantize(numbers, self.format, "tile", (1, self.tile))
        return tiles.values, tiles.scales.view(*x.shape[:-1], -1), *tail

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scales, *tail = parts
        numbers = QuantizedTensor(codes, scales, (1, min(self.tile, codes.shape[-1]))).dequantize(dtype)
        return torch.cat((numbers, *tail), dim=-1) if tail else numbers


def quantize_cache(model: Decoder, format: str | None = "e4m3") -> Decoder:
    """A decoder whose states keep keys and values, or latents, in ``format``; None keeps them as they come.

    It shares all weights with ``model``, which is left as it is, and refuses the states of other formats. The rotated
    keys beside latents and the states of Mamba stay as they are. Raises ValueError for an unknown format and for a
    model none of whose mixers has a cache.
    """
    known("format", format, (*DTYPES, None))
    new = shared_copy(model)
    mixers: list[Any] = [module for module in new.modules() if hasattr(module, "cache_format")]
    if not mixers:
        raise ValueError("no mixer of the model keeps tokens: there is no cache to quantise")
    for mixer in mixers:
        chosen: Format = PLAIN if format is None else OneByte(format, *mixer.cache_entry)
        mixer.cache_format = chosen
    return new
