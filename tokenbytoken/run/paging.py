"""A cache in blocks of equal size: who holds which of them, and which are shared."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .._numbers import whole

__all__ = ["BlockAllocator", "Written"]


class Written(NamedTuple):
    """Where appended tokens go: a slot (block, place in it) for each, and the block to copy first, if any."""

    slots: list[tuple[int, int]]
    copy: tuple[int, int] | None  # (from, to): the old block is shared, and was about to be written


class BlockAllocator:
    """Hands out a cache in blocks of equal size, and knows which are shared (Kwon et al. 2023, arXiv 2309.06180).

    A sequence has a *block table*: entry i is the block that holds its tokens i · block_size and the following.
    Blocks lie anywhere. :meth:`fork` lets a new sequence begin with the blocks of another; a shared block is
    copied when one of its holders writes to it. The allocator keeps the books and holds no keys and values.

    All errors are ValueErrors that name the sequence or the shortage, and leave everything as it was.
    """

    def __init__(self, num_blocks: int, block_size: int, bytes_per_token: int) -> None:
        self.num_blocks, self.block_size = whole("num_blocks", num_blocks), whole("block_size", block_size)
        self.bytes_per_token = whole("bytes_per_token", bytes_per_token)
        self.tables: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}
        self.references = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))  # the lowest block is handed out first

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def reserve(self, name: Hashable, tokens: int = 0) -> None:
        """Begin the sequence ``name`` with room for ``tokens`` tokens, none of them written yet."""
        if name in self.tables:
            raise ValueError(f"sequence {name!r} exists already")
        self.tables[name] = self._take(-(-whole("tokens", tokens, 0) // self.block_size))
        self.lengths[name] = 0

    def append(self, name: Hashable, tokens: int = 1) -> Written:
        """Add tokens at the end of a sequence, taking blocks as they are needed.

        If the block that the first of them falls into is shared, it is replaced by a new one: copy its content as
        ``copy`` says before writing to the slots.
        """
        table, length, tokens = self._table(name), self.lengths[name], whole("tokens", tokens)
        first = length // self.block_size
        shared = first < len(table) and self.references[table[first]] > 1
        missing = max(0, -(-(length + tokens) // self.block_size) - len(table))
        fresh = self._take(missing + shared)
        copy = None
        if shared:
            copy = table[first], fresh.pop(0)
            self.references[copy[0]] -= 1
            table[first] = copy[1]
        table.extend(fresh)
        self.lengths[name] = length + tokens
        where = (divmod(i, self.block_size) for i in range(length, length + tokens))
        return Written([(table[block], place) for block, place in where], copy)

    def fork(self, source: Hashable, name: Hashable, tokens: int | None = None) -> None:
        """Begin the sequence ``name`` with the first ``tokens`` tokens of ``source`` (all of them), copying nothing."""
        table, length = self._table(source), self.lengths[source]
        tokens = length if tokens is None else whole("tokens", tokens, 0)
        if name in self.tables:
            raise ValueError(f"sequence {name!r} exists already")
        if tokens > length:
            raise ValueError(f"sequence {source!r} holds {length} tokens: {tokens} of them cannot be shared")
        self.tables[name] = table[: -(-tokens // self.block_size)]
        self.lengths[name] = tokens
        for block in self.tables[name]:
            self.references[block] += 1

    def free(self, name: Hashable) -> None:
        """End a sequence; blocks that no other one holds can be handed out again."""
        for block in reversed(self._table(name)):
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)
        del self.tables[name], self.lengths[name]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the blocks in use, each counted once."""
        return (self.num_blocks - self.free_blocks) * self.block_size * self.bytes_per_token

    @property
    def used_bytes(self) -> int:
        """Bytes that hold a token, those of a shared token counted once."""
        filled: dict[int, int] = {}
        for name, table in self.tables.items():
            for i, block in enumerate(table):
                inside = min(self.block_size, max(0, self.lengths[name] - i * self.block_size))
                filled[block] = max(filled.get(block, 0), inside)
        return sum(filled.values()) * self.bytes_per_token

    @property
    def wasted_bytes(self) -> int:
        """Bytes reserved that hold no token."""
        return self.reserved_bytes - self.used_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that the sequences would use in addition if nothing were shared."""
        return sum(self.lengths.values()) * self.bytes_per_token - self.used_bytes

    def _table(self, name: Hashable) -> list[int]:
        if name not in self.tables:
            raise ValueError(f"there is no sequence {name!r}")
        return self.tables[name]

    def _take(self, count: int) -> list[int]:
        if count > self.free_blocks:
            raise ValueError(f"{count} more blocks are needed, {self.free_blocks} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken
