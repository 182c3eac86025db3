"""GGUF, read as the library reads it but faster: what costs it most is written out here, and no more.

Bit for bit the library's values; a test holds it. Opening SmolLM2's file takes about a tenth of the library's time.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .tensors import Blocks

if TYPE_CHECKING:
    import gguf

__all__ = ["FOUR_BITS", "expand", "four_bit_blocks", "gguf_reader"]


_opening = Lock()


def gguf_reader(path: Path) -> gguf.GGUFReader:
    """The fields and tensors of a GGUF file, mapped and not yet expanded; ValueError if it is none."""
    path = Path(path).resolve()
    status = path.stat()
    with _opening:  # model and tokenizer may be loaded side by side: they share one reader
        return _gguf_reader(path, status.st_mtime_ns, status.st_size)  # a file that was replaced is read anew


@lru_cache(maxsize=2)
def _gguf_reader(path: Path, modified: int, size: int) -> gguf.GGUFReader:
    import gguf

    class Reader(gguf.GGUFReader):
        """The library's reader, without an array object for each of the 98,000 strings of a vocabulary (1.4 s)."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
            first = orig_offs + 12
            if types[1] in self.gguf_scalar_to_np:
                values = self._get(first, self.gguf_scalar_to_np[types[1]], count[0])
                if len(values) != count[0]:
                    raise ValueError(f"an array of {count[0]} numbers runs past the end of the file")
                return 12 + values.nbytes, [kind, count, values], [2], types
            if types[1] != gguf.GGUFValueType.STRING:
                return super()._get_field_parts(orig_offs, raw_type)
            parts: list[Any] = [kind, count]
            offset = first
            raw = memoryview(self.data)  # type: ignore[arg-type]  # numpy's arrays are buffers
            size = Struct("<Q" if self.endianess == gguf.GGUFEndian.LITTLE else ">Q").unpack_from
            try:
                for _ in range(count[0]):
                    start = offset + 8
                    offset = start + size(raw, offset)[0]
                    parts.append(raw[start:offset])
            except StructError:
                offset = len(raw) + 1
            if offset > len(raw):
                raise ValueError(f"an array of {count[0]} strings runs past the end of the file")
            return offset - orig_offs, parts, list(range(2, len(parts))), types

    try:
        return Reader(path)
    except Exception as error:  # a damaged file fails in many ways, wherever its bytes stop making sense
        raise ValueError(f"{path.name} is not a readable GGUF file: {error}") from None


# Blocks expanded at once: what is read and written for them stays in the processor's cache.
_BLOCKS = 2**15


def expand(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
    """The numbers of a tensor as one long row of its own memory, float32 where ``kind`` is quantised.

    The two block formats of the book's model are written out here because the library takes longer
    for them; for all others it does the work. Q4_1 holds 32 numbers in 20 bytes, a scale d and a minimum m in
    float16 and 32 four-bit q: x = d q + m, the low halves of the 16 bytes first. Q8_0 holds d and 32 int8: x = d q.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if kind not in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        try:
            return torch.from_numpy(np.array(dequantize(data.reshape(1, -1), kind)).reshape(-1))
        except NotImplementedError:
            raise ValueError(f"GGUF tensors of type {kind.name} cannot be expanded") from None
    size, nbytes = GGML_QUANT_SIZES[kind]
    raw = data.reshape(-1, nbytes)
    out = torch.empty(len(raw), size)
    for first in range(0, len(raw), _BLOCKS):
        block = torch.from_numpy(raw[first : first + _BLOCKS].copy())  # the file itself is mapped read-only
        x = out[first : first + _BLOCKS]
        if kind == GGMLQuantizationType.Q8_0:
            d = block[:, :2].contiguous().view(torch.float16).float()  # (blocks, 1)
            torch.mul(block[:, 2:].view(torch.int8), d, out=x)
        else:
            d, m = block[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
            torch.bitwise_and(block[:, 4:], 15, out=x[:, :16])
            torch.bitwise_right_shift(block[:, 4:], 4, out=x[:, 16:])
            x.mul_(d).add_(m)
    return out.view(-1)


# Formats of four bits with a scale for 32 numbers.
FOUR_BITS = ("Q4_0", "Q4_1")


def four_bit_blocks(
    data: np.ndarray, kind: gguf.GGMLQuantizationType, rows: int, codes: Tensor | None = None
) -> Blocks:
    """A matrix of ``rows`` rows as it is stored, in one of :data:`FOUR_BITS`.

    The codes are put into ``codes`` (…, in) of any integers, if that is given. Q4_0 is Q4_1 without a minimum of its
    own: x = d (q − 8).
    """
    from gguf import GGML_QUANT_SIZES

    _, nbytes = GGML_QUANT_SIZES[kind]
    head = nbytes - 16
    raw = torch.from_numpy(data.reshape(-1, nbytes).copy())
    if codes is None:
        codes = torch.empty(rows, len(raw) * 32 // rows, dtype=torch.uint8)
    pairs = raw[:, head:].to(codes.dtype).unflatten(0, (*codes.shape[:-1], -1))
    low, high = codes.unflatten(-1, (-1, 2, 16)).unbind(-2)
    torch.bitwise_and(pairs, 15, out=low)
    torch.bitwise_right_shift(pairs, 4, out=high)
    factors = raw[:, :head].contiguous().view(torch.float16).float()
    d = factors[:, 0].view(rows, -1)
    return Blocks(codes, d, factors[:, 1].view(rows, -1) if head == 4 else -8 * d)
