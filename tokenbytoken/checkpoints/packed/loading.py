"""From the tensors of a checkpoint to a decoder that multiplies from packed weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from ...decoder import Decoder
from ...layers.attention import Attention
from ...layers.feed_forward import Experts, SwiGLU
from ...layers.norm import RMSNorm
from ..tensors import Blocks, Part, Stored, fill, match, usable_dtype
from .kernels import has_kernel
from .layers import (
    EightBitEmbedding,
    EightBitExperts,
    EightBitLinear,
    FourBitLinear,
    LoneRowNorm,
    PackedAttention,
    PackedSwiGLU,
    rows_of_eight_bits,
)

__all__ = ["WEIGHTS", "Weights", "fill_packed"]

Weights = Literal["float", "packed", "int8"]
WEIGHTS: tuple[Weights, ...] = ("float", "packed", "int8")


class _Packer:
    """Takes the tensors that it packs out of ``readers``; what is left there is to be expanded."""

    def __init__(self, readers: dict[str, Stored], dtype: torch.dtype, device: torch.device) -> None:
        self.readers, self.dtype, self.device = readers, dtype, device
        self._codes = torch.empty(0, dtype=torch.int32)

    def four(self, *names: str) -> FourBitLinear | None:
        """The weights of these names, one under the other, in four bits; None if one is not or does not fit."""
        read = []
        for name in names:
            stored = self.readers.get(f"{name}.weight")
            if stored is None or stored.blocks is None or f"{name}.bias" in self.readers:
                return None
            if not has_kernel(4, stored.shape, self.device):
                return None
            read.append(stored.blocks)
        shapes = [self.readers.pop(f"{name}.weight").shape for name in names]
        codes = self._room(sum(rows for rows, _ in shapes), shapes[0][1])
        parts = codes.split([rows for rows, _ in shapes])
        held = [blocks(part) for blocks, part in zip(read, parts, strict=True)]
        scales, minima = (torch.cat(part).to(self.device) for part in zip(*(each[1:] for each in held), strict=True))
        return FourBitLinear(Blocks(codes.to(self.device), scales, minima))

    def _room(self, rows: int, columns: int) -> Tensor:
        """Room for codes, the same for every matrix: new memory for each would take longer than packing it."""
        if self._codes.numel() < rows * columns:
            self._codes = torch.empty(rows * columns, dtype=torch.int32)
        return self._codes[: rows * columns].view(rows, columns)

    def table(self, name: str) -> tuple[Tensor, Tensor] | None:
        """The same for a table with a row for each token, which is never expanded as a whole."""
        stored = self.readers.get(name)
        if stored is None or not has_kernel(8, stored.shape, self.device):
            return None
        del self.readers[name]
        rows, columns = stored.shape
        values = torch.empty(rows, columns, dtype=torch.int8, device=self.device)
        scales = torch.empty(rows, dtype=torch.bfloat16, device=self.device)
        step = max(1, 2**16 // columns)
        for start in range(0, rows, step):
            part = Part(0, start, min(start + step, rows))
            some = rows_of_eight_bits(stored.read(part).to(self.device, torch.float32))
            part.of(values)[:], part.of(scales)[:] = some
        return values, scales

    def eight(self, name: str) -> tuple[Tensor, Tensor] | None:
        """The tensor of this name in rows of eight bits; None if it does not fit."""
        stored = self.readers.get(name)
        if stored is None or not has_kernel(8, stored.shape, self.device):
            return None
        del self.readers[name]
        try:
            return rows_of_eight_bits(stored.read(None).to(self.device, torch.float32))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def fill_packed(
    model: Decoder,
    tensors: Iterable[tuple[str, Stored]],
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Give a meta model its tensors, the large ones packed; see :func:`~tokenbytoken.checkpoints.sources.load`."""
    usable_dtype(dtype)
    tied = model.config.tie_embeddings
    readers = match(tensors, dict(model.named_parameters()), spare="head.weight" if tied else "")
    if weights == "packed" and not any(stored.blocks for stored in readers.values()):
        raise ValueError("no tensor of this source is stored in blocks of four bits: there is nothing to keep packed")
    packer = _Packer(readers, dtype, device)
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm):
            quick = LoneRowNorm(module.normalized_shape, eps=module.eps, device="meta")
            model.set_submodule(name, quick)
    if weights == "packed":
        _four_bits(model, packer)
    else:
        _eight_bits(model, packer)
    if (table := packer.table("embed.weight")) is not None:
        model.set_submodule("embed", EightBitEmbedding(*table, dtype))
        if tied:
            model.set_submodule("head", EightBitLinear(*table))
    if not tied and (rows := packer.table("head.weight")) is not None:
        model.set_submodule("head", EightBitLinear(*rows))
    return fill(model, readers.items(), dtype, device)


def _four_bits(model: Decoder, packer: _Packer) -> None:
    for i, layer in enumerate(model.layers):
        mixer, feed_forward = layer.mixer, layer.feed_forward
        name = f"layers.{i}.mixer."
        if isinstance(mixer, Attention) and (qkv := packer.four(name + "q_proj", name + "k_proj", name + "v_proj")):
            layer.mixer = PackedAttention(mixer, qkv)
        name = f"layers.{i}.feed_forward."
        if isinstance(feed_forward, SwiGLU) and (both := packer.four(name + "gate_proj", name + "up_proj")):
            layer.feed_forward = PackedSwiGLU(feed_forward, both)
    for name, module in list(model.layers.named_modules(prefix="layers")):
        if isinstance(module, nn.Linear) and (packed := packer.four(name)):
            model.set_submodule(name, packed)


def _eight_bits(model: Decoder, packer: _Packer) -> None:
    for name, module in list(model.layers.named_modules(prefix="layers")):
        if isinstance(module, Experts):
            names = [leaf for leaf, _ in module.named_parameters()]
            packed = {leaf: found for leaf in names if (found := packer.eight(f"{name}.{leaf}"))}
            model.set_submodule(name, EightBitExperts(module, packed))
        elif isinstance(module, nn.Linear) and (rows := packer.eight(f"{name}.weight")):
            bias = packer.readers.pop(f"{name}.bias", None)
            held = None if bias is None else bias.read(None).to(packer.device, packer.dtype)
            model.set_submodule(name, EightBitLinear(*rows, held))
