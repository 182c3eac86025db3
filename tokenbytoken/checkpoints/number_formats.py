"""Numbers in one byte: FP8 and INT8 with their scales.

A stored number is code × scale. The scale is shared by a block of numbers: all of a tensor, a row, or 128 × 128 of
them; it sets the range, and the format of the code sets how finely the range is divided. Scales are float32 and
*multiply* when a number is read (DeepSeek's checkpoints call the same thing ``weight_scale_inv``).

Sources: Micikevicius et al. 2022 (arXiv 2209.05433) for the FP8 formats; the Llama 3 paper (arXiv 2407.21783),
section 6.2, for row-wise scales; DeepSeek-V3 (arXiv 2412.19437), section 3.3, for blocks and 1 × 128 tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .._numbers import positive, whole
from ..cost.recipes import BLOCK as SIDE

__all__ = ["QuantizedTensor", "quantize", "to_fp8"]

Granularity = Literal["tensor", "row", "tile", "block"]

DTYPES: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
LARGEST: dict[str, float] = {"e4m3": 448.0, "e5m2": 57_344.0, "int8": 127.0}  # −128 is not used: codes are symmetric
_ROUNDS_UP = {"e4m3": 464.0, "e5m2": 61_440.0}  # half way to what would come next; a tie goes to the even mantissa
FP8_FORMATS = tuple(_ROUNDS_UP)
GRANULARITIES = ("tensor", "row", "tile", "block")
BLOCK = (SIDE, SIDE)


def to_fp8(x: Tensor, format: str = "e4m3", overflow: Literal["saturate", "nan"] = "saturate") -> Tensor:
    """Round to the nearest number of an FP8 format, ties to even: ``"e4m3"`` (±448) or ``"e5m2"`` (±57,344).

    Versions of PyTorch differ in what an overflowing cast gives, so the rule is chosen here. ``"saturate"``: what
    is too large, infinities included, becomes the largest number of its sign. ``"nan"``: what would be rounded
    beyond the largest number becomes NaN, infinities included, in E5M2 too. NaN stays NaN. What is neither float16
    nor bfloat16 is rounded to float32 first. Raises ValueError for another format or rule.
    """
    known("FP8 format", format, _ROUNDS_UP)
    known("overflow rule", overflow, ("saturate", "nan"))
    if x.dtype not in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)
    largest = LARGEST[format]
    held = x.clamp(-largest, largest)  # NaN passes
    if overflow == "nan":
        size = x.abs()
        # 464 lies between 448 (mantissa 110) and 480 (111): to the even one. 61,440 lies between 57,344 (11) and 2¹⁶.
        lost = size > _ROUNDS_UP[format] if format == "e4m3" else size >= _ROUNDS_UP[format]
        held = held.masked_fill(lost, torch.nan)
    return held.to(DTYPES[format])


@dataclass(frozen=True)
class QuantizedTensor:
    """``values`` (…, columns) of one byte each, and one float32 scale for each block of ``block`` = (rows, columns).

    Leading axes count as rows; ``scales`` is (row blocks, column blocks), the last blocks may be ragged. In a stack of
    matrices (E, rows, columns), with scales (E, row blocks, column blocks), no block reaches into the next matrix.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes held, scales included."""
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, i: int | Tensor) -> QuantizedTensor:
        """One matrix of a stack: a view; for a number (1,) that the host is not to read, a copy."""
        if isinstance(i, int):
            return QuantizedTensor(self.values[i], self.scales[i], self.block)
        codes = self.values.view(torch.uint8).index_select(0, i).squeeze(0)  # not every device picks FP8
        return QuantizedTensor(codes.view(self.values.dtype), self.scales.index_select(0, i).squeeze(0), self.block)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code × scale, multiplied in float32 and then rounded to ``dtype``."""
        wide = self.values.reshape(*self.scales.shape[:-2], -1, self.shape[-1]).to(torch.float32)
        return wide.mul_(_spread(self.scales, self.block, wide)).to(dtype).view(self.shape)


