"""The cache: what a layer keeps of each token, in tensors that grow along one axis.

Keys, values and latents differ in shape alone: time is the last axis but one of them all, (B, K, S, D) for the keys
and values of heads, (B, S, R + rope) for latents. How their numbers are kept is a value, a :class:`Format`; this file
knows the plain one, which keeps them as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["PLAIN", "Cache", "Entry", "Format", "Plain"]


class Format(Protocol):
    """How a series (…, S, width) is kept: as one tensor or several, each with the same time axis, the last but one.

    Formats are compared (a state serves models of an equal format) and copied with a model: a frozen dataclass at the
    top of a module is one. An entry must not depend on others, so that chunks equal the whole.
    """

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors that hold a series of this shape and dtype, without a token yet."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """What is written for new entries x (…, T, width): a tensor for each of those of :meth:`empty`."""

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The entries (…, S, width) that are read, in ``dtype``."""


@dataclass(frozen=True)
class Plain:
    """Numbers as they come; reading gives a view."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        # Zeros rather than uninitialised memory: what lies past the length is masked, and 0 × NaN would not be.
        return (torch.zeros(*shape, dtype=dtype, device=device),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0]


PLAIN = Plain()


class Entry(NamedTuple):
    """What a coarse format may do to the numbers that a mixer keeps of a token.

    One scale serves ``tile`` of them, and the last ``tail`` of them stay as they are.
    """

    tile: int
    tail: int = 0


class Cache:
    """Series that grow together, allocated once: ``cache[name]`` is one, as it is read, (…, max_length, width).

    ``parts[name]`` is what is held of it: for the plain format the one tensor that ``cache[name]`` is. Entries past
    the length, which the owner keeps, are zeros and never read.
    """

    def __init__(self, parts: Mapping[str, tuple[Tensor, ...]], dtype: torch.dtype, format: Format = PLAIN) -> None:
        self.parts = dict(parts)
        self.dtype, self.format = dtype, format

    @classmethod
    def empty(
        cls,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        format: Format = PLAIN,
        **shapes: Sequence[int],
    ) -> Cache:
        """A cache without tokens, from the shape (B, …, max_length, width) of each series."""
        device = torch.device(device)
        return cls({name: format.empty(shape, dtype, device) for name, shape in shapes.items()}, dtype, format)

    def __getitem__(self, name: str) -> Tensor:
        return self.format.decode(self.parts[name], self.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [part for parts in self.parts.values() for part in parts]

    def append(self, start: int, **new: Tensor) -> tuple[Tensor, ...]:
        """Write (…, T, width) of each series at ``start``; returns all that each holds, (…, start + T, width).

        The order is that of the arguments. Raises ValueError if a series is left out.
        """
        if new.keys() != self.parts.keys():
            raise ValueError(f"a token has {', '.join(self.parts)} in this cache, not {', '.join(new)}")
        held = []
        for name, x in new.items():
            end = start + x.shape[-2]
            for part, fresh in zip(self.parts[name], self.format.encode(x), strict=True):
                part[..., start:end, :] = fresh
            held.append(self.format.decode(tuple(part[..., :end, :] for part in self.parts[name]), self.dtype))
        return tuple(held)

    def nbytes(self, length: int | None = None) -> int:
        """Bytes allocated, or those of the first ``length`` tokens."""
        return sum(t.nbytes if length is None else length * (t.nbytes // t.shape[-2]) for t in self.tensors)

    def mark(self) -> None:
        """Nothing to remember: a cache is cut back by its length alone."""

    def rewind(self, mark: None) -> None:
        """Nothing to restore: entries past the length are never read."""

    def gather(self, rows: Sequence[int], start: int, end: int, max_length: int, shift: int = 0) -> Cache:
        """A new cache: tokens ``start`` … ``end`` of the chosen rows, placed at ``shift``."""

        def moved(part: Tensor) -> Tensor:
            fresh = part.new_zeros(len(rows), *part.shape[1:-2], max_length, part.shape[-1])
            fresh[..., shift : shift + end - start, :] = part[..., start:end, :][list(rows)]
            return fresh

        return self._of([self], lambda parts: moved(*parts))

    @classmethod
    def concat(cls, caches: Sequence[Cache]) -> Cache:
        """Caches of one kind and equal max_length, one under the other in the batch axis."""
        return cls._of(caches, torch.cat)

    @classmethod
    def _of(cls, caches: Sequence[Cache], make: Callable[[list[Tensor]], Tensor]) -> Cache:
        """The cache whose every tensor is made of the same one of all ``caches``."""
        first = caches[0]
        parts = {
            name: tuple(make(list(same)) for same in zip(*(cache.parts[name] for cache in caches), strict=True))
            for name in first.parts
        }
        return cls(parts, first.dtype, first.format)
