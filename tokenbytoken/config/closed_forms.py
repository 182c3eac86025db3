"""What a config must say of itself, so that everything else only adds up.

A *mixer* (attention, Mamba, …) and a *feed-forward* are known to the rest of the package by two Protocols: their
weights, the state that they keep, the FLOPs of a pass, how they are dealt to several GPUs. A config that keeps them
can be counted, predicted, sized and built without an edit anywhere. The closed forms are to run on numbers and on
symbols (:mod:`tokenbytoken._algebra`): branches go through ``where``, ``minimum`` and ``maximum``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, Protocol

from .._algebra import Number, is_symbolic
from .._numbers import whole

__all__ = ["FeedForwardConfig", "Flops", "MixerConfig", "Role", "StateSize", "Weight", "pairs"]

#: What a weight is for. Recipes choose by it which weights become small; the linear ones multiply every token.
Role = Literal[
    "embedding",
    "head",
    "attention",  # the projections of an attention mixer
    "mamba",  # the four linear layers of a Mamba mixer
    "mixer",  # the linear layers of any other mixer
    "feed_forward",  # a dense feed-forward or a shared expert
    "expert",  # a routed expert
    "router",
    "router_bias",
    "projection",  # joins the two inputs of a multi-token-prediction module
    "recurrence",  # Mamba's convolution, A and D: weights that meet no matrix product
    "norm",
    "bias",
]


class Weight(NamedTuple):
    """``copies`` tensors of ``rows`` x ``columns`` (out x in), of which one token passes through ``used``."""

    name: str
    role: str  # a Role
    rows: int
    columns: int = 1
    copies: int = 1
    used: int = 1
    layer: int | None = None

    @property
    def area(self) -> int:
        """Numbers in one copy."""
        return self.rows * self.columns


class StateSize(NamedTuple):
    """Numbers that one layer keeps of one sequence."""

    per_token: Number = 0  #: for each token, as a cache does
    recurrent: Number = 0  #: whatever its length, in the wide dtype of a recurrence
    constant: Number = 0  #: whatever its length, in the model's dtype


class Flops(NamedTuple):
    """FLOPs of one layer and one sequence in a pass, beside those of its weights on the new tokens."""

    linear: Number = 0  #: weights applied once more to what is cached
    attention: Number = 0  #: scores and values
    recurrence: Number = 0  #: convolutions and scans


class MixerConfig(Protocol):
    """What mixes the tokens of a layer, as data: its module class and its closed forms.

    ``module`` names the class that realises it, ``"package.module:Class"``, called with (config, hidden_size).
    """

    module: ClassVar[str]

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        """Every tensor of the mixer; the norm before it is the layer's."""

    def state(self) -> StateSize:
        """What it keeps of one sequence."""

    def flops(self, context: Number, new_tokens: Number, *, causal: bool = False, form: str = "auto") -> Flops:
        """FLOPs of ``new_tokens`` after ``context``; ``causal`` leaves out pairs that the mask hides."""

    def intensity(
        self, *, bytes_per_element: float, recurrent_bytes_per_element: float, new_tokens: int, form: str
    ) -> float:
        """FLOPs for each byte of state that a decode step moves, for a long context."""

    def cache_share(self, tensor_parallel: Number) -> Number:
        """Share of what grows with each token that the fullest of t GPUs holds, heads dealt whole."""

    def summed(self) -> tuple[Number, ...]:
        """Numbers a token in each all-reduce inside the mixer, besides that of its output."""

    def exchanged(self) -> tuple[Number, Number]:
        """Numbers a token that travel to a cache which lies along the sequence, and back: queries, results."""


class FeedForwardConfig(Protocol):
    """What transforms each token by itself, as data; ``module`` as in :class:`MixerConfig`."""

    module: ClassVar[str]

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        """Every tensor of it. Of those in several copies a token uses ``used``."""


def pairs(context: Number, new_tokens: Number, causal: bool) -> Number:
    """Pairs of query and key that T new tokens meet after S held: T (S + T), or those that a causal mask leaves."""
    if causal:
        return new_tokens * context + new_tokens * (new_tokens + 1) // 2
    return new_tokens * (context + new_tokens)


def gated_weights(hidden: int, width: int, role: Role, copies: int = 1, used: int = 1) -> Iterator[Weight]:
    """The three matrices of a gated feed-forward."""
    yield Weight("gate_proj", role, width, hidden, copies, used)
    yield Weight("up_proj", role, width, hidden, copies, used)
    yield Weight("down_proj", role, hidden, width, copies, used)


def distinct(copies: Number, used: Number, tokens: Number) -> Number:
    """Copies that n tokens are expected to use together, each ``used`` of them at random: E (1 - (1 - k/E)^n)."""
    return copies * (1 - (1 - used / copies) ** tokens)


def positive_fields(owner: object, *names: str) -> None:
    """Check that fields of a frozen config are positive integers, and make them plain ones."""
    for name in names:
        value = whole(f"{type(owner).__name__}.{name}", getattr(owner, name))
        object.__setattr__(owner, name, value)  # a plain integer, whatever kind it came as


def is_known(*values: Number) -> bool:
    """Whether the values can be compared: a check of symbols is left to whoever gives them their values."""
    return not is_symbolic(*values)
