"""What a device can do, and reading from it: the one place that asks torch about either.

Whether a product may be asked for in some format, and whether the host has to wait for a number, is decided by these
answers everywhere. So a test can pretend another device: it replaces :func:`kind` and :func:`read`, here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["BF16", "FP8", "Kind", "kind", "read"]

#: NVIDIA's compute capabilities from which on a GPU multiplies in these formats.
BF16, FP8 = (8, 0), (8, 9)
_FLOATS = {torch.float64, torch.float32, torch.float16}


@dataclass(frozen=True)
class Kind:
    """A device's name and memory in bytes; ``capability``: an NVIDIA GPU's (major, minor), None for others.

    ``on_host``: its numbers lie where Python runs (a CPU, or no numbers at all), so that reading one waits for nothing.
    """

    name: str
    memory: int = 0
    capability: tuple[int, int] | None = None
    on_host: bool = True

    @property
    def half(self) -> torch.dtype:
        """The 16-bit format to multiply in: bfloat16, or float16 on a GPU without products in bfloat16 (T4: 7.5)."""
        return torch.bfloat16 if self.multiplies(torch.bfloat16) else torch.float16

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether matrices of ``dtype`` are multiplied by instructions or kernels made for it, not by a detour."""
        if dtype in _FLOATS:
            return True
        if dtype == torch.bfloat16:
            return self.on_host or (self.capability or (0, 0)) >= BF16
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return (self.capability or (0, 0)) >= FP8
        return False


@lru_cache(maxsize=16)
def kind(device: torch.device) -> Kind:
    """What torch says of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = torch.cuda.get_device_capability(device)
        return Kind(torch.cuda.get_device_name(device), properties.total_memory, capability, on_host=False)
    return Kind(device.type, on_host=device.type in ("cpu", "meta"))


def read(tensor: Tensor) -> Any:
    """The numbers of a tensor as Python's, nested as its axes are: the host waits for the device here."""
    return tensor.tolist() if tensor.dim() else tensor.item()
