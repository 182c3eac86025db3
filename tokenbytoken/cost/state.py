"""How many bytes the state of a sequence takes: what grows with each token, and what does not.

>>> from tokenbytoken.models import published
>>> state_bytes_per_token(published["llama-3.1-405b"])
516096
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .._numbers import positive, whole
from ..config import Model, StateSize
from .parameters import known

__all__ = ["RecurrentState", "recurrent_state", "state_bytes", "state_bytes_per_token", "state_size"]


class RecurrentState(NamedTuple):
    """Numbers that the recurrent layers of one sequence keep, whatever its length."""

    scan: int
    convolution: int


def state_size(config: Model) -> StateSize:
    """Numbers that all layers together keep of one sequence."""
    return _state_size(known(config))


@lru_cache(maxsize=64)
def _state_size(config: Model) -> StateSize:
    sizes = [mixer.state() for mixer in config.mixers]
    return StateSize(*(sum(numbers) for numbers in zip(*sizes, strict=True)))


def recurrent_state(config: Model) -> RecurrentState:
    """Elements of the constant state of one sequence: the scan's I x N a layer and the convolution's.

    This book keeps the last ``conv_size - 1`` inputs of the convolution, which is all that the next step needs.
    """
    size = state_size(config)
    return RecurrentState(scan=size.recurrent, convolution=size.constant)


def state_bytes_per_token(config: Model, bytes_per_element: float = 2) -> int:
    """Bytes by which the state of a sequence grows with each token.

    Attention caches a key and a value per KV head, ``2 K D`` numbers a layer; latent attention caches
    ``R + rope`` numbers a layer; Mamba caches nothing that grows. ``bytes_per_element`` may be a
    fraction (6-bit elements: 0.75).
    """
    return round(state_size(config).per_token * positive("bytes_per_element", bytes_per_element))


def state_bytes(
    config: Model,
    batch_size: int,
    context: int,
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> int:
    """Bytes of the state of ``batch_size`` sequences of ``context`` tokens each.

    The cache and the inputs kept for the convolution take ``bytes_per_element``, the scan's state
    ``recurrent_bytes_per_element``.
    """
    batch_size, context = whole("batch_size", batch_size), whole("context", context, 0)
    size = state_size(config)
    elements = context * size.per_token + size.constant
    growing = elements * positive("bytes_per_element", bytes_per_element)
    scan = size.recurrent * positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    return round(batch_size * (growing + scan))
