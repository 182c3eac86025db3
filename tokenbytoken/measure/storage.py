"""Tensors as bytes of their storages: which ones an object holds, and which bytes of a storage a view shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Cover", "shown", "storage", "tensors"]


class Cover:
    """Which bytes of one storage were touched, as sorted intervals that do not overlap."""

    def __init__(self) -> None:
        self.start = self.end = np.empty(0, dtype=np.int64)
        self.bytes = 0
        self.known: set[tuple[Any, ...]] = set()

    def add(self, tensor: Tensor) -> int:
        """Touch what ``tensor`` shows of the storage; returns how many bytes are new."""
        size = tensor.element_size()
        # (stride, length) of the dimensions that are walked, innermost first; an expanded one has stride 0
        walk = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s > 0)
        region = (tensor.storage_offset(), *walk)
        if region in self.known or not tensor.numel():
            return 0
        self.known.add(region)
        run = 1
        while walk and walk[0][0] == run:
            run *= walk.pop(0)[1]
        begin = np.array([tensor.storage_offset() * size])
        for stride, n in walk:
            begin = np.add.outer(begin, np.arange(n) * (stride * size)).ravel()
        start = np.concatenate([self.start, begin])
        order = start.argsort(kind="stable")
        start = start[order]
        # Where each interval ends, or one before it that reaches further.
        end = np.maximum.accumulate(np.concatenate([self.end, begin + run * size])[order])
        gap = start[1:] > end[:-1]
        self.start, self.end = start[np.append(True, gap)], end[np.append(gap, True)]
        before, self.bytes = self.bytes, int((self.end - self.start).sum())
        return self.bytes - before


def shown(tensor: Tensor) -> int:
    """Bytes that a tensor shows of its storage; what an expanded dimension repeats is one."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(n if stride else min(n, 1) for n, stride in shape)


def storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # distinct on the meta device too, where data_ptr is 0


_PLAIN = (int, float, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)  # hold no tensors


def tensors(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in a nest of containers, modules (parameters and buffers) and plain objects."""
    seen = set() if _seen is None else _seen
    if isinstance(value, Tensor):
        yield value
    elif value is None or isinstance(value, _PLAIN) or id(value) in seen:
        return
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()  # quantised weights are buffers
    else:
        seen.add(id(value))
        if isinstance(value, Mapping):
            parts: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple, set)):
            parts = value
        else:
            parts = getattr(value, "__dict__", {}).values()
        for part in parts:
            yield from tensors(part, seen)
