"""From the tensors of a checkpoint, none of them read yet, to the parameters of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..decoder import Decoder

__all__ = ["Blocks", "Part", "Stored", "fill", "kept_dtype", "match", "usable_device", "usable_dtype"]

Module = TypeVar("Module", bound=nn.Module)


class Part(NamedTuple):
    """A stretch of one dimension of a stored tensor: what one rank of a tensor-parallel group reads of it."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


class Blocks(NamedTuple):
    """A matrix in blocks of 32 numbers of a row, x = scale × code + minimum.

    ``codes`` (out, in), integers, are 0 … 15; ``scales`` and ``minima`` (out, in / 32) float32.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor


class Stored(NamedTuple):
    """A tensor of a checkpoint that is not read yet: its shape, and how to read all of it or a part.

    ``blocks`` reads a matrix that is stored in four bits as it is stored, its codes into the tensor that it is given,
    or into a new one of bytes for None; it is None itself for any other tensor.
    """

    shape: tuple[int, ...]
    read: Callable[[Part | None], Tensor]
    blocks: Callable[[Tensor | None], Blocks] | None = None


def usable_device(device: str | torch.device) -> torch.device:
    """``device``, tried out; ValueError for one that this machine, or this build of torch, does not have."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None


def usable_dtype(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, if a model can run in it; else ValueError."""
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, float64, bfloat16 or float16, not {dtype!r}")
    return dtype


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What a tensor of that name is kept in, in a model of ``dtype``."""
    # DeepSeek-V3's router bias is kept in float32: rounded, it would choose other experts.
    return torch.promote_types(dtype, torch.float32) if name.endswith(".router.selection_bias") else dtype


def match(tensors: Iterable[tuple[str, Stored]], slots: Mapping[str, Tensor], spare: str = "") -> dict[str, Stored]:
    """What the checkpoint holds for each of the ``slots``, in their order; it may hold a tensor ``spare`` more.

    Raises ValueError for a tensor that is missing, misshapen, held twice or without a slot.
    """
    found: dict[str, Stored] = {}
    for name, stored in tensors:
        if name in found:
            raise ValueError(f"the checkpoint holds tensor {name} twice")
        found[name] = stored
    found.pop(spare, None)
    if missing := [name for name in slots if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the checkpoint lacks tensor {missing[0]}{more}")
    if unplaced := [name for name in found if name not in slots]:
        raise ValueError(f"tensor {unplaced[0]} of the checkpoint has no place in the model")
    for name, slot in slots.items():
        if found[name].shape != tuple(slot.shape):
            raise ValueError(f"tensor {name} has shape {found[name].shape}, the config asks for {tuple(slot.shape)}")
    return {name: found[name] for name in slots}


def fill(
    model: Module,
    tensors: Iterable[tuple[str, Stored]],
    dtype: torch.dtype,
    device: torch.device,
    parts: Mapping[str, Part] | None = None,
    wrap: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    whole: Decoder | None = None,
) -> Module:
    """Give every parameter of a meta model its tensor; the names are the model's own.

    A tensor-parallel model reads only the ``parts``, and ``wrap`` turns what was read into what it holds; the
    meta model ``whole`` then says what shapes the checkpoint must have. Raises ValueError as :func:`match` does, and
    for a dtype that no model runs in.
    """
    usable_dtype(dtype)
    tied = isinstance(model, Decoder) and model.config.tie_embeddings
    slots = dict((whole or model).named_parameters())  # no tied head; some checkpoints store that matrix twice
    readers = match(tensors, slots, spare="head.weight" if tied else "")

    def read(name: str) -> Tensor:
        part = parts.get(name) if parts else None
        return readers[name].read(part).to(device, kept_dtype(name, dtype))

    # Expanding blocks is numpy's work, which runs outside the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, tensor in zip(slots, pool.map(read, slots), strict=True):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(wrap(name, tensor), requires_grad=False))
    if isinstance(model, Decoder) and model.config.tie_embeddings and isinstance(model.embed, nn.Embedding):
        model.head.weight = model.embed.weight
    return model
