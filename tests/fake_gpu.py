"""A GPU that is not there: tensors with shapes and a device, but without numbers.

The device is torch's private-use one, registered in Python, under :class:`FakeTensorMode`: operations check shapes and
devices and compute nothing; one that gets tensors of two devices raises. (``cuda`` cannot be pretended by a torch built
for CPUs.) What the package asks of a device, it asks in ``layers/devices.py``: here a compute capability is said
instead. Whoever reads a number on the host, for which a real device would have to be waited for, gets one of ``READS``,
unless ``answered`` gives zeros and notes the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import tokenbytoken as tbt
from tokenbytoken.layers import MoE, devices

__all__ = ["CAPABILITIES", "READS", "answered", "check_nothing_is_read", "fake_gpu", "state_on"]

READS = (DataDependentOutputException, DynamicOutputShapeException)
CAPABILITIES = {"T4": (7, 5), "L4": (8, 9), "H100": (9, 0)}

_MODE = FakeTensorMode()  # one for all tests: what the package caches for a device must fit the next one, too


@cache
def device() -> torch.device:
    """The device, registered when it is first wanted: torch can do that once in a process."""
    _setup_privateuseone_for_python_backend("pretended")
    return torch.device("pretended", 0)


class _ListsAsTensors(TorchFunctionMode):
    """A list among indices becomes a tensor by ``make``: torch would make one with numbers.

    (Not by a patch of ``Tensor.__getitem__``: once that is undone, torch no longer makes tensors of lists of tensors.)
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__getitem__":
            held, index = args
            at = index if isinstance(index, tuple) else (index,)
            args = held, tuple(self.make(i, device=held.device) if isinstance(i, list) else i for i in at)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch, gpu: str = "H100") -> Iterator[torch.device]:
    """What is made inside lies on it. No random numbers are drawn: for that torch wants a real one."""
    where, known = device(), devices.kind

    def kind(asked: torch.device) -> devices.Kind:
        if asked.type != where.type:
            return known(asked)
        return devices.Kind(gpu, 16 * 10**9, CAPABILITIES[gpu], on_host=False)

    monkeypatch.setattr(devices, "kind", kind)
    for draw in ("uniform_", "normal_", "exponential_"):
        monkeypatch.setattr(torch.Tensor, draw, lambda tensor, *arguments, **keywords: tensor)

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        like = made(data, dtype=dtype, device="cpu")
        return torch.empty(like.shape, dtype=like.dtype, device=where if device is None else device)

    made = torch.tensor
    # The first remembers what it was made from, and wants to compute with that.
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, tensor)
    with _MODE, where, _ListsAsTensors(tensor):
        yield where


def answered(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """From now on a number that the host reads is 0; the shapes that it read, as they come."""
    reads: list[torch.Size] = []

    def read(tensor: Tensor) -> Any:
        reads.append(tensor.shape)
        zero: Any = 0
        for size in reversed(tensor.shape):
            zero = [zero] * size
        return zero

    monkeypatch.setattr(devices, "read", read)
    return reads


def check_nothing_is_read(block: MoE, *counts: int, dtype: torch.dtype = torch.float32) -> None:
    """A mixture made in ``fake_gpu`` runs, for each number of tokens, and asks the device for no number."""
    for tokens in counts:
        x = torch.empty(tokens, 1, block.router.weight.shape[1], dtype=dtype)
        out = block(x)
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    with pytest.raises(READS):  # so a read would be seen
        block._expert_by_expert(x[:, 0], *block.router(x[:, 0]))


def state_on(model: tbt.Decoder, batch_size: int, max_length: int, padded: bool = False) -> tbt.DecoderState:
    """An empty state; whether rows are padded is read when one is made, so it is said here."""
    weight = model.embed.weight
    layers = [mixer.new_state(batch_size, max_length, weight.dtype, weight.device) for mixer in model.mixers]
    state = tbt.DecoderState(model.kind, layers, max_length, torch.empty(batch_size, dtype=torch.int64, device="meta"))
    state.padding, state.padded = torch.empty(batch_size, dtype=torch.int64), padded
    return state
