"""Products that read packed weights: four bits with a scale and a zero for 32 numbers, or eight with a scale a row.

Both are PyTorch's own, and both want activations in bfloat16 to be fast. How four bits are packed differs by the
processor's instruction set, so packed bytes are made where they are used and never kept. What a kernel cannot take is
known from the shape before it is called: on a CPU a wrong width does not always raise, it may end the process.

Sources: PyTorch's ``aten/src/ATen/native/cpu/int4mm_kernel.cpp`` and ``int8mm_kernel.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ...cost.recipes import GROUP, packs_eight, packs_four
from ...layers.operations import rule

__all__ = ["four_bit_places", "has_kernel", "pack_four", "product_eight", "product_four"]

_aten = torch.ops.aten
_FOUR = {
    "cpu": getattr(_aten, "_weight_int4pack_mm_for_cpu", None),
    "cuda": getattr(_aten, "_weight_int4pack_mm", None),
}
_EIGHT = getattr(_aten, "_weight_int8pack_mm", None)


@rule(*(operation for operation in (*_FOUR.values(), _EIGHT) if operation is not None))
def _packed_product(out: Tensor, x: Tensor, *_: Any) -> int:
    return 2 * out.numel() * x.shape[-1]  # widened on the way: the bytes are few, the products as many as ever


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "meta" else device.type


def product_four(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x (n, in) bfloat16 · wᵀ → (n, out) bfloat16, from what :func:`pack_four` made."""
    return _FOUR[_kind(x.device)](x, packed, GROUP, scales)  # type: ignore[misc]


def product_eight(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x (n, in) bfloat16 · (values (out, in) int8 × scales (out,) bfloat16)ᵀ → (n, out) bfloat16."""
    return _EIGHT(x, values, scales)  # type: ignore[misc]


def pack_four(codes: Tensor) -> Tensor:
    """codes (out, in), integers 0 … 15, as the product of their device wants them; their shape must fit."""
    if _kind(codes.device) == "cpu":
        return _aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    pairs = (codes[:, ::2].to(torch.uint8) << 4) | codes[:, 1::2].to(torch.uint8)
    return _aten._convert_weight_to_int4pack(pairs, _tiles(codes.shape[1]))


def _tiles(columns: int) -> int:
    """Of 16 columns each, how many a GPU's thread reads at a time; 0 if the width does not divide."""
    return next((tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0), 0)


def has_kernel(bits: Literal[4, 8], shape: Sequence[int], device: torch.device) -> bool:
    """Whether a weight of ``shape`` (…, out, in) can be multiplied packed in so many bits on ``device``."""
    rows, columns = shape[-2:]
    if bits == 8:
        return packs_eight(columns) and _works(8, _kind(device))
    fits = packs_four(rows, columns) and (_kind(device) == "cpu" or _tiles(columns) > 0)
    return fits and _works(4, _kind(device))


@lru_cache(maxsize=8)
def _works(bits: int, kind: str) -> bool:
    """Whether this build of torch has the product on this kind of device: one tiny product, compared."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2 * GROUP, generator=generator).to(kind, torch.bfloat16)
    try:
        if bits == 4:
            codes = torch.randint(0, 16, (32, 2 * GROUP), generator=generator).to(kind)
            scales = torch.rand(2, 32, 2, generator=generator).to(kind, torch.bfloat16)
            y = product_four(x, pack_four(codes), scales)
            s, z = (t.T.float().repeat_interleave(GROUP, 1) for t in scales.unbind(-1))
            w = (codes - 8) * s + z
        else:
            codes = torch.randint(-127, 128, (32, 2 * GROUP), generator=generator).to(kind, torch.int8)
            row = torch.rand(32, generator=generator).to(kind, torch.bfloat16)
            y = product_eight(x, codes, row)
            w = codes * row.float()[:, None]
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False
    want = x.float() @ w.T
    return bool(((y.float() - want).abs() <= 2**-6 * want.abs().max()).all())


@lru_cache(maxsize=16)
def four_bit_places(rows: int, columns: int, device: torch.device) -> Tensor:
    """Where :func:`pack_four` puts each code: (rows · columns,) int32, places among the half bytes, low half first.

    Found out rather than known: the layout is the device's affair. Numbers are packed whose digits in base 16 say
    where they stood.
    """
    number = torch.arange(rows * columns, device=device).view(rows, columns)
    origin = torch.zeros(rows * columns, dtype=torch.int64, device=device)
    digit = 0
    while 16**digit < rows * columns:
        origin += halves(pack_four(number >> 4 * digit & 15)).long() << 4 * digit
        digit += 1
    places = torch.empty(rows * columns, dtype=torch.int32, device=device)
    places[origin] = torch.arange(rows * columns, dtype=torch.int32, device=device)
    return places


def halves(packed: Tensor) -> Tensor:
    """The half bytes of packed codes in the order in which they lie, as one row, low half first: uint8."""
    flat = packed.contiguous().view(torch.uint8).reshape(-1)
    return torch.stack((flat & 15, flat >> 4), dim=-1).view(-1)
