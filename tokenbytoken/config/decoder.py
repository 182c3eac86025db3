"""A whole decoder, as data: a list of layers, each a pair (mixer, feed-forward), and the inventory of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from .._numbers import whole
from .closed_forms import FeedForwardConfig, MixerConfig, Weight, positive_fields

__all__ = ["DecoderConfig", "LayerConfig", "Model"]


class Model(Protocol):
    """What can be counted: a decoder, or a published model of which only a part is known."""

    @property
    def name(self) -> str: ...

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixer of each layer."""

    def weights(self) -> tuple[Weight, ...]:
        """Every tensor of the model; ValueError where they are not known."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)) unless it has none (pure Mamba)."""

    mixer: MixerConfig
    feed_forward: FeedForwardConfig | None

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        """Every tensor of the layer, its norms included."""
        yield Weight("mixer_norm", "norm", hidden_size)
        yield from self.mixer.weights(hidden_size)
        if self.feed_forward is not None:
            yield Weight("feed_forward_norm", "norm", hidden_size)
            yield from self.feed_forward.weights(hidden_size)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A whole decoder: embedding, layers, final norm, output head.

    ``max_positions`` is what the publisher states, and is not enforced: a state has its own limit.
    ``mtp_layers`` counts the multi-token-prediction modules that a checkpoint stores beside the model
    (DeepSeek-V3: one). They are counted apart, and a ``Decoder`` does not build them.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_positions: int | None = None
    mtp_layers: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        positive_fields(self, "vocab_size", "hidden_size")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "mtp_layers", whole("DecoderConfig.mtp_layers", self.mtp_layers, 0))
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"DecoderConfig.norm_eps must be a positive number, not {self.norm_eps}")
        if not self.layers:
            raise ValueError("DecoderConfig.layers is empty: a decoder needs at least one layer")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], name: str = "") -> DecoderConfig:
        """Read a Hugging Face ``config.json``.

        Accepts the spelling of transformers 4 (``rope_theta``, ``rope_scaling``) and 5
        (``rope_parameters``). Raises ValueError, naming the field, for a missing field, for a value of the wrong
        type and for one that this package cannot represent. A null is a missing field. Fields of training,
        initialisation and storage are ignored.
        """
        from .huggingface import read  # which builds what this file defines

        return read(hf, name)

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixer of each layer."""
        return tuple(layer.mixer for layer in self.layers)

    def weights(self) -> tuple[Weight, ...]:
        """Every tensor of the model, layer by layer; a tied head is not listed a second time."""
        return _weights(self)

    def mtp_weights(self) -> tuple[Weight, ...]:
        """The multi-token-prediction modules, without the embedding and head that they share with the model.

        One module is one more layer of the last kind, three norms, and a projection that takes the hidden
        state and the next token's embedding, side by side, back to the hidden size (arXiv 2412.19437, 2.2).
        """
        hidden = self.hidden_size
        module = (
            *self.layers[-1].weights(hidden),
            Weight("joining_projection", "projection", hidden, 2 * hidden),
            Weight("norms", "norm", 3 * hidden),
        )
        return module * self.mtp_layers


@lru_cache(maxsize=64)
def _weights(config: DecoderConfig) -> tuple[Weight, ...]:
    hidden, vocab = config.hidden_size, config.vocab_size
    found = [Weight("embed", "embedding", vocab, hidden)]
    for i, layer in enumerate(config.layers):
        found += [weight._replace(layer=i) for weight in layer.weights(hidden)]
    found.append(Weight("norm", "norm", hidden))
    if not config.tie_embeddings:
        found.append(Weight("head", "head", vocab, hidden))
    return tuple(found)
