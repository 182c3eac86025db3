"""A GPU that is not there: tensors with shapes and a device, but without numbers.

Whoever reads a number on the host, for which a real device would have to be waited for, gets one of ``READS``. (The
device is torch's "lazy" one: of all that are neither the CPU nor "meta", it alone
lets a build for CPUs pretend.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

import tokenbytoken as tbt
from tokenbytoken.layers import MoE

__all__ = ["READS", "check_nothing_is_read", "fake_gpu", "state_on"]

READS = (DataDependentOutputException, DynamicOutputShapeException)

_MODE = FakeTensorMode()  # one for all tests: what the package caches for a device must fit the next one, too


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is made inside lies on it. No random numbers are drawn: for that torch wants a real one."""
    for name in ("uniform_", "normal_", "exponential_"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *arguments, **keywords: tensor)
    with _MODE, torch.device("lazy", 0):
        yield


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
