"""What fits: weights, and the states of how many sequences of what length, in one memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._numbers import not_negative, positive, whole
from ..config import Model, is_symbolic, maximum, where
from .parameters import weight_bytes
from .state import state_size

__all__ = ["Footprint", "footprint", "max_batch", "max_context"]


@dataclass(frozen=True)
class Footprint:
    """What a model occupies in one memory: bytes of the weights, of each cached token, of each sequence.

    ``per_sequence`` is the constant part of a state, that of recurrent layers.
    """

    weights: float
    per_token: float
    per_sequence: float

    def bytes(self, batch_size: int, context: int) -> float:
        """Bytes of the weights and of ``batch_size`` sequences of ``context`` tokens."""
        return self.weights + batch_size * (context * self.per_token + self.per_sequence)

    def max_context(self, memory_bytes: float, batch_size: int = 1) -> int | float:
        """Tokens of context, rounded down, that each of ``batch_size`` sequences can have.

        0 when the weights do not fit; ``math.inf`` when they do and nothing grows.
        """
        batch_size = whole("batch_size", batch_size)
        free = not_negative("memory_bytes", memory_bytes) - self.weights - batch_size * self.per_sequence
        grows = batch_size * self.per_token
        return where(free < 0, 0, math.floor(free / grows) if self.per_token else math.inf)

    def max_batch(self, memory_bytes: float, context: int) -> int:
        """Sequences of ``context`` tokens that fit, rounded down; 0 when the weights do not fit."""
        one = whole("context", context, 0) * self.per_token + self.per_sequence
        if not is_symbolic(one) and one == 0:
            raise ValueError("a sequence of 0 tokens takes no memory: no batch is too large")
        return maximum(0, math.floor((not_negative("memory_bytes", memory_bytes) - self.weights) / one))


def footprint(
    config: Model,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> Footprint:
    """The footprint of a model in one memory; :func:`tokenbytoken.cost.footprint_per_gpu` divides it."""
    bytes_per_element = positive("bytes_per_element", bytes_per_element)
    recurrent_bytes_per_element = positive("recurrent_bytes_per_element", recurrent_bytes_per_element)
    size = state_size(config)
    return Footprint(
        weights=weight_bytes(config, recipe),
        per_token=size.per_token * bytes_per_element,
        per_sequence=size.recurrent * recurrent_bytes_per_element + size.constant * bytes_per_element,
    )


def max_context(
    config: Model,
    memory_bytes: float,
    batch_size: int = 1,
    *,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> int | float:
    """Tokens of context that fit beside the weights, for each of ``batch_size`` sequences; rounded down.

    0 when the weights do not fit; ``math.inf`` when they do and the state does not grow (pure Mamba).
    """
    size = footprint(config, recipe, bytes_per_element, recurrent_bytes_per_element)
    return size.max_context(memory_bytes, batch_size)


def max_batch(
    config: Model,
    memory_bytes: float,
    context: int,
    *,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> int:
    """Sequences of ``context`` tokens whose state fits beside the weights; rounded down, 0 if none does."""
    size = footprint(config, recipe, bytes_per_element, recurrent_bytes_per_element)
    return size.max_batch(memory_bytes, context)
