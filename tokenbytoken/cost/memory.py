"""What the state of a sequence takes, and what fits: weights, working memory, and the states of how many readers.

>>> from tokenbytoken.models import published
>>> state_bytes_per_token(published["llama-3.1-405b"])
516096
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .._numbers import not_negative, positive, whole
from ..config import DecoderConfig, Model, Number, StateSize, is_symbolic, maximum, where
from .parameters import known, weight_bytes, whole_decoder

__all__ = [
    "Footprint", "RecurrentState", "WorkingMemory", "footprint", "max_batch", "max_context", "recurrent_state",
    "state_bytes", "state_bytes_per_token", "state_size", "working_memory",
]  # fmt: skip


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


@dataclass(frozen=True)
class Footprint:
    """What a model occupies in one memory: bytes of the weights, of each cached token, of each sequence.

    ``per_sequence`` is the constant part of a state, that of recurrent layers. ``dealt_to``: so many memories share
    the sequences of a batch, each of which lies whole in one; what is said here is then that of one memory.
    """

    weights: float
    per_token: float
    per_sequence: float
    dealt_to: Number = 1

    def bytes(self, batch_size: int, context: int) -> float:
        """Bytes of the weights and of ``batch_size`` sequences of ``context`` tokens, in the fullest memory."""
        here = math.ceil(batch_size / self.dealt_to)
        return self.weights + here * (context * self.per_token + self.per_sequence)

    def max_context(self, memory_bytes: float, batch_size: int = 1) -> int | float:
        """Tokens of context, rounded down, that each of ``batch_size`` sequences can have.

        0 when the weights do not fit; ``math.inf`` when they do and nothing grows.
        """
        here = math.ceil(whole("batch_size", batch_size) / self.dealt_to)
        free = not_negative("memory_bytes", memory_bytes) - self.weights - here * self.per_sequence
        grows = here * self.per_token
        return where(free < 0, 0, math.floor(free / grows) if self.per_token else math.inf)

    def max_batch(self, memory_bytes: float, context: int) -> int:
        """Sequences of ``context`` tokens that fit, rounded down; 0 when the weights do not fit."""
        one = whole("context", context, 0) * self.per_token + self.per_sequence
        if not is_symbolic(one) and one == 0:
            raise ValueError("a sequence of 0 tokens takes no memory: no batch is too large")
        here = math.floor((not_negative("memory_bytes", memory_bytes) - self.weights) / one)
        return self.dealt_to * maximum(0, here)


@dataclass(frozen=True, kw_only=True)
class WorkingMemory:
    """Bytes of one GPU that a server uses besides weights and state: an estimate, not a bound.

    ``reserved``: never given to the model (the driver's context, buffers of the messages, what lies between blocks).
    ``graphs``: passes recorded as graphs. ``activations``: those of the largest pass.
    """

    reserved: float
    graphs: float
    activations: float

    @property
    def bytes(self) -> float:
        return self.reserved + self.graphs + self.activations


#: vLLM leaves a tenth of the memory alone unless told otherwise (gpu_memory_utilization, 0.9), and says that its
#: graphs take 1 to 3 GiB a GPU (vllm/worker/model_runner.py, 2024): here 2. It reads prompts in pieces of 8,192 tokens.
RESERVED, GRAPHS, CHUNK = 0.1, 2 * 2**30, 8192
_PRODUCTS = frozenset({"attention", "mamba", "mixer", "feed_forward", "expert", "router"})


def working_memory(
    config: Model, memory_bytes: float, tokens: Number = CHUNK, *, tensor_parallel: Number = 1, copied: bool = False
) -> WorkingMemory:
    """What one GPU of ``memory_bytes`` needs besides weights and state, when a pass pushes ``tokens`` tokens.

    Activations: the hidden state twice, before and after the norm, and what the products of the widest mixer or
    feed-forward write, two bytes a number; ``tensor_parallel`` GPUs share what products write, unless the layer is
    ``copied`` to each. Scores are never stored, as in kernels that go through them piece by piece. The shares are
    those that one server takes by default; another, or another setting, needs more or less.
    """
    decoder, tokens = whole_decoder(config), whole("tokens", tokens)
    shared = 1 if copied else whole("tensor_parallel", tensor_parallel)
    memory = positive("memory_bytes", memory_bytes)
    numbers = 2 * decoder.hidden_size + _widest(decoder) / shared
    return WorkingMemory(reserved=RESERVED * memory, graphs=GRAPHS, activations=2 * tokens * numbers)


@lru_cache(maxsize=64)
def _widest(config: DecoderConfig) -> int:
    """Numbers a token that the products of the widest mixer or feed-forward write."""
    hidden = config.hidden_size
    parts = [part for layer in config.layers for part in (layer.mixer, layer.feed_forward) if part is not None]
    return max(sum(w.rows * w.used for w in part.weights(hidden) if w.role in _PRODUCTS) for part in set(parts))


def footprint(
    config: Model,
    recipe: str = "bf16",
    bytes_per_element: float = 2,
    recurrent_bytes_per_element: float = 4,
) -> Footprint:
    """The footprint of a model in one memory; :func:`~tokenbytoken.cost.footprint_per_gpu` divides it."""
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