def quantize(
    x: Tensor,
    format: str = "e4m3",
    granularity: Granularity = "row",
    block: tuple[int, int] = BLOCK,
    *,
    bound: float | None = None,
    stacked: bool = False,
) -> QuantizedTensor:
    """Store x (…, columns) in one byte a number, with scale = largest magnitude of the block ÷ largest code.

    ``granularity``: one scale for the ``"tensor"``, for each ``"row"``, for each ``"tile"`` of 1 × ``block[1]``, or
    for each ``"block"``. A block of zeros has scale 1. ``bound`` caps the magnitude that a scale looks at; what
    exceeds it saturates, infinities included. Without a bound, a block with NaN or infinity comes back as NaN.
    ``stacked``: x is (E, rows, columns), each matrix of which is quantised by itself (and ``"tensor"`` is one of them).
    Raises ValueError for what it does not know and for a tensor that is empty or holds no floats.
    """
    known("format", format, DTYPES)
    known("granularity", granularity, GRANULARITIES)
    if x.dim() == 0 or not x.numel() or not x.is_floating_point():
        raise ValueError(f"cannot quantise a tensor of shape {tuple(x.shape)} and dtype {x.dtype}")
    try:
        height, width = (whole("block", size) for size in block)
    except (TypeError, ValueError):
        raise ValueError(f"block must be two positive integers, not {block!r}") from None
    if stacked and x.dim() != 3:
        raise ValueError(f"a stack of matrices has three axes, not shape {tuple(x.shape)}")
    flat = x.detach().reshape(*x.shape[: int(stacked)], -1, x.shape[-1])
    rows, columns = flat.shape[-2:]
    height, width = min(height, rows), min(width, columns)
    shape = {"tensor": (rows, columns), "row": (1, columns), "tile": (1, width), "block": (height, width)}[granularity]
    if x.is_meta:  # nothing to compute, and operations on this device would import torch's compiler first (2 s)
        blocks = (-(-rows // shape[0]), -(-columns // shape[1]))
        scales = flat.new_empty(*flat.shape[:-2], *blocks, dtype=torch.float32)
        return QuantizedTensor(torch.empty_like(x, dtype=DTYPES[format]), scales, shape)
    flat = flat.to(torch.float32).contiguous()
    largest = _block_largest(flat, shape)
    if bound is not None:
        largest = largest.clamp(max=positive("bound", bound))
    scales = largest / LARGEST[format]
    scales = torch.where(scales == 0, 1.0, scales)  # 0 ÷ 0 would be NaN; and NaN must stay one
    codes = (flat / _spread(scales, shape, flat)).clamp_(-LARGEST[format], LARGEST[format])
    if format == "int8":
        codes.round_()  # half to even, as the casts to FP8 do
    return QuantizedTensor(codes.to(DTYPES[format]).view(x.shape), scales, shape)


def _block_largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of x (…, rows, columns) → (…, row blocks, column blocks)."""
    rows, columns = x.shape[-2:]
    if rows % block[0] or columns % block[1]:
        x = F.pad(x, (0, -columns % block[1], 0, -rows % block[0]))  # zeros make no block larger
    tiled = x.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    return torch.maximum(tiled.amax((-3, -1)), -tiled.amin((-3, -1)))  # no copy of x for its magnitudes


def _spread(scales: Tensor, block: tuple[int, int], x: Tensor) -> Tensor:
    """Scales in a shape that multiplies x (…, rows, columns): an axis with one scale, or one each, stays as it is."""
    for axis, size in ((-2, block[0]), (-1, block[1])):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, x.shape[axis])
    return scales


def known(what: str, value: object, choices: Any) -> None:
    """Raises ValueError, with the list of the choices, for a value that is none of them."""
    if value not in tuple(choices):  # of which a mapping would ask for a hash
        raise ValueError(f"unknown {what} {value!r}: one of {', '.join(map(str, choices))}")
